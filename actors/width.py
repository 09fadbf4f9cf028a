"""The width of the group, as the release rule wants it: at most one change at a time, and
leases for growth awaited beside it, so that a group that wants to grow can still shrink.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from actors.attempts import Attempts
from actors.backlog import Backlog
from actors.concurrently import end
from actors.crew import Crew
from actors.foresight import Foresight
from actors.kv_moves import KvMoves
from actors.outlook import view_for_width
from actors.reconfigure import GroupLostError, Reconfiguration
from actors.roster import Worker
from placement.errors import FlexFloorError
from placement.ids import WorkerId
from placement.membership import Phase
from placement.release import IdlePolicy, ReleaseRule
from placement.views import WidthDecision

_log = logging.getLogger(__name__)

_MAX_FAILURES = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Width:
    """Args:
    listen: begin to collect what a worker reports.
    wake: ask for a turn of the loop.
    say: is told what growth waits for.
    """

    def __init__(
        self,
        crew: Crew,
        backlog: Backlog,
        moves: KvMoves,
        release_rule: ReleaseRule,
        foresight: Foresight | None,
        listen: Callable[[Worker], None],
        wake: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._crew = crew
        self._backlog = backlog
        self._moves = moves
        self._release_rule = release_rule
        self._foresight = foresight
        self._listen = listen
        self._wake = wake
        self._say = say
        self.change: Reconfiguration | None = None
        """The change in progress."""
        self.operations: deque[Reconfiguration] = deque(
            maxlen=crew.settings.coordinator.max_kept_operations
        )
        self.wanted_workers = crew.settings.group.max_workers
        self._carrying: asyncio.Task[None] | None = None
        self._acquiring: asyncio.Task[list[Worker]] | None = None
        self._acquiring_since = 0.0
        self._interval_s = crew.settings.coordinator.min_reconfigure_interval_s
        first_pause_s = max(self._interval_s, _FIRST_PAUSE_S)
        self._changes = Attempts(_MAX_FAILURES, first_pause_s, _LONGEST_PAUSE_S, crew.clock)
        self._growths = Attempts(_MAX_FAILURES, first_pause_s, _LONGEST_PAUSE_S, crew.clock)

    @property
    def growing(self) -> bool:
        """Leases are awaited."""
        return self._acquiring is not None

    @property
    def as_wide_as_it_gets(self) -> bool:
        """All workers are there, or the rest could not be had."""
        full = len(self._crew.roster.members) == self._crew.settings.group.max_workers
        given_up = bool(self._growths.failures) or self._changes.exhausted
        return self.change is None and (full or given_up)

    @property
    def pause_s(self) -> float:
        """How long until something that must wait may be tried; 0 if nothing waits."""
        pauses_s = [self._changes.pause_s, self._growths.pause_s]
        return min((pause_s for pause_s in pauses_s if pause_s > 0), default=0.0)

    def leaving(self) -> frozenset[WorkerId]:
        """Who gets no more samples: leavers, from the decision on."""
        if self.change is None or self.change.progress.ended:
            return frozenset()
        return self.change.leavers

    def renew(self) -> None:
        """There is new work: what was given up is worth another try."""
        for attempts in (self._changes, self._growths):
            if attempts.failures:
                attempts.reset()

    async def steer(self, policy: IdlePolicy) -> bool:
        """Decide, and begin what was decided. False: nobody at all is to stay."""
        if self.change is not None:
            return True
        view = view_for_width(self._crew, self._backlog, self._foresight, self._num_changes())
        decision = self._release_rule(view, policy)
        now_wide = len(self._crew.roster.members)
        self.wanted_workers = decision.width
        arrived = self._take_arrived()
        joiners = arrived[: max(0, decision.width - now_wide)]
        await self._crew.kill(arrived[len(joiners) :])
        if joiners:
            self._begin(decision, joiners, self._acquiring_since)
        elif decision.width > now_wide:
            if self._acquiring is None and self._growths.may_try and self._changes.may_try:
                self._acquiring_since = self._crew.clock()
                self._acquiring = asyncio.ensure_future(self._acquire(decision.width - now_wide))
        elif 0 < decision.width < now_wide and self._changes.may_try:
            self._begin(decision, [], self._crew.clock())
        return decision.width > 0

    async def forgo_growth(self) -> None:
        """Nobody joins any more; leases that have arrived go back. A request that is under way
        ends within one slice of it, because nothing is wanted."""
        self.wanted_workers = len(self._crew.roster.members)
        if self._acquiring is not None and self._acquiring.done():
            arrived, self._acquiring = self._acquiring.result(), None
            await self._crew.kill(arrived)

    def _num_changes(self) -> int:
        """Releases that this load has seen to their end. A group that grows back, or for new work,
        uses none of them up."""
        return sum(
            bool(op.leavers) and op.load == self._backlog.load and op.progress.phase is Phase.DONE
            for op in self.operations
        )

    def load_ended(self) -> None:
        """What was predicted for it can be held against what came."""
        for op in self.operations:
            if op.load == self._backlog.load:
                op.report.load_ended(self._backlog.load_steps)

    async def _acquire(self, count: int) -> list[Worker]:
        def still_wanted() -> bool:
            return self.wanted_workers > len(self._crew.roster.members)

        try:
            return await self._crew.acquire(count, 1, self._say, still_wanted)
        except FlexFloorError as error:
            _log.warning("leases could not be acquired: %s", error)
            return []
        finally:
            self._wake()

    def _take_arrived(self) -> list[Worker]:
        """Workers whose leases have arrived."""
        if self._acquiring is None or not self._acquiring.done():
            return []
        arrived, self._acquiring = self._acquiring.result(), None
        if arrived:
            self._growths.reset()
        else:
            self._growths.fail()
        return arrived

    def _begin(self, decision: WidthDecision, joiners: list[Worker], decided_at: float) -> None:
        _log.info("%s: %s", decision.reason, decision.explanation)
        self.change = Reconfiguration(
            self._crew, self._backlog, self._moves, decision, joiners, decided_at, self._listen
        )
        self.operations.append(self.change)
        self._carrying = asyncio.ensure_future(self.change.run())
        self._carrying.add_done_callback(lambda _: self._wake())

    def reap(self) -> str:
        """Draw the consequences of a change that has ended; returns why the group is lost, if
        it is."""
        if self.change is None or self._carrying is None or not self._carrying.done():
            return ""
        error = None if self._carrying.cancelled() else self._carrying.exception()
        ended, self.change, self._carrying = self.change, None, None
        if error is not None:
            ended.break_off(str(error))
            if not isinstance(error, GroupLostError):
                _log.error("a change of the group failed", exc_info=error)
            return str(error) or repr(error)
        if ended.progress.phase is Phase.ROLLED_BACK:
            _log.warning("rolled back: %s", ended.progress.error)
            self._changes.fail()
        else:
            if self._foresight is not None:
                self._foresight.measured.add_change(ended.status().pause_s)
            self._changes.reset()
            self._changes.not_before = self._crew.clock() + self._interval_s
        return ""

    async def break_off(self, reason: str) -> None:
        """Whatever is under way ends here; its workers are still on the roster."""
        await end(self._carrying, self._acquiring)
        if self.change is not None:
            self.change.break_off(reason)
        self.change = self._carrying = self._acquiring = None
