"""From a simulated rollout to its timeline: the same records as of a measured one. Pure."""

from collections.abc import Sequence

from deploy.report.figures import RolloutFigures, figures_from
from deploy.report.timeline import (
    Activity,
    GroupChange,
    Origin,
    RolloutTimeline,
    Span,
    Timelines,
    in_drawing_order,
)
from deploy.simulation.comparison import Task, play_task
from deploy.simulation.scenario import Scenario
from placement.simulate.history import Busy, History
from placement.simulate.outcome import Occupation, Outcome, WidthChange

NOTE = (
    "{name} ({model}, {workers} workers of {gpus} x {gpu}), seed {seed}: step times, memory and "
    "links from data sheets, lengths from a trace; nothing was measured"
)


def simulate_timelines(scenario: Scenario, tasks: Sequence[Task]) -> Timelines:
    """Play each task, which are of one scenario and seed, and keep what it looked like."""
    note = NOTE.format(
        name=scenario.name,
        model=scenario.model,
        workers=scenario.workers,
        gpus=scenario.gpus_per_worker,
        gpu=scenario.gpu,
        seed=tasks[0].seed,
    )
    rollouts = []
    for task in tasks:
        history = History()
        rollouts.append(timeline_of(play_task(task, history), history, scenario.workers))
    return Timelines(Origin.SIMULATED, note, tuple(rollouts))


def timeline_of(outcome: Outcome, history: History, num_slots: int) -> RolloutTimeline:
    return RolloutTimeline(
        name=outcome.policy,
        figures=_figures(outcome),
        slots={f"slot {slot}": _lane(slot, outcome, history) for slot in range(num_slots)},
        active_samples=_active_samples(outcome.num_samples, history.ends_s),
        changes=tuple(_change(change) for change in outcome.changes),
    )


def _figures(outcome: Outcome) -> RolloutFigures:
    freed_s = sum(
        span.end_s - span.start_s
        for slot in {o.slot for o in outcome.occupations}
        for span in _freed([o for o in outcome.occupations if o.slot == slot], outcome.span_s)
    )
    return figures_from(
        outcome.policy,
        makespan_s=outcome.span_s,
        response_tokens=outcome.total_tokens,
        steps=outcome.steps,
        occupied_worker_s=outcome.occupied_worker_s,
        freed_worker_s=freed_s,
        used_worker_s=0.0,  # nobody else is simulated
        occupied_worker_steps=outcome.worker_steps,
    )


def _lane(slot: int, outcome: Outcome, history: History) -> tuple[Span, ...]:
    leased = [o for o in outcome.occupations if o.slot == slot]
    busy = history.busy.get(slot, [])
    spans = [Span(Activity.DECODING, b.from_s, b.until_s) for b in busy]
    spans += _freed(leased, outcome.span_s)
    spans += [span for occupation in leased for span in _idle(occupation, busy)]
    spans += [
        Span(Activity.RECONFIGURING, c.at_s, c.ended_s)
        for c in outcome.changes
        if any(o.from_s <= c.at_s and c.ended_s <= o.until_s for o in leased)
    ]
    return in_drawing_order(spans)


def _freed(leased: Sequence[Occupation], end_s: float) -> list[Span]:
    """Between two leases of a slot and behind the last; not before the first."""
    starts_s = [o.from_s for o in leased[1:]] + [end_s]
    return [
        Span(Activity.FREED, o.until_s, start_s)
        for o, start_s in zip(leased, starts_s, strict=bool(leased))
    ]


def _idle(leased: Occupation, busy: Sequence[Busy]) -> list[Span]:
    here = [b for b in busy if leased.from_s <= b.from_s < leased.until_s]
    edges_s = [leased.from_s, *(at_s for b in here for at_s in (b.from_s, b.until_s))]
    edges_s.append(leased.until_s)
    return [Span(Activity.IDLE, edges_s[i], edges_s[i + 1]) for i in range(0, len(edges_s), 2)]


def _active_samples(num_samples: int, ends_s: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """Samples that end in the same step are one point."""
    left = {0.0: num_samples}
    for ended, at_s in enumerate(ends_s, start=1):
        left[at_s] = num_samples - ended
    return tuple(left.items())


def _change(change: WidthChange) -> GroupChange:
    return GroupChange(
        at_s=change.at_s,
        ended_s=change.ended_s,
        workers_from=change.old_width,
        workers_to=change.new_width,
        reason=change.reason,
        explanation=change.explanation,
        moved_samples=change.moved_samples,
        predicted_steps=change.predicted.steps_with if change.predicted else None,
        measured_steps=change.steps_after,
    )
