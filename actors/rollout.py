"""One rollout: its samples, how far each is, and the order in which they ended.

It knows nothing of workers' capacity or the queue's order, only what happened to its samples.
Every change is one method, called with a journaled fact; replaying the journal calls the same
methods.
"""

import array
import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.rollout_api import (
    CancelledBy,
    FinishedBatch,
    RolloutRequest,
    RolloutState,
    RolloutStatus,
    RolloutUsage,
    SampleNews,
    SampleResult,
    TokenBatch,
)
from actors.token_detail import DetailSoFar, TokenDetail
from actors.token_log import Growth, TokenLog
from actors.weight_spans import WeightSpans, last_version
from actors.weights_keeper import CHECKPOINT_VERSION
from placement.errors import MembershipError, RequestError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason, Sample
from placement.views import LengthBelief, SampleView


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Why an unfinished sample is to end."""

    by: CancelledBy
    error: str = ""


@dataclass(slots=True)
class SampleRecord:
    """A sample and where it stands. ``worker_id`` is None while it is queued.

    A sample that was ended before its worker let go of it keeps ``worker_id``: its KV is still
    taken there.
    """

    sample: Sample
    prompt_index: int
    sample_index: int
    order: int
    since: float
    """When it was queued or bound last."""
    last_tokens_at: float | None = None
    """None: it has none, or this coordinator has not seen any come."""
    prompt_key: str = ""
    """The same for the same prompt, in whichever rollout."""
    token_ids: list[int] = field(default_factory=list)
    """The response, with what was given of it."""
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens that were decoded here: those behind the given ones."""
    detail: DetailSoFar = field(default_factory=DetailSoFar)
    """Likewise, what is asked for beside them."""
    weight_spans: WeightSpans = field(default_factory=WeightSpans)
    worker_id: WorkerId | None = None
    worker_ids: list[WorkerId] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    cancellation: Cancellation | None = None
    """It is to end once its worker has let go of it, or why it has ended."""
    priority: int = 0
    queued_s: float = 0.0
    decode_s: float = 0.0
    waiting_view: SampleView | None = None

    @property
    def num_given(self) -> int:
        """Tokens of the response that came with the request."""
        return len(self.sample.generated_ids)

    @property
    def moved(self) -> bool:
        return len(self.worker_ids) > 1

    def to_submit(self) -> Sample:
        return self.sample.continued(tuple(self.token_ids))

    @property
    def context_tokens(self) -> int:
        return len(self.sample.prompt_ids) + len(self.token_ids)

    def view(self, belief: LengthBelief | None = None) -> SampleView:
        """Kept while the sample waits and nothing else is believed of it: a long queue is looked
        at far more often than it changes."""
        if self.worker_id is not None:
            return self._make_view(belief)
        if self.waiting_view is None or self.waiting_view.belief is not belief:
            self.waiting_view = self._make_view(belief)
        return self.waiting_view

    def _make_view(self, belief: LengthBelief | None) -> SampleView:
        return SampleView(
            sample_id=self.sample.sample_id,
            context_tokens=self.context_tokens,
            max_context_tokens=self.sample.max_context_tokens,
            order=self.order,
            worker_id=self.worker_id,
            generated_tokens=len(self.token_ids),
            prompt_key=self.prompt_key,
            belief=belief,
            priority=self.priority,
        )

    def place(self, worker_id: WorkerId | None, now: float) -> None:
        """It went to a worker, or back to the queue."""
        elapsed_s = max(0.0, now - self.since)
        if self.finish_reason is None:
            if self.worker_id is None:
                self.queued_s += elapsed_s
            else:
                self.decode_s += elapsed_s
        self.since = now
        self.worker_id = worker_id
        self.waiting_view = None
        if worker_id is not None and self.worker_ids[-1:] != [worker_id]:
            self.worker_ids.append(worker_id)

    def news_in(self, start: int, count: int) -> int:
        """How many tokens at the head of a report are known already.

        Raises:
            MembershipError: tokens are missing between what is known and ``start``.
        """
        if start > len(self.token_ids):
            raise MembershipError(
                f"sample {self.sample.sample_id} has {len(self.token_ids)} tokens and the next "
                f"report starts at {start}: tokens were lost on the way"
            )
        return min(count, len(self.token_ids) - start)

    def news(self, known: int | None) -> SampleNews | None:
        """What a caller that knows so many tokens has not heard; None: nothing."""
        if known is None:
            return None
        start, stop = max(known, self.num_given), len(self.token_ids)
        if start >= stop and self.finish_reason is None:
            return None
        return self.told(start, stop, ended=self.finish_reason is not None)

    def told(self, start: int, stop: int, *, ended: bool) -> SampleNews:
        """Tokens from ``start`` to ``stop``, with the ending if that is to be told, too."""
        given = self.num_given
        versions = self.weight_spans.between(start, stop)
        return SampleNews(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            start=start,
            token_ids=tuple(self.token_ids[start:stop]),
            logprobs=tuple(self.logprobs[start - given : stop - given]),
            detail=self.detail.between(start - given, stop - given),
            finish_reason=self.finish_reason if ended else None,
            error=self.error if ended else "",
            cancelled_by=self.cancelled_by if ended else None,
            weight_version=last_version(versions, CHECKPOINT_VERSION),
            weight_versions=versions,
        )

    @property
    def cancelled_by(self) -> CancelledBy | None:
        if self.cancellation is None or self.finish_reason is not FinishReason.ABORT:
            return None
        return self.cancellation.by

    def result(self) -> SampleResult:
        versions = self.weight_spans.between(self.num_given, len(self.token_ids))
        return SampleResult(
            sample_id=self.sample.sample_id,
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            seed=self.sample.seed,
            token_ids=tuple(self.token_ids[self.num_given :]),
            logprobs=tuple(self.logprobs),
            prompt_tokens=len(self.sample.prompt_ids),
            detail=self.detail.between(0),
            finish_reason=self.finish_reason,
            error=self.error,
            start=self.num_given,
            cancelled_by=self.cancelled_by,
            worker_ids=tuple(self.worker_ids),
            queued_s=self.queued_s,
            decode_s=self.decode_s,
            weight_version=last_version(versions, CHECKPOINT_VERSION),
            weight_versions=versions,
        )


def key_of_prompt(token_ids: Sequence[int]) -> str:
    """By which a prompt is known again: a hash, so that a history holds no prompts."""
    return hashlib.blake2b(array.array("q", token_ids).tobytes(), digest_size=12).hexdigest()


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
        self.aborted = False
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
        self._changed = asyncio.Event()
        self._grown = asyncio.Event()
        self.when_grown: Callable[[], None] = lambda: None

    @property
    def rollout_id(self) -> RolloutId:
        return self.request.rollout_id

    @property
    def num_ended(self) -> int:
        return len(self._ended)

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
        self._grown.set()
        self._grown = asyncio.Event()
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
        self._changed.set()
        self._changed = asyncio.Event()
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
