"""How the dialect of ``trl vllm-serve`` answers."""

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.token_detail import Alternatives, PromptScores
from service.details import alternatives_of, clamped
from service.responses import Portion, Responses

_NOWHERE = -np.inf  # a token without a logprob: its place is filled up


async def generated(responses: Responses, *, with_logprobs: bool) -> dict[str, Any]:
    """Samples prompt by prompt; per token, itself and its alternatives, most likely first."""
    portions = await responses.whole()
    rows = [_rows(portion) for portion in portions] if with_logprobs else None
    return {
        "prompt_ids": responses.generation.rollout.prompts,
        "completion_ids": [portion.token_ids for portion in portions],
        "logprobs": rows and [[[clamped(p) for _, p in row] for row in of] for of in rows],
        "logprob_token_ids": rows and [[[token for token, _ in row] for row in of] for of in rows],
    }


def _rows(portion: Portion) -> list[Alternatives]:
    others = alternatives_of(portion.detail, len(portion.token_ids))
    drawn = zip(portion.token_ids, portion.logprobs, others, strict=True)
    return [_ranked(token_id, logprob, row) for token_id, logprob, row in drawn]


def _ranked(token_id: int, logprob: float, others: Alternatives) -> Alternatives:
    """The token among its alternatives, once."""
    if any(other == token_id for other, _ in others):
        return others
    return tuple(sorted((*others, (token_id, logprob)), key=lambda pair: -pair[1]))


class Scored:
    """What was asked for of each sequence, behind its prompt."""

    def __init__(self, prompt_lengths: list[int], num_top: int) -> None:
        self._prompt_lengths = prompt_lengths
        self._num_top = num_top

    def as_lists(
        self, sequences: tuple[tuple[int, ...], ...], scores: list[PromptScores | None]
    ) -> dict[str, Any]:
        told = [
            [_ranked(token, logprob, row) for token, logprob, row in of]
            for of in self._behind_prompts(sequences, scores)
        ]
        return {
            "logprobs": [[[clamped(p) for _, p in row] for row in of] for of in told],
            "logprob_token_ids": [[[token for token, _ in row] for row in of] for of in told],
        }

    def as_arrays(
        self, sequences: tuple[tuple[int, ...], ...], scores: list[PromptScores | None]
    ) -> dict[str, Any]:
        """Little-endian float32 and int32 in C order, as base64; what is missing is -inf and 0."""
        told = self._behind_prompts(sequences, scores)
        lengths = [len(of) for of in told]
        shape = (len(told), max(lengths, default=0), self._num_top)
        logprobs = np.full(shape, _NOWHERE, "<f4")
        token_ids = np.zeros(shape, "<i4")
        actual_logprobs = np.full((*shape[:2], 1), _NOWHERE, "<f4")
        actual_ids = np.zeros((*shape[:2], 1), "<i4")
        for i, of in enumerate(told):
            for j, (token, logprob, row) in enumerate(of):
                actual_logprobs[i, j], actual_ids[i, j] = logprob, token
                for k, (other, other_logprob) in enumerate(row[: self._num_top]):
                    token_ids[i, j, k], logprobs[i, j, k] = other, other_logprob
        return {
            "logprobs_b64": _base64(logprobs),
            "token_ids_b64": _base64(token_ids),
            "actual_logprobs_b64": _base64(actual_logprobs),
            "actual_token_ids_b64": _base64(actual_ids),
            "shape": shape,
            "completion_lengths": lengths,
        }

    def _behind_prompts(
        self, sequences: tuple[tuple[int, ...], ...], scores: list[PromptScores | None]
    ) -> list[list[tuple[int, float, Alternatives]]]:
        """Token, its logprob and its alternatives; nothing precedes a sequence's first token."""
        told = []
        for sequence, length, of in zip(sequences, self._prompt_lengths, scores, strict=True):
            rows = (
                []
                if of is None
                else [
                    (token, logprob, row)
                    for token, (logprob, _), row in zip(
                        sequence[1:], of.chosen(), of.alternatives(), strict=True
                    )
                ]
            )
            told.append(rows[max(0, length - 1) :])
        return told


def _base64(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()
