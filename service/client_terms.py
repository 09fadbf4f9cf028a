"""What every client of the service says and gets, by whatever way it asks.

``RolloutOptions`` are the fields of ``RolloutBody`` beside the prompts: the same names, the same
defaults, checked by the same schema before anything is sent.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pydantic import ValidationError

from actors.rollout_api import RolloutStatus
from placement.samples import FinishReason
from service.errors import request_error
from service.schemas import RolloutBody, SampleAnswer, SampleStartBody, SamplingBody

RECONNECT_S = 60.0
"""How long the service waits for a client of ours that has lost its connection."""


class RolloutOptions(TypedDict, total=False):
    """See ``service.schemas.RolloutBody``."""

    n: int
    num_started: int | None
    seed: int | None
    id: str | None
    strategy: Literal["elastic", "static"]
    priority: int
    deadline_s: float | None
    abort_on_disconnect: bool
    reconnect_s: float
    samples: list[SampleStartBody] | None
    sample_samplings: list[list[SamplingBody]] | None
    replay_stop_tokens: list[list[int]] | None


Prompts = Sequence[str | Sequence[int]]


def body_of(prompts: Prompts, sampling: SamplingBody, options: RolloutOptions) -> RolloutBody:
    """The request of one call. It has an id and a seed even where the caller gave none: whatever
    happens on the way, it can be sent again and means the same rollout.

    Raises: RequestError.
    """
    fields: dict[str, Any] = {"reconnect_s": RECONNECT_S, **options}
    fields["prompts"] = [p if isinstance(p, str) else list(p) for p in prompts]
    fields["sampling"] = sampling
    if fields.get("id") is None:
        fields["id"] = f"c-{secrets.token_hex(12)}"
        if fields.get("seed") is None:
            fields["seed"] = secrets.randbits(63)
    try:
        return RolloutBody.model_validate(fields)
    except ValidationError as error:
        raise request_error(error) from error


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A rollout and its samples, prompt by prompt."""

    rollout: RolloutStatus
    samples: tuple[SampleAnswer, ...]

    @classmethod
    def of(cls, rollout: RolloutStatus, samples: Sequence[SampleAnswer]) -> "RolloutResult":
        in_order = sorted(samples, key=lambda sample: (sample.prompt_index, sample.sample_index))
        return cls(rollout, tuple(in_order))

    @property
    def finished(self) -> tuple[SampleAnswer, ...]:
        """Those that ended by themselves, and not by an abort or a failure."""
        ended = (FinishReason.STOP, FinishReason.LENGTH)
        return tuple(sample for sample in self.samples if sample.finish_reason in ended)
