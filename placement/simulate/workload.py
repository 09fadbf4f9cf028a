"""What is to be decoded: a batch of prompts with the lengths their responses will have.

Only the simulated engine reads the lengths; decisions get beliefs (``foresight``).
Shapes: N = samples, P = prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from placement.errors import PlanError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Workload:
    """Samples in the order in which they were asked for, the samples of a prompt together.

    Attributes:
        response_tokens_N: true lengths, at most ``max_response_tokens``.
        prompt_P: for each sample the index of its prompt.
        history: per prompt key the lengths of its responses in earlier rollouts.
    """

    prompt_tokens_N: Ints
    response_tokens_N: Ints
    prompt_N: Ints
    max_response_tokens: int
    history: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        counts = {len(self.prompt_tokens_N), len(self.response_tokens_N), len(self.prompt_N)}
        if counts == {0} or len(counts) != 1:
            raise PlanError(
                f"has arrays of {sorted(counts)} samples; all need as many, and at least one",
                field="workload",
            )
        if not 1 <= self.response_tokens_N.min() <= self.longest_tokens <= self.max_response_tokens:
            raise PlanError(
                f"has responses of {self.response_tokens_N.min()} to {self.longest_tokens} tokens; "
                f"they must be between 1 and {self.max_response_tokens}",
                field="workload",
            )

    def __len__(self) -> int:
        return len(self.response_tokens_N)

    @property
    def longest_tokens(self) -> int:
        return int(self.response_tokens_N.max())

    @property
    def total_tokens(self) -> int:
        return int(self.response_tokens_N.sum())

    @cached_property
    def max_context_tokens(self) -> int:
        return int(self.prompt_tokens_N.max()) + self.max_response_tokens

    def prompt_key(self, sample: int) -> str:
        return prompt_key(int(self.prompt_N[sample]))


def prompt_key(prompt: int) -> str:
    return f"p{prompt}"


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt of a trace: its responses there, and those of an earlier run to the same prompt."""

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    history_tokens: tuple[int, ...]


def resample(
    recorded: Sequence[RecordedPrompt],
    num_samples: int,
    samples_per_prompt: int,
    max_response_tokens: int,
    seed: int,
) -> Workload:
    """A batch of the size wanted, in random order.

    Prompts are drawn in random order, all once before any is drawn again; a copy counts as a
    prompt of its own. Where a prompt has as many recorded responses as wanted and comes for the
    first time it has exactly these; else they, and always for a copy its history, are drawn with
    replacement. Lengths are cut at the limit.
    """
    if not recorded:
        raise PlanError("has no prompts; choose another run", field="trace")
    rng = np.random.default_rng(seed)
    num_prompts = -(-num_samples // samples_per_prompt)
    rounds = -(-num_prompts // len(recorded))
    drawn = np.concatenate([rng.permutation(len(recorded)) for _ in range(rounds)])[:num_prompts]
    prompt_tokens, responses, history = [], [], {}
    for number, index in enumerate(drawn):
        prompt, first = recorded[index], number < len(recorded)
        lengths = np.array(prompt.response_tokens)
        if not first or len(lengths) != samples_per_prompt:
            lengths = rng.choice(lengths, samples_per_prompt)
        past = np.array(prompt.history_tokens, dtype=np.int64)
        if not first and len(past):
            past = rng.choice(past, len(past))
        if len(past):
            history[prompt_key(number)] = tuple(np.clip(past, 1, max_response_tokens).tolist())
        prompt_tokens += [prompt.prompt_tokens] * samples_per_prompt
        responses.append(lengths)
    prompts = np.repeat(np.arange(num_prompts), samples_per_prompt)
    return Workload(
        prompt_tokens_N=np.array(prompt_tokens)[:num_samples],
        response_tokens_N=np.clip(np.concatenate(responses), 1, max_response_tokens)[:num_samples],
        prompt_N=prompts[:num_samples],
        max_response_tokens=max_response_tokens,
        history=history,
    )


def synthetic_prompts(
    num_prompts: int,
    samples_per_prompt: int,
    seed: int,
    median_tokens: float = 3000.0,
    between_sigma: float = 0.8,
    within_sigma: float = 0.6,
    prompt_tokens: int = 200,
) -> tuple[RecordedPrompt, ...]:
    """The log-normal family: sigma of log length between prompts and within one prompt.

    History is another draw from the same prompts.
    """
    rng = np.random.default_rng(seed)
    mean = np.log(median_tokens) + between_sigma * rng.standard_normal((num_prompts, 1))
    shape = (2, num_prompts, samples_per_prompt)
    lengths = np.maximum(1, np.exp(mean + within_sigma * rng.standard_normal(shape))).astype(int)
    return tuple(
        RecordedPrompt(prompt_tokens, tuple(now), tuple(before))
        for now, before in zip(lengths[0].tolist(), lengths[1].tolist(), strict=True)
    )
