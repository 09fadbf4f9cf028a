"""Running samples that go on at another member, so that none reads much more KV than the rest:
which moves were asked for, and where the samples go once their worker has let go of them.

The dispatch rule says who is to move. Each of them is cancelled at its source, which may keep
its KV for whoever comes for it (``actors.kv_moves``); it then waits, like any sample, and is
bound at its destination in the turn in which that is heard.

Invariants:
    - The moves of one plan are all there is under way: the next look comes when the last of them
      has been bound, or has ended by itself.
    - Nothing is bound where it has no room at its full length. Who finds its place taken waits
      at the head of the queue, and the dispatcher finds it one.
    - While the group changes, a sample goes back to where the plan of that change counts it.
    - Nothing here is needed after a coordinator's death: the journal says who waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.backlog import Backlog
from actors.concurrently import each_of
from actors.crew import Crew
from actors.kv_moves import KvMoves
from actors.protocol import Evicted
from actors.roster import Worker
from actors.sample_record import SampleRecord
from placement.errors import WorkerLostError
from placement.ids import SampleId, WorkerId
from placement.rooms import Room, kv_need_tokens
from placement.sample_moves import MoveChoice
from placement.views import Binding, Move


@dataclass(frozen=True, slots=True)
class _Asked:
    move: Move
    choice: MoveChoice


class Rebalancing:
    """Args:
    interval_steps: between two looks at the load.
    """

    def __init__(
        self, crew: Crew, backlog: Backlog, kv_moves: KvMoves, interval_steps: int
    ) -> None:
        self._crew = crew
        self._backlog = backlog
        self._kv_moves = kv_moves
        self._interval_steps = interval_steps
        self._looked_at_step = 0
        self._asked: dict[SampleId, _Asked] = {}
        backlog.when_sample_ends.append(self._ended)

    @property
    def due(self) -> bool:
        """Nothing is under way, and the last look is long enough ago."""
        steps = self._backlog.load_steps
        if steps < self._looked_at_step:  # another load
            self._looked_at_step = 0
        return not self._asked and steps - self._looked_at_step >= self._interval_steps

    async def begin(self, moves: Sequence[Move], lost: Callable[[Worker, str], None]) -> None:
        """Ask their sources to let go.

        Args:
            lost: is told of a source that has gone.
        """
        self._looked_at_step = self._backlog.load_steps
        calls: dict[tuple[WorkerId, bool], list[SampleId]] = {}
        for move in moves:
            record = self._backlog.record(move.sample_id)
            if record.finish_reason is not None or record.worker_id != move.source:
                continue
            # Its last token has no KV yet.
            choice = self._kv_moves.choose(record.context_tokens - 1)
            self._asked[move.sample_id] = _Asked(move, choice)
            calls.setdefault((move.source, choice.copies), []).append(move.sample_id)
        workers = self._crew.roster.workers
        outcomes = await each_of(
            workers[source].live.cancel(sample_ids, keep_kv)
            for (source, keep_kv), sample_ids in calls.items()
        )
        for (source, _), outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, WorkerLostError):
                lost(workers[source], str(outcome))

    def let_go(self, event: Evicted, source: Worker) -> bool:
        """A worker has let go of a sample that waits now; returns whether it was asked to."""
        asked = self._asked.get(event.sample_id)
        if asked is None:
            return False
        self._kv_moves.offer(event, source, asked.choice)
        return True

    def arrivals(self, leaving: frozenset[WorkerId], changing: bool) -> list[Binding]:
        """Where those go that were let go, as far as there is room.

        Args:
            leaving: get no samples.
            changing: a change of the group is in progress.
        """
        waiting = [
            (asked.move, record)
            for sample_id, asked in self._asked.items()
            if (record := self._backlog.record(sample_id)).worker_id is None
        ]
        rooms: dict[WorkerId, Room] = {}
        bindings = []
        for move, record in waiting:
            del self._asked[move.sample_id]
            goal = move.source if changing else move.destination
            if goal in leaving or goal not in self._crew.roster.members:
                continue
            room = rooms.get(goal) or rooms.setdefault(goal, self._room(goal))
            need_tokens = self._need_tokens(record)
            if room.fits(need_tokens):
                room.add(need_tokens)
                bindings.append(Binding(move.sample_id, goal))
        return bindings

    def give_up(self) -> None:
        """The group is lost, and with it every source."""
        self._asked.clear()

    def _ended(self, record: SampleRecord) -> None:
        """It ended before it could move, or while it waited."""
        self._asked.pop(record.sample.sample_id, None)

    def _room(self, worker_id: WorkerId) -> Room:
        worker = self._crew.roster.workers[worker_id]
        view = worker.view(self._crew.settings.group.max_samples_per_worker)
        here = self._backlog.running_on(worker_id)
        return Room(
            worker_id,
            0,
            view.max_samples,
            view.kv_capacity_tokens,
            len(here),
            sum(map(self._need_tokens, here)),
        )

    def _need_tokens(self, record: SampleRecord) -> int:
        block_tokens = self._crew.capacity.facts.kv_block_tokens
        return kv_need_tokens(record.sample.max_context_tokens, block_tokens)
