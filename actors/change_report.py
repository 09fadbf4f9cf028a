"""What is told about one change of the group: its timings and what it moved."""

from collections.abc import Mapping, Sequence
from math import inf

from actors.protocol import StepStats, Switched
from actors.rollout_api import OperationStatus, ReleasedSlot
from actors.roster import Step, Worker
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import ChangeProgress, GroupChange, Phase
from placement.views import WidthDecision

_MAX_STEPS_DURING = 1000


class ChangeReport:
    """Args:
    witness: the survivor whose steps are compared before and during the preparation.
    decided_at_step: of the load.
    """

    def __init__(
        self,
        generation: Generation,
        old_members: tuple[WorkerId, ...],
        new_members: tuple[WorkerId, ...],
        decision: WidthDecision,
        decided_at: float,
        finished_ratio: float,
        witness: Worker | None,
        decided_at_step: int = 0,
    ) -> None:
        self._generation = generation
        self._old_members = old_members
        self._new_members = new_members
        self.decision = decision
        self._decided_at = decided_at
        self._finished_ratio = finished_ratio
        self._witness = witness
        self._decided_at_step = decided_at_step
        self._measured_steps: int | None = None
        self._steps_before_s = tuple(s.seconds for s in witness.recent_steps) if witness else ()
        self._steps_during_s: list[float] = []
        self._details_s: dict[str, float] = {}
        self._released: list[ReleasedSlot] = []
        self._experts_per_worker: tuple[int, ...] = ()
        self._pause_s = 0.0
        self._first_step_s = 0.0
        self._gap_s = 0.0
        self.received_bytes = 0
        self.finalized_at: float | None = None
        self.broken_off_at: float | None = None
        """When the group was given up while it could no longer be rolled back."""
        self.moved_samples: list[SampleId] = []

    def begin_prepare(self, change: GroupChange) -> None:
        self._experts_per_worker = tuple(len(change.experts_of(w)) for w in change.new_members)

    def detail(self, phase: str, parts_s: Mapping[str, float]) -> None:
        """Parts of a phase on one worker; the slowest worker's counts."""
        for part, seconds in parts_s.items():
            name = f"{phase}.{part}"
            self._details_s[name] = max(seconds, self._details_s.get(name, 0.0))

    def observe(
        self, worker: Worker, stats: StepStats, steps: Sequence[Step], progress: ChangeProgress
    ) -> None:
        """A member's statistics, with the steps that it made since its last ones.

        Reports come later than the steps that they tell of: whether a step fell into the
        preparation is told by when it ended, as far as the nodes' clocks agree.
        """
        prepare_at = progress.entered_s.get(Phase.PREPARE)
        if worker is self._witness and prepare_at is not None:
            pause_at = progress.entered_s.get(Phase.PAUSE, inf)
            during_s = [s.seconds for s in steps if prepare_at < s.end_at <= pause_at]
            self._steps_during_s += during_s[: _MAX_STEPS_DURING - len(self._steps_during_s)]
        crossing = progress.phase in (Phase.PAUSE, Phase.COMMIT, Phase.FINALIZE)
        if crossing and worker.worker_id in self._new_members:
            self._gap_s = max(self._gap_s, stats.max_token_gap_s)

    def crossed(self, survivors: Sequence[Switched]) -> None:
        self._pause_s = max(event.pause_s for event in survivors)
        self._first_step_s = max(event.first_step_s for event in survivors)
        for event in survivors:
            self.detail("pause", event.phases_s)

    def add_release(self, worker: Worker) -> None:
        slot = worker.build.slot if worker.build else ""
        self._released.append(
            ReleasedSlot(
                worker.worker_id, worker.lease.node_id, slot, self._decided_at, worker.removed_at
            )
        )

    def load_ended(self, load_steps: int) -> None:
        """What was predicted can be held against what came."""
        self._measured_steps = load_steps - self._decided_at_step

    def phases_s(self, progress: ChangeProgress, now: float) -> dict[str, float]:
        """Seconds of each phase so far, from its entry to the next one's; "lease" is before."""
        entries = list(progress.entered_s.items())
        phases_s = {"lease": entries[0][1] - self._decided_at}
        ends = [entered for _, entered in entries[1:]] + [self.broken_off_at or now]
        for (phase, entered), left in zip(entries, ends, strict=True):
            if phase not in (Phase.DONE, Phase.ROLLED_BACK):
                phases_s[phase] = left - entered
        if self.finalized_at is not None:
            finalize_end = phases_s[Phase.FINALIZE] + progress.entered_s[Phase.FINALIZE]
            phases_s["leave"] = finalize_end - self.finalized_at
            phases_s[Phase.FINALIZE] -= phases_s["leave"]
        return {str(name): seconds for name, seconds in phases_s.items()} | self._details_s

    def status(self, progress: ChangeProgress, now: float) -> OperationStatus:
        predicted, measured_steps = self.decision.predicted, self._measured_steps
        return OperationStatus(
            generation=self._generation,
            old_members=self._old_members,
            new_members=self._new_members,
            reason=self.decision.reason,
            explanation=self.decision.explanation,
            phase=progress.phase,
            error=progress.error,
            started_at=self._decided_at,
            ended_at=(progress.entered_s[progress.phase] if progress.ended else self.broken_off_at),
            finished_ratio_at_start=self._finished_ratio,
            pause_s=self._pause_s,
            first_step_s=self._first_step_s,
            gap_s=self._gap_s,
            phases_s=self.phases_s(progress, now),
            moved_samples=tuple(self.moved_samples),
            experts_per_worker=self._experts_per_worker,
            received_bytes=self.received_bytes,
            steps_before_s=self._steps_before_s,
            steps_during_s=tuple(self._steps_during_s),
            released=tuple(self._released),
            predicted=predicted,
            measured_steps=measured_steps,
            steps_error_ratio=(
                predicted.steps_with / measured_steps - 1 if predicted and measured_steps else None
            ),
        )
