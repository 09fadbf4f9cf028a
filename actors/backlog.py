"""All rollouts: what was accepted, what waits, what decodes where, what has ended.

The only writer of the journal: each method appends its entry first and then changes the
records. Samples wait in arrival order; one that comes back from a worker keeps its order and
so is at the head.
"""

from collections.abc import Callable, Collection, Sequence

from actors.accounting import LeaseLedger
from actors.journal import (
    Aborted,
    Accepted,
    Bound,
    Closed,
    Ended,
    Generated,
    Journal,
    until_written,
)
from actors.protocol import Tokens
from actors.rollout import Rollout
from actors.rollout_api import CancelledBy, RolloutRequest, Strategy
from actors.sample_record import Cancellation, SampleRecord
from actors.settings import CoordinatorSettings
from actors.telemetry import Telemetry
from actors.token_watch import TokenWatch
from placement.errors import OverloadedError, RequestError, UnknownIdError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason, Sample


class Backlog:
    def __init__(
        self,
        settings: CoordinatorSettings,
        journal: Journal,
        ledger: LeaseLedger,
        telemetry: Telemetry,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._ledger = ledger
        self._telemetry = telemetry
        self._clock = clock
        self._rollouts: dict[RolloutId, Rollout] = {}
        self.tokens = TokenWatch(self.rollout)
        self._rollout_of: dict[SampleId, Rollout] = {}
        self._queued: dict[SampleId, SampleRecord] = {}
        self._running: dict[SampleId, SampleRecord] = {}
        self._next_order = 0
        self._load_accepted = 0
        self._load_ended = 0
        self._load_began_at_step = 0
        self.load = 0
        """Number of the load: all rollouts since none was open."""
        self.nothing_begins = False
        """Of the samples that wait, only those that have begun are offered to workers."""
        self.when_accepted: list[Callable[[Rollout], None]] = []
        self.when_sample_ends: list[Callable[[SampleRecord], None]] = []
        self.when_rollout_ends: list[Callable[[Rollout], None]] = []
        self.when_load_ends: list[Callable[[], None]] = []

    def replay(self, make_samples: Callable[[RolloutRequest], tuple[Sample, ...]]) -> None:
        """Rebuild all rollouts from the journal (before anything else is done here)."""
        for entry in list(self._journal.entries()):
            if isinstance(entry, Accepted):
                self._admit(entry.request, make_samples(entry.request), entry.at)
                continue
            rollout = self._rollouts[entry.rollout_id]
            if isinstance(entry, Aborted):
                rollout.abortion = Cancellation(entry.by, entry.error)
                continue
            if isinstance(entry, Closed):
                self._ledger.restore(entry.rollout_id, entry.usage)
                continue
            record = rollout.records[entry.sample_id]
            if isinstance(entry, Bound):
                self._place(record, entry.worker_id, entry.at)
            elif isinstance(entry, Generated):
                rollout.extend(
                    record, entry.token_ids, entry.logprobs, entry.detail, entry.weight_version
                )
            else:
                self._finish(record, entry)
                if entry.cancelled_by is None:  # its worker told its end; others it still holds
                    self._running.pop(entry.sample_id, None)
        for rollout in self.open_rollouts():
            for prompt_index in range(len(rollout.request.prompts)):
                self._end_surplus(rollout, prompt_index)

    async def written(self) -> None:
        """What happened so far can be told: a restart would find it.

        Raises: UnavailableError, at once, if the journal cannot be written now.
        """
        await self._journal.written()

    async def until_written(self) -> None:
        """The same for what must not give up: workers keep what they told until it is so.

        Raises: UnavailableError, after ten minutes.
        """
        await until_written(self._journal, self._clock)

    # What was accepted

    def find(self, request: RolloutRequest) -> Rollout | None:
        """The rollout that ``request`` repeats, if it does.

        Raises:
            RequestError: its id belongs to another request.
        """
        known = self._rollouts.get(request.rollout_id)
        if known is not None and known.request != request:
            raise RequestError(
                f"rollout {request.rollout_id} was accepted before with other content; "
                "choose a new id",
                field="rollout_id",
            )
        return known

    def accept(self, request: RolloutRequest, samples: tuple[Sample, ...]) -> Rollout:
        """Raises:
        OverloadedError: too many samples are open, or the journal is full.
        UnavailableError: the journal cannot be written now.
        """
        num_open, limit = self.num_open, self._settings.max_open_samples
        if num_open + len(samples) > limit:
            raise OverloadedError(
                f"{num_open} samples are open and {len(samples)} more would exceed "
                f"coordinator.max_open_samples = {limit}; wait until some have ended"
            )
        now = self._clock()
        self._journal_acceptance(Accepted(request.rollout_id, request, now))
        rollout = self._admit(request, samples, now)
        self._telemetry.accepted.inc(len(samples))
        self._telemetry.prompt_tokens.inc(sum(len(sample.prompt_ids) for sample in samples))
        for tell in self.when_accepted:
            tell(rollout)
        ended = self._forgettable()
        self._forget(ended[: max(0, len(ended) - self._settings.max_kept_rollouts)])
        return rollout

    def _journal_acceptance(self, entry: Accepted) -> None:
        """A journal that is full forgets ended rollouts before it refuses a new one."""
        while True:
            try:
                return self._journal.append(entry)
            except OverloadedError:
                if not (oldest := self._forgettable()[:1]):
                    raise
                self._forget(oldest)

    def rollout(self, rollout_id: RolloutId) -> Rollout:
        """Raises: UnknownIdError."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise UnknownIdError(
                f"no rollout {rollout_id} is known; it was never accepted, or it ended and the at "
                f"most {self._settings.max_kept_rollouts} kept ones are newer",
                field="rollout_id",
            )
        return rollout

    def open_rollouts(self) -> list[Rollout]:
        return [rollout for rollout in self._rollouts.values() if rollout.open]

    def chunk_worker(self) -> dict[SampleId, WorkerId]:
        """The pinned samples of open static rollouts."""
        pinned: dict[SampleId, WorkerId] = {}
        for rollout in self.open_rollouts():
            pinned.update(rollout.chunk_worker or {})
        return pinned

    def unpin_static(self) -> None:
        """The workers of the chunks are gone."""
        for rollout in self.open_rollouts():
            rollout.chunk_worker = None

    @property
    def num_open(self) -> int:
        return sum(len(r.records) - r.num_ended for r in self._rollouts.values() if r.open)

    @property
    def any_finished(self) -> bool:
        """A sample of the load has ended: of all rollouts since none was open. A batch may
        come as a rollout per sample, so those that have ended count."""
        return self._load_ended > 0

    @property
    def load_ended(self) -> int:
        """Samples of the load that have ended."""
        return self._load_ended

    @property
    def load_steps(self) -> int:
        """Lockstep steps since the load began."""
        return self._ledger.steps - self._load_began_at_step

    @property
    def finished_ratio(self) -> float:
        """Of the load."""
        return self._load_ended / self._load_accepted if self._load_accepted else 1.0

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def queued(self, strategy: Strategy) -> list[SampleRecord]:
        """Samples that wait, those that came first at the head."""
        return sorted(
            (
                record
                for sample_id, record in self._queued.items()
                if self._rollout_of[sample_id].request.strategy is strategy
                and (record.worker_ids or not self.nothing_begins)
            ),
            key=lambda record: record.order,
        )

    def running(self) -> list[SampleRecord]:
        """Samples that take KV on a worker."""
        return list(self._running.values())

    def running_on(self, worker_id: WorkerId) -> list[SampleRecord]:
        return [record for record in self._running.values() if record.worker_id == worker_id]

    def record(self, sample_id: SampleId) -> SampleRecord:
        return self._rollout_of[sample_id].records[sample_id]

    # What happened

    def bind(self, record: SampleRecord, worker_id: WorkerId) -> None:
        if not record.worker_ids:
            self._telemetry.queue_s.observe(self._clock() - record.since)
        self._journal_place(record, worker_id)

    def add_tokens(self, event: Tokens) -> bool:
        """Apply a worker's report. False: nobody wants the sample (any more).

        Raises:
            MembershipError: tokens between the known ones and these are missing.
        """
        rollout = self._rollout_of.get(event.sample_id)
        if rollout is None:
            return False
        record = rollout.records[event.sample_id]
        wanted = record.finish_reason is None
        if wanted:
            known = record.news_in(event.start, len(event.token_ids))
            token_ids, logprobs = event.token_ids[known:], event.logprobs[known:]
            if token_ids:
                now = self._clock()
                first_s = None if record.logprobs else now - rollout.accepted_at
                before_at, record.last_tokens_at = record.last_tokens_at, now
                gap_s = None if before_at is None else now - before_at
                start = event.start + known
                detail = None if event.detail is None else event.detail.cut(known)
                entry = Generated(
                    *(rollout.rollout_id, event.sample_id, start, token_ids, logprobs, detail),
                    weight_version=event.weight_version,
                )
                self._journal.append(entry)
                rollout.extend(record, token_ids, logprobs, detail, event.weight_version)
                self._ledger.tokens(rollout.rollout_id, len(token_ids))
                self._telemetry.grew(len(token_ids), first_s, gap_s)
            if event.finish_reason is not None:
                self.end(record, event.finish_reason, event.error)
        if event.finish_reason is not None and event.sample_id in self._running:
            if wanted:
                del self._running[event.sample_id]
            else:  # it was ended before, and only now its worker lets go of it
                self._journal_place(record, None)
        return wanted

    def let_go(self, sample_id: SampleId, worker_id: WorkerId) -> bool:
        """``worker_id`` has let go of a sample: it waits again, unless it has ended or is to.
        Returns whether it waits."""
        record = self._running.get(sample_id)
        if record is None or record.worker_id != worker_id:
            return False
        self._journal_place(record, None)
        if record.cancellation is not None and record.finish_reason is None:
            self.cancel(record, record.cancellation.by, record.cancellation.error)
        return sample_id in self._queued

    def take_back_ended(self, record: SampleRecord) -> bool:
        """Whether a sample that is bound, but not submitted yet, was ended or is to end: then it
        is bound no more."""
        if record.finish_reason is None and record.cancellation is None:
            return False
        if record.worker_id is not None:
            self.let_go(record.sample.sample_id, record.worker_id)
        return True

    def take_back(self, worker_id: WorkerId) -> None:
        """Everything that a lost worker had waits again, with the tokens known so far."""
        for record in self.running_on(worker_id):
            self.let_go(record.sample.sample_id, worker_id)

    def take_back_strays(self, members: Collection[WorkerId]) -> None:
        """Samples that were bound to workers of an earlier group wait again."""
        bound_to = {r.worker_id for r in self._running.values() if r.worker_id is not None}
        for worker_id in sorted(bound_to.difference(members)):
            self.take_back(worker_id)

    def end(
        self,
        record: SampleRecord,
        reason: FinishReason,
        error: str,
        cancelled_by: CancelledBy | None = None,
    ) -> None:
        """End a sample, and with it those of its prompt that are not wanted any more. Their
        workers let go of them when they report of them next."""
        sample_id = record.sample.sample_id
        rollout = self._rollout_of[sample_id]
        entry = Ended(rollout.rollout_id, sample_id, reason, error, self._clock(), cancelled_by)
        self._journal.append(entry)
        self._telemetry.ended.labels(reason).inc()
        self._telemetry.sample_s.observe(entry.at - rollout.accepted_at)
        if cancelled_by is not None:
            self._telemetry.cancelled.labels(cancelled_by).inc()
        self._finish(record, entry)
        if not rollout.open:
            usage = self._ledger.usage(rollout.rollout_id, entry.at)
            self._journal.append(Closed(rollout.rollout_id, usage))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._end_surplus(rollout, record.prompt_index)

    def abort(self, rollout: Rollout, by: CancelledBy, error: str = "") -> None:
        """All of it is to end; its samples are ended by whoever says so."""
        if rollout.open and not rollout.aborted:
            self._journal.append(Aborted(rollout.rollout_id, by, error, self._clock()))
            rollout.abortion = Cancellation(by, error)

    def cancel(self, record: SampleRecord, by: CancelledBy, error: str = "") -> None:
        """End a sample before it has finished, with what it has."""
        self.end(record, FinishReason.ABORT, error, by)

    def _end_surplus(self, rollout: Rollout, prompt_index: int) -> None:
        for surplus in rollout.surplus(prompt_index):
            self.cancel(
                surplus,
                CancelledBy.OVERSAMPLING,
                f"{rollout.request.num_wanted} others of its prompt have finished",
            )

    def end_all_open(
        self, reason: FinishReason, error: str, cancelled_by: CancelledBy | None = None
    ) -> None:
        for rollout in self.open_rollouts():
            for record in rollout.unfinished():
                self.end(record, reason, error, cancelled_by)

    def _admit(self, request: RolloutRequest, samples: tuple[Sample, ...], at: float) -> Rollout:
        if not self.open_rollouts():
            self._load_accepted = self._load_ended = 0
            self._load_began_at_step = self._ledger.steps
            self.load += 1
        rollout = Rollout(request, samples, self._next_order, at)
        self._load_accepted += len(samples)
        self._next_order += len(samples)
        rollout.when_grown = self.tokens.grew
        self._rollouts[request.rollout_id] = rollout
        for sample_id, record in rollout.records.items():
            self._rollout_of[sample_id] = rollout
            self._queued[sample_id] = record
        self._ledger.open(request.rollout_id, at)
        return rollout

    def _journal_place(self, record: SampleRecord, worker_id: WorkerId | None) -> None:
        sample_id, now = record.sample.sample_id, self._clock()
        rollout_id = self._rollout_of[sample_id].rollout_id
        self._journal.append(Bound(rollout_id, sample_id, worker_id, now))
        self._place(record, worker_id, now)

    def _place(self, record: SampleRecord, worker_id: WorkerId | None, at: float) -> None:
        record.place(worker_id, at)
        sample_id = record.sample.sample_id
        if worker_id is not None:
            self._queued.pop(sample_id, None)
            self._running[sample_id] = record
        else:
            self._running.pop(sample_id, None)
            if record.finish_reason is None:
                self._queued[sample_id] = record

    def _finish(self, record: SampleRecord, entry: Ended) -> None:
        rollout = self._rollouts[entry.rollout_id]
        rollout.end(record, entry.finish_reason, entry.error, entry.at, entry.cancelled_by)
        self._load_ended += 1
        self._queued.pop(entry.sample_id, None)
        for tell in self.when_sample_ends:
            tell(rollout.records[entry.sample_id])
        if not rollout.open:
            self._ledger.end(entry.rollout_id, entry.at)
            for tell_ended in self.when_rollout_ends:
                tell_ended(rollout)
            if not self.open_rollouts():
                for tell_end in self.when_load_ends:
                    tell_end()

    def _forgettable(self) -> list[Rollout]:
        """Those that ended a while ago and of which no worker holds anything, oldest first."""
        held = {self._rollout_of[sample_id].rollout_id for sample_id in self._running}
        kept_since = self._clock() - self._settings.keep_ended_s
        return [
            rollout
            for rollout in self._rollouts.values()
            if rollout.ended_at is not None
            and rollout.ended_at <= kept_since
            and rollout.rollout_id not in held
        ]

    def _forget(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._journal.forget(rollout.rollout_id)
            self._ledger.forget(rollout.rollout_id)
            del self._rollouts[rollout.rollout_id]
            for sample_id in rollout.records:
                del self._rollout_of[sample_id]
