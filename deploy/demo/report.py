"""From the demo's records to its report: pure arithmetic, no clock, no files.

Every number is measured: usage at the leases, tokens and logprobs from the answers, phases
from the operations, borrowing from the other job's own records.
"""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from actors.rollout_api import OperationStatus, ReleasedSlot, SampleResult
from deploy.demo.records import BorrowedSlot, DemoRecords, Machine, Replay
from deploy.report.figures import RolloutFigures, figures_from, ratio
from placement.membership import Phase

CAVEAT = (
    "All workers share the cores of one machine, so a step of a narrow group is faster for a "
    "reason that GPUs do not have: worker-steps are the headline, seconds are given beside them."
)

ORACLE = (
    "The planner was shown the lengths that are replayed: an oracle, which no real rollout has. "
    "What is left of the predictions' error does not come from lengths."
)

SampleKey = tuple[int, int]
"""(prompt index, sample index): the same sample in two rollouts."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two rollouts, sample by sample.

    Attributes:
        identical_tokens: every sample is in both, with the same tokens.
        max_abs_logprob_diff: over all tokens; None if a token has no counterpart.
    """

    samples_compared: int
    identical_tokens: bool
    max_abs_logprob_diff: float | None


@dataclass(frozen=True, slots=True)
class BorrowedRelease:
    """A released slot on which the other job was seen.

    Attributes:
        release_to_borrowed_s: removal of the lease to the first line of the other job's actor.
        decision_to_borrowed_s: from the decision, the preparation and the move included.
    """

    node_id: str
    slot: str
    release_to_borrowed_s: float
    decision_to_borrowed_s: float
    started_before_rollout_end: bool


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """One change of the group. The step medians show what preparing costs those who decode;
    None where no step fell into the interval. Predicted and measured steps count from the
    decision to the rollout's end; None where nothing was predicted."""

    workers_from: int
    workers_to: int
    reason: str
    explanation: str
    phase: str
    error: str
    at_s: float
    finished_ratio_at_start: float
    pause_ms: float
    phases_ms: dict[str, float]
    first_step_ms: float
    gap_ms: float
    moved_samples: int
    experts_per_worker: tuple[int, ...]
    received_bytes: int
    step_before_prepare_ms: float | None
    step_during_prepare_ms: float | None
    borrowed: tuple[BorrowedRelease, ...]
    predicted_steps: float | None = None
    measured_steps: int | None = None
    steps_error_ratio: float | None = None

    @property
    def uneven(self) -> bool:
        return len(set(self.experts_per_worker)) > 1


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole result; ``broken_promises`` is filled by ``deploy.demo.promises``.

    Attributes:
        oracle: what was known that no real rollout knows; empty: nothing.
    """

    machine: Machine
    trace_sha256: str
    short: bool
    static: RolloutFigures
    elastic: RolloutFigures
    worker_step_ratio: float
    worker_s_ratio: float
    steps_ratio: float
    median_steps_error_ratio: float | None
    comparison: Comparison
    moved_samples: int
    uneven_maps: int
    reconfigurations: tuple[Reconfiguration, ...]
    borrowed: tuple[BorrowedSlot, ...]
    regrowth: tuple[Reconfiguration, ...]
    regrown_comparison: Comparison | None
    regrown_workers: int | None
    oracle: str = ""
    caveat: str = CAVEAT
    broken_promises: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON, with the comparison's numbers at the top."""
        content = asdict(self)
        comparison = content.pop("comparison")
        machine = content.pop("machine")
        plain = {"commit": machine.pop("commit"), "versions": machine.pop("versions")}
        plain |= {"machine": machine, **comparison, **content}
        plain["reconfigurations"] = [_flat(change) for change in self.reconfigurations]
        plain["regrowth"] = [_flat(change) for change in self.regrowth]
        return plain


def make_report(records: DemoRecords) -> DemoReport:
    """Everything but the verdict."""
    elastic = records.elastic
    static_figures, elastic_figures = figures_of(records.static), figures_of(elastic)
    changes = tuple(
        _reconfiguration(op, elastic.started_at, elastic.ended_at, records.borrowed)
        for op in elastic.operations
    )
    regrown = records.regrown
    return DemoReport(
        machine=records.machine,
        trace_sha256=records.trace_sha256,
        short=records.short,
        static=static_figures,
        elastic=elastic_figures,
        worker_step_ratio=ratio(
            elastic_figures.tokens_per_occupied_worker_step,
            static_figures.tokens_per_occupied_worker_step,
        ),
        worker_s_ratio=ratio(
            elastic_figures.tokens_per_occupied_worker_s,
            static_figures.tokens_per_occupied_worker_s,
        ),
        steps_ratio=ratio(elastic_figures.steps, static_figures.steps),
        median_steps_error_ratio=_median_error(changes),
        comparison=compare(records.static, elastic),
        moved_samples=sum(len(arrived.result.worker_ids) > 1 for arrived in elastic.samples),
        uneven_maps=sum(change.uneven and change.phase == Phase.DONE for change in changes),
        reconfigurations=changes,
        borrowed=records.borrowed,
        regrowth=tuple(
            _reconfiguration(op, elastic.started_at, elastic.ended_at, records.borrowed)
            for op in records.regrow_operations
        ),
        regrown_comparison=(
            compare(records.static, regrown, records.regrown_max_tokens) if regrown else None
        ),
        regrown_workers=regrown.status.usage.peak_slots if regrown else None,
        oracle=ORACLE if records.known_lengths else "",
    )


def figures_of(replay: Replay) -> RolloutFigures:
    usage = replay.status.usage
    return figures_from(
        replay.status.strategy,
        makespan_s=usage.span_s,
        response_tokens=replay.status.response_tokens,
        steps=usage.steps,
        occupied_worker_s=usage.occupied_worker_s,
        freed_worker_s=usage.freed_worker_s,
        used_worker_s=usage.used_worker_s,
        occupied_worker_steps=usage.occupied_worker_steps,
    )


def longest_response(replay: Replay) -> int:
    """In tokens. No step makes more than one token of a sample, so it takes as many steps."""
    return max((len(arrived.result.token_ids) for arrived in replay.samples), default=0)


def compare(one: Replay, other: Replay, max_tokens: int | None = None) -> Comparison:
    """``max_tokens``: only so many tokens of ``one`` count (``other`` was cut there)."""
    ones, others = _by_key(one), _by_key(other)
    pairs = [(ones[key], others[key]) for key in ones.keys() & others.keys()]
    logprobs = [(a.logprobs[:max_tokens], b.logprobs) for a, b in pairs]
    if any(len(a) != len(b) for a, b in logprobs):
        largest_diff = None
    else:
        diffs = (abs(x - y) for a, b in logprobs for x, y in zip(a, b, strict=True))
        largest_diff = max(diffs, default=0.0)
    return Comparison(
        samples_compared=len(pairs),
        identical_tokens=ones.keys() == others.keys()
        and all(a.token_ids[:max_tokens] == b.token_ids for a, b in pairs),
        max_abs_logprob_diff=largest_diff,
    )


def _reconfiguration(
    op: OperationStatus,
    rollout_started_at: float,
    rollout_ended_at: float,
    borrowed: tuple[BorrowedSlot, ...],
) -> Reconfiguration:
    releases = (_borrowed_release(slot, rollout_ended_at, borrowed) for slot in op.released)
    return Reconfiguration(
        workers_from=len(op.old_members),
        workers_to=len(op.new_members),
        reason=op.reason,
        explanation=op.explanation,
        phase=op.phase,
        error=op.error,
        at_s=op.started_at - rollout_started_at,
        finished_ratio_at_start=op.finished_ratio_at_start,
        pause_ms=op.pause_s * 1e3,
        phases_ms={name: seconds * 1e3 for name, seconds in op.phases_s.items()},
        first_step_ms=op.first_step_s * 1e3,
        gap_ms=op.gap_s * 1e3,
        moved_samples=len(op.moved_samples),
        experts_per_worker=op.experts_per_worker,
        received_bytes=op.received_bytes,
        step_before_prepare_ms=_median_ms(op.steps_before_s),
        step_during_prepare_ms=_median_ms(op.steps_during_s),
        borrowed=tuple(release for release in releases if release is not None),
        predicted_steps=op.predicted.steps_with if op.predicted else None,
        measured_steps=op.measured_steps if op.predicted else None,
        steps_error_ratio=op.steps_error_ratio,
    )


def _borrowed_release(
    released: ReleasedSlot, rollout_ended_at: float, borrowed: tuple[BorrowedSlot, ...]
) -> BorrowedRelease | None:
    """The first time that the other job was on this slot after the release."""
    later = [
        b
        for b in borrowed
        if (b.node_id, b.slot) == (released.node_id, released.slot)
        and b.started_at >= released.removed_at
    ]
    if not later:
        return None
    first = min(later, key=lambda b: b.started_at)
    return BorrowedRelease(
        node_id=first.node_id,
        slot=first.slot,
        release_to_borrowed_s=first.started_at - released.removed_at,
        decision_to_borrowed_s=first.started_at - released.decided_at,
        started_before_rollout_end=first.started_at < rollout_ended_at,
    )


def _flat(change: Reconfiguration) -> dict[str, Any]:
    """A change with its first borrowed slot at the top (None where nobody borrowed)."""
    content = asdict(change)
    plain = {"from": content.pop("workers_from"), "to": content.pop("workers_to"), **content}
    first = min(change.borrowed, key=lambda b: b.release_to_borrowed_s, default=None)
    plain["uneven"] = change.uneven
    plain["release_to_borrowed_s"] = first.release_to_borrowed_s if first else None
    plain["borrower_node_and_slot"] = f"{first.node_id}/{first.slot}" if first else None
    plain["borrower_started_before_rollout_end"] = (
        first.started_before_rollout_end if first else None
    )
    return plain


def _by_key(replay: Replay) -> dict[SampleKey, SampleResult]:
    results = (arrived.result for arrived in replay.samples)
    return {(r.prompt_index, r.sample_index): r for r in results}


def _median_error(changes: tuple[Reconfiguration, ...]) -> float | None:
    """Of the predicted steps, whichever way they err."""
    errors = [abs(c.steps_error_ratio) for c in changes if c.steps_error_ratio is not None]
    return median(errors) if errors else None


def _median_ms(steps_s: tuple[float, ...]) -> float | None:
    return median(steps_s) * 1e3 if steps_s else None
