"""Pause and sleep: what was asked of the group, and how far it has come.

The wishes are set by the coordinator's callers; ``actors.steering`` takes the steps towards them
in its turns, because it alone changes the group. Invariants:

    - A wish is recorded in the store before the group stands still for it, and until it has been
      set going again, so a coordinator that comes back goes on standing still.
    - Whatever is waited for has a bound of its own (a step, a change, a start), or is what the
      caller asked to wait for (samples that run, with ``WAIT``).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from actors.backlog import Backlog
from actors.concurrently import all_of, each_of
from actors.control_api import PauseMode, PauseStatus, ServingState
from actors.crew import Crew
from actors.holding import Holding, HoldReason
from placement.errors import RequestError
from placement.ids import RolloutId, SampleId, WorkerId

_LET_GO_WAIT_S = 10.0  # a worker lets go at its next step boundary; a step is far shorter


class Pausing:
    """Args:
    abort: end the unfinished samples of a rollout, with their partials.
    wake_loop: ask for a turn of the loop.
    """

    def __init__(
        self,
        crew: Crew,
        backlog: Backlog,
        holding: Holding,
        abort: Callable[[RolloutId], Coroutine[Any, Any, Any]],
        wake_loop: Callable[[], None],
    ) -> None:
        self._crew = crew
        self._backlog = backlog
        self._holding = holding
        self._abort = abort
        self._wake_loop = wake_loop
        self._mode: PauseMode | None = None
        self._sleeps = False
        self._waking = False
        self._reached = True
        self._wishes = 0
        self._aborts = False
        self._error = ""
        self._letting_go_since: float | None = None
        self._changed = asyncio.Event()
        self.served_since = 0.0
        """No step can be expected from before this, if it serves."""

    # What is asked

    def pause(self, mode: PauseMode) -> None:
        self._aborts = self._aborts or mode is PauseMode.ABORT
        if self._sleeps:
            self._wish(self._mode, sleeps=True)
        else:
            self._wish(mode, sleeps=False)

    def resume(self) -> None:
        """Raises: RequestError."""
        if self._sleeps:
            raise RequestError("the group is asleep; wake it, which resumes it, too")
        self._wish(None, sleeps=False)

    def sleep(self, mode: PauseMode) -> None:
        self._aborts = self._aborts or mode is PauseMode.ABORT
        self._wish(mode, sleeps=True)

    def wake(self, *, stay_paused: bool) -> bool:
        """Returns whether there is a group to be founded now."""
        asleep = self._sleeps
        if asleep:
            self._waking, self._error = True, ""
        if asleep or not stay_paused:
            self._wish(PauseMode.KEEP if stay_paused else None, sleeps=False)
        return asleep

    def _wish(self, mode: PauseMode | None, *, sleeps: bool) -> None:
        if (mode, sleeps) != (self._mode, self._sleeps) or self._aborts:
            self._mode, self._sleeps, self._reached = mode, sleeps, False
            self._wishes += 1
            self.served_since = self._crew.clock()
        self._waking = self._waking and not sleeps
        self._backlog.nothing_begins = self.stands
        self._tell()
        self._wake_loop()

    def status(self) -> PauseStatus:
        state = self._state()
        waiting_for = ""
        if state is ServingState.WAKING:
            waiting_for = "a group"
        elif state is ServingState.PAUSING:
            num_running = len(self._backlog.running())
            waiting_for = f"a boundary between two steps; {num_running} samples run"
            if self._mode is PauseMode.WAIT:
                waiting_for = f"{len(self._begun())} samples that have begun"
        return PauseStatus(state, self._mode, waiting_for, self._error)

    def _state(self) -> ServingState:
        if self._waking:
            return ServingState.WAKING
        if not self.stands:
            return ServingState.SERVING
        if not self._reached:
            return ServingState.PAUSING
        return ServingState.ASLEEP if self._sleeps else ServingState.PAUSED

    async def until_settled(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while self.status().on_its_way:
                    await self._changed.wait()
        except TimeoutError:
            return  # the status says how far it is

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # What the loop looks at

    @property
    def stands(self) -> bool:
        """Paused or asleep, or to be: nothing begins."""
        return self._mode is not None or self._sleeps

    @property
    def sleeps(self) -> bool:
        return self._sleeps

    @property
    def waking(self) -> bool:
        return self._waking

    @property
    def reached(self) -> bool:
        return self._reached

    @property
    def drains(self) -> bool:
        """What has begun is to be finished first."""
        return self._mode is PauseMode.WAIT and not self._reached and bool(self._begun())

    def _begun(self) -> list[SampleId]:
        return [
            record.sample.sample_id
            for rollout in self._backlog.open_rollouts()
            for record in rollout.unfinished()
            if record.worker_ids
        ]

    # What the loop does

    def take_over(self) -> None:
        """As an earlier coordinator has left it."""
        roster = self._crew.roster
        if roster.pause_mode is not None or roster.asleep:
            self._wish(roster.pause_mode, sleeps=roster.asleep)

    async def end_unfinished(self) -> None:
        """If that was asked for."""
        if self._aborts:
            self._aborts = False
            rollouts = [rollout.rollout_id for rollout in self._backlog.open_rollouts()]
            await all_of(self._abort(rollout_id) for rollout_id in rollouts)

    async def drain(self) -> None:
        """Members that stand still already have to finish what they have."""
        await self._holding.let_go(HoldReason.PAUSED)

    async def stand_still(self) -> None:
        """The group is held, if there is one."""
        if not self._reached:
            wish = self._wishes
            await self._record()
            await self._holding.hold(HoldReason.PAUSED)
            self._reach(wish)

    async def take_samples_back(self) -> bool:
        """Have workers let go of what they decode; it waits then. False: not yet."""
        running = self._backlog.running()
        now = self._crew.clock()
        if running and self._letting_go_since is None:
            self._letting_go_since = now
            await self.cancel_running()
        elif running and now - (self._letting_go_since or now) > _LET_GO_WAIT_S:
            for worker_id in {r.worker_id for r in running if r.worker_id is not None}:
                self._backlog.take_back(worker_id)
        if self._backlog.running():
            return False
        self._letting_go_since = None
        await self._record()
        return True

    async def cancel_running(self) -> None:
        """Returns when every worker has been told."""
        decoding: dict[WorkerId, list[SampleId]] = {}
        for record in self._backlog.running():
            if record.worker_id is not None:
                decoding.setdefault(record.worker_id, []).append(record.sample.sample_id)
        workers = self._crew.roster.workers
        await each_of(workers[w].live.cancel(ids) for w, ids in decoding.items() if w in workers)

    async def fall_asleep(self) -> None:
        """Every worker has gone."""
        await self._holding.let_go(HoldReason.PAUSED)
        if self._sleeps:
            self._reach(self._wishes)

    def fail_to_wake(self, error: str) -> None:
        """No group could be founded: asleep as before."""
        self._error = error
        self._wish(self._mode or PauseMode.KEEP, sleeps=True)

    async def go(self) -> None:
        """The group decodes, if there is one."""
        if not self._reached:
            wish = self._wishes
            await self._holding.let_go(HoldReason.PAUSED)
            await self._record()
            self._reach(wish)

    def _reach(self, wish: int) -> None:
        """Unless something else is wanted by now, or the group that wakes is not there yet."""
        if wish == self._wishes and (self._crew.roster.members or not self._waking):
            self._reached, self._waking = True, False
            self.served_since = self._crew.clock()
            self._tell()

    async def _record(self) -> None:
        roster, wish = self._crew.roster, (self._mode, self._sleeps)
        if (roster.pause_mode, roster.asleep) != wish:
            roster.pause_mode, roster.asleep = wish
            await self._crew.store.record(roster.record())
