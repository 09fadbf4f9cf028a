"""What the fake coordinator tells beside ids and logprobs: numbers that tests can compute."""

import numpy as np

from actors.rollout_api import RolloutRequest
from actors.token_detail import PromptScores, RoutingLayout, TokenDetail
from placement.samples import Sampling

ROUTING = RoutingLayout(layers=2, top_k=2, dtype="uint16")


def row(position: int) -> list[int]:
    """Experts of a position, all layers."""
    return [position * 10 + index for index in range(ROUTING.layers * ROUTING.top_k)]


def prompt_logprob(position: int) -> float:
    return -1.0 - position / 8


def detail_of(
    request: RolloutRequest, prompt_index: int, token_ids: tuple[int, ...]
) -> TokenDetail | None:
    """Alternatives of each token are the ids above it; of the prompt's tokens those above them."""
    samplings = request.samplings
    sampling = samplings[prompt_index if len(samplings) > 1 else 0]
    prompt = request.prompts[prompt_index]
    if not (sampling.top_logprobs or sampling.routed_experts) and sampling.prompt_logprobs is None:
        return None
    first = [row(position) for position in range(len(prompt))]
    per_token = [first, *([row(len(prompt) + at)] for at in range(len(token_ids) - 1))]
    return TokenDetail(
        top_logprobs=tuple(
            tuple((token + 1 + n, -2.0 - n) for n in range(sampling.top_logprobs))
            for token in token_ids
        )
        if sampling.top_logprobs
        else (),
        routed=tuple(np.array(rows, np.uint16).tobytes() for rows in per_token[: len(token_ids)])
        if sampling.routed_experts
        else (),
        layout=ROUTING if sampling.routed_experts else None,
        prompt=_scores(sampling, prompt) if token_ids else None,
    )


def _scores(sampling: Sampling, prompt: tuple[int, ...]) -> PromptScores | None:
    num_top = sampling.prompt_logprobs
    if num_top is None:
        return None
    ids = [[token + 1 + n for n in range(num_top)] for token in prompt[1:]]
    return PromptScores(
        np.array([prompt_logprob(at) for at in range(1, len(prompt))], np.float32).tobytes(),
        np.arange(1, len(prompt), dtype=np.int32).tobytes(),
        num_top,
        np.array(ids, np.int32).tobytes(),
        np.array([[-3.0 - n for n in range(num_top)] for _ in ids], np.float32).tobytes(),
    )
