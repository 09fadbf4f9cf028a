"""The coordinator's records as the views that decisions look at."""

from collections.abc import Iterable

from actors.backlog import Backlog
from actors.crew import Crew
from actors.foresight import Foresight
from actors.rollout_api import Strategy
from actors.sample_record import SampleRecord
from placement.ids import WorkerId
from placement.views import GroupView, SampleView


def view_for_width(
    crew: Crew, backlog: Backlog, foresight: Foresight | None, num_changes: int
) -> GroupView:
    """All members with all samples."""
    queued = backlog.queued(Strategy.ELASTIC) + backlog.queued(Strategy.STATIC)
    return _view(crew, backlog, foresight, queued, frozenset(), num_changes)


def view_for_dispatch(
    crew: Crew,
    backlog: Backlog,
    foresight: Foresight | None,
    strategy: Strategy,
    leaving: frozenset[WorkerId],
) -> GroupView:
    """Who stays, and the samples of one strategy that wait."""
    return _view(crew, backlog, foresight, backlog.queued(strategy), leaving)


def _view(
    crew: Crew,
    backlog: Backlog,
    foresight: Foresight | None,
    queued: Iterable[SampleRecord],
    leaving: frozenset[WorkerId],
    num_changes: int = 0,
) -> GroupView:
    def view(record: SampleRecord) -> SampleView:
        return record.view(foresight.belief_of(record) if foresight else None)

    capacity, group = crew.capacity, crew.settings.group
    workers = [w for w in crew.roster.member_workers() if w.worker_id not in leaving]
    there = {worker.worker_id for worker in workers}
    return GroupView(
        workers=tuple(worker.view(group.max_samples_per_worker) for worker in workers),
        running=tuple(view(r) for r in backlog.running() if r.worker_id in there),
        queued=tuple(view(record) for record in queued),
        num_experts=capacity.facts.num_experts,
        kv_tokens_at_width=capacity.kv_tokens_at_width,
        max_workers=group.max_workers,
        floor_workers=crew.least_width,
        any_finished=backlog.any_finished,
        kv_block_tokens=capacity.facts.kv_block_tokens,
        nobody_leaves=any(
            rollout.request.strategy is Strategy.STATIC for rollout in backlog.open_rollouts()
        ),
        steps=backlog.load_steps,
        num_ended=backlog.load_ended,
        num_changes=num_changes,
    )
