"""Who was on which slot and how many samples were left, when: records that a picture is drawn
from and that are written as JSON. Pure.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

from deploy.report.figures import RolloutFigures


class Origin(StrEnum):
    """Where every number of a timeline comes from; the two are never in one."""

    MEASURED = "measured"
    SIMULATED = "simulated"


class Activity(StrEnum):
    """What a slot is used for. Later ones are drawn over earlier ones."""

    FREED = "freed"
    IDLE = "leased, idle"
    DECODING = "decoding"
    RECONFIGURING = "reconfiguring"
    BORROWED = "used by the other job"


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the rollout was accepted."""

    activity: Activity
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A change of the group. Steps count from the decision to the rollout's end; None where
    nothing was predicted."""

    at_s: float
    ended_s: float
    workers_from: int
    workers_to: int
    reason: str
    explanation: str
    moved_samples: int
    predicted_steps: float | None
    measured_steps: int | None


@dataclass(frozen=True, slots=True)
class RolloutTimeline:
    """One rollout.

    Attributes:
        slots: by name, in drawing order.
        active_samples: (seconds since acceptance, samples not yet ended), a point per change.
    """

    name: str
    figures: RolloutFigures
    slots: Mapping[str, tuple[Span, ...]]
    active_samples: tuple[tuple[float, int], ...]
    changes: tuple[GroupChange, ...]


@dataclass(frozen=True, slots=True)
class Timelines:
    """Rollouts to be compared.

    Attributes:
        note: how the numbers came about, for whoever sees nothing else.
    """

    origin: Origin
    note: str
    rollouts: tuple[RolloutTimeline, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def leased_slots(timeline: RolloutTimeline) -> tuple[tuple[float, int], ...]:
    """(seconds since acceptance, slots leased from then on), a point per change; the last one, at
    the rollout's end, has none."""
    changes: dict[float, int] = {timeline.figures.makespan_s: 0}
    for spans in timeline.slots.values():
        for span in spans:
            if span.activity in (Activity.DECODING, Activity.IDLE):
                changes[span.start_s] = changes.get(span.start_s, 0) + 1
                changes[span.end_s] = changes.get(span.end_s, 0) - 1
    counts = accumulate(change for _, change in sorted(changes.items()))
    return tuple(zip(sorted(changes), counts, strict=True))


def in_drawing_order(spans: list[Span]) -> tuple[Span, ...]:
    """Without empty ones."""
    order = list(Activity)
    return tuple(
        sorted(
            (span for span in spans if span.end_s > span.start_s),
            key=lambda span: (order.index(span.activity), span.start_s),
        )
    )
