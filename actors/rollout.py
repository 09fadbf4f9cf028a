"""One rollout: its samples, how far each is, and the order in which they ended.

It knows nothing of workers' capacity or the queue's order, only what happened to its samples.
Every change is one method, called with a journaled fact; replaying the journal calls the same
methods.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from actors.bell import Bell
from actors.rollout_api import (
    CancelledBy,
    FinishedBatch,
    RolloutRequest,
    RolloutState,
    RolloutStatus,
    RolloutUsage,
    SampleNews,
    TokenBatch,
)
from actors.sample_record import Cancellation, SampleRecord, key_of_prompt
from actors.token_detail import TokenDetail
from actors.token_log import Growth, TokenLog
from actors.weights_keeper import CHECKPOINT_VERSION
from placement.errors import RequestError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason, Sample


class Rollout:
    """Args:
    samples: in the order of the request: prompt by prompt.
    first_order: arrival order of the first sample.
    """

    def __init__(
        self, request: RolloutRequest, samples: tuple[Sample, ...], first_order: int, now: float
    ) -> None:
        self.request = request
        self.accepted_at = now
        self.ended_at: float | None = None
        self.abortion: Cancellation | None = None
        """All of it is to end, or has ended because of this."""
        keys = [key_of_prompt(prompt) for prompt in request.prompts]
        self.records: dict[SampleId, SampleRecord] = {
            sample.sample_id: SampleRecord(
                sample=sample,
                prompt_index=index // request.num_samples,
                sample_index=index % request.num_samples,
                order=first_order + index,
                since=now,
                prompt_key=keys[index // request.num_samples],
                token_ids=list(sample.generated_ids),
                priority=request.priority,
            )
            for index, sample in enumerate(samples)
        }
        self.chunk_worker: dict[SampleId, WorkerId] | None = None
        """Static rollouts: the worker that each sample is pinned to, once there is a group."""
        self._ended: list[SampleRecord] = []
        self._finished: Counter[int] = Counter()
        """Per prompt, samples that ended by themselves."""
        self._in_order = list(self.records.values())
        self._log = TokenLog()
        self._changed = Bell()
        self._grown = Bell()
        self.when_grown: Callable[[], None] = lambda: None

    @property
    def rollout_id(self) -> RolloutId:
        return self.request.rollout_id

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    @property
    def aborted(self) -> bool:
        return self.abortion is not None

    @property
    def open(self) -> bool:
        return self.num_ended < len(self.records)

    @property
    def response_tokens(self) -> int:
        return sum(len(record.logprobs) for record in self.records.values())

    @property
    def deadline_at(self) -> float | None:
        after_s = self.request.deadline_s
        return None if after_s is None else self.accepted_at + after_s

    def ended(self) -> Sequence[SampleRecord]:
        """In the order in which they ended."""
        return tuple(self._ended)

    def unfinished(self) -> list[SampleRecord]:
        return [r for r in self.records.values() if r.finish_reason is None]

    def surplus(self, prompt_index: int) -> list[SampleRecord]:
        """Unfinished samples of a prompt of which enough others have finished."""
        num_wanted, stride = self.request.num_wanted, self.request.num_samples
        if num_wanted is None or self._finished[prompt_index] < num_wanted:
            return []
        of_prompt = self._in_order[prompt_index * stride : (prompt_index + 1) * stride]
        return [record for record in of_prompt if record.finish_reason is None]

    def extend(
        self,
        record: SampleRecord,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        detail: TokenDetail | None = None,
        weight_version: str = CHECKPOINT_VERSION,
    ) -> None:
        """New tokens of a sample."""
        self._log_growth(record, len(token_ids))
        record.weight_spans.extend(len(record.token_ids), weight_version)
        record.token_ids.extend(token_ids)
        record.logprobs.extend(logprobs)
        if detail is not None:
            record.detail.add(detail)
        self._tell_growth()

    def _log_growth(self, record: SampleRecord, count: int, *, ended: bool = False) -> None:
        number = record.prompt_index * self.request.num_samples + record.sample_index
        start = len(record.token_ids)
        self._log.append(Growth(number, start, start + count, ended))

    def _tell_growth(self) -> None:
        self._grown.ring()
        self.when_grown()

    def end(
        self,
        record: SampleRecord,
        reason: FinishReason,
        error: str,
        now: float,
        cancelled_by: CancelledBy | None = None,
    ) -> None:
        """The sample's one ending."""
        assert record.finish_reason is None, f"{record.sample.sample_id} ended twice"
        record.place(record.worker_id, now)
        record.finish_reason = reason
        record.error = error
        record.cancellation = Cancellation(cancelled_by, error) if cancelled_by else None
        self._ended.append(record)
        self._finished[record.prompt_index] += reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._log_growth(record, 0, ended=True)
        if not self.open:
            self.ended_at = now
        self._changed.ring()
        self._tell_growth()

    async def news(self, known: tuple[int | None, ...], wait_s: float) -> tuple[SampleNews, ...]:
        """What is beyond ``known``, as soon as there is any, or nothing at the bound.

        Raises: RequestError.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not (news := self.news_now(known)) and self.open:
                    await self._grown.wait()
        except TimeoutError:
            return ()
        return news

    def news_now(self, known: tuple[int | None, ...]) -> tuple[SampleNews, ...]:
        """What is beyond ``known``.

        Raises: RequestError.
        """
        if len(known) != len(self.records) or any(c is not None and c < 0 for c in known):
            raise RequestError(
                f"has {len(known)} entries for {len(self.records)} samples; give one per sample, "
                "a count of at least 0 or none",
                field="known",
            )
        told = (r.news(count) for r, count in zip(self.records.values(), known, strict=True))
        return tuple(news for news in told if news is not None)

    async def new_tokens(self, cursor: int, wait_s: float, limit: int) -> TokenBatch:
        """What is logged after ``cursor``, as soon as there is any, or nothing at the bound."""
        try:
            async with asyncio.timeout(wait_s):
                while len(self._log) <= cursor and self.open:
                    await self._grown.wait()
        except TimeoutError:
            return TokenBatch((), cursor, done=False)
        grown, end = self._log.after(cursor, limit)
        told = (self._in_order[g.number].told(g.start, g.stop, ended=g.ended) for g in grown)
        return TokenBatch(tuple(told), end, done=not self.open and end >= len(self._log))

    def check_cursor(self, cursor: int, *, of_tokens: bool = False) -> None:
        """Raises: RequestError, for a cursor that nobody can have got from here."""
        last = len(self._log) if of_tokens else len(self._ended)
        if not 0 <= cursor <= last:
            raise RequestError(
                f"is {cursor}; rollout {self.rollout_id} has handed out 0 to {last}; use one "
                "that came with its answers, or 0 to read from the beginning",
                field="cursor",
            )

    def batch(self, cursor: int, limit: int) -> FinishedBatch:
        ended = self._ended[cursor : cursor + limit]
        end = cursor + len(ended)
        return FinishedBatch(
            samples=tuple(record.result() for record in ended),
            cursor=end,
            done=not self.open and end >= len(self._ended),
        )

    async def wait_for_ending(self, cursor: int, wait_s: float) -> None:
        """Until there is an ended sample after ``cursor``, nothing more to come, or the bound."""
        if len(self._ended) > cursor or not self.open:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return  # an empty batch is the answer then

    def status(self, waiting_for: str, usage: RolloutUsage) -> RolloutStatus:
        unfinished = self.unfinished()
        num_queued = sum(record.worker_id is None for record in unfinished)
        state = RolloutState.RUNNING if self.open else RolloutState.FINISHED
        if self.aborted and not self.open:
            state = RolloutState.ABORTED
        return RolloutStatus(
            rollout_id=self.rollout_id,
            state=state,
            strategy=self.request.strategy,
            seed=self.request.seed,
            num_samples=len(self.records),
            num_ended=self.num_ended,
            num_queued=num_queued,
            num_running=len(unfinished) - num_queued,
            response_tokens=self.response_tokens,
            num_moved=sum(record.moved for record in self.records.values()),
            accepted_at=self.accepted_at,
            ended_at=self.ended_at,
            waiting_for=waiting_for if self.open else "",
            usage=usage,
            priority=self.request.priority,
            deadline_at=self.deadline_at,
        )
