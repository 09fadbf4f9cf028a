"""What a sample is, from the request down to the engine.

Invariant: a sample's noise depends only on ``seed`` and the position of the token
(prompt tokens included), never on where or beside whom the sample decodes.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum

from placement.ids import SampleId


class FinishReason(StrEnum):
    """How a sample ended. ``STOP`` and ``LENGTH`` are finished, the others are partial."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy.

    Attributes:
        max_tokens: bound on the whole response, moves included.
        top_k: 0 keeps every token.
        stop_token_ids: the response ends with the first of these (which it contains).
        ignore_eos: do not stop at the model's end-of-sequence token.
        top_logprobs: tell so many of the most likely alternatives of each token, too.
        prompt_logprobs: tell how likely the prompt's own tokens were, each with so many
            alternatives; None: do not.
        routed_experts: tell which experts each token was routed to.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    routed_experts: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to be decoded, with what has been decoded already.

    Attributes:
        generated_ids: tokens the response already has (a moved sample); the engine
            recomputes their KV and goes on behind them.
        num_given: how many of those came with the request and were not decoded here.
        replay_stop_tokens: replay of recorded lengths only: the engine ends the response
            at this many tokens with ``STOP``. Dispatch, prediction and planning never read it,
            unless ``planning.known_lengths`` makes an oracle of them.
    """

    sample_id: SampleId
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    generated_ids: tuple[int, ...] = ()
    replay_stop_tokens: int | None = None
    num_given: int = 0

    @property
    def context_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def begun(self) -> bool:
        """Some of the response was decoded here (before it moved)."""
        return len(self.generated_ids) > self.num_given

    @property
    def untold_from(self) -> int:
        """First position of the context whose forward has yet to be seen for what is asked beside
        tokens; those before may be recomputed or copied, whatever they show was told."""
        wanted = self.sampling
        if not self.begun and (wanted.routed_experts or wanted.prompt_logprobs is not None):
            return 0
        return self.context_tokens - 1

    @property
    def max_context_tokens(self) -> int:
        return len(self.prompt_ids) + self.sampling.max_tokens

    def continued(self, generated_ids: tuple[int, ...]) -> "Sample":
        """The same sample with all the tokens it has now."""
        return replace(self, generated_ids=generated_ids)


def derive_sample_seed(request_seed: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample of a request: 63 bits of SHA-256 over the three numbers.

    A hash, not ``seed + index``: neighbouring requests must not share samples.
    """
    text = f"{request_seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
