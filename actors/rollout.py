"""One rollout: its samples, how far each is, and the order in which they ended.

It knows nothing of workers' capacity or the queue's order, only what happened to its samples.
Every change is one method, called with a journaled fact; replaying the journal calls the same
methods.
"""

import array
import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.rollout_api import (
    FinishedBatch,
    RolloutRequest,
    RolloutState,
    RolloutStatus,
    RolloutUsage,
    SampleNews,
    SampleResult,
)
from placement.errors import MembershipError, RequestError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason, Sample
from placement.views import LengthBelief, SampleView


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
    prompt_key: str = ""
    """The same for the same prompt, in whichever rollout."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    worker_id: WorkerId | None = None
    worker_ids: list[WorkerId] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    aborting: bool = False
    queued_s: float = 0.0
    decode_s: float = 0.0
    waiting_view: SampleView | None = None

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
        if known is None or (known >= len(self.token_ids) and self.finish_reason is None):
            return None
        return SampleNews(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            start=known,
            token_ids=tuple(self.token_ids[known:]),
            logprobs=tuple(self.logprobs[known:]),
            finish_reason=self.finish_reason,
            error=self.error,
        )

    def result(self) -> SampleResult:
        return SampleResult(
            sample_id=self.sample.sample_id,
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            seed=self.sample.seed,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            error=self.error,
            worker_ids=tuple(self.worker_ids),
            queued_s=self.queued_s,
            decode_s=self.decode_s,
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
            )
            for index, sample in enumerate(samples)
        }
        self.chunk_worker: dict[SampleId, WorkerId] | None = None
        """Static rollouts: the worker that each sample is pinned to, once there is a group."""
        self._ended: list[SampleRecord] = []
        self._changed = asyncio.Event()
        self._grown = asyncio.Event()

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
        return sum(len(record.token_ids) for record in self.records.values())

    def ended(self) -> Sequence[SampleRecord]:
        """In the order in which they ended."""
        return tuple(self._ended)

    def unfinished(self) -> list[SampleRecord]:
        return [r for r in self.records.values() if r.finish_reason is None]

    def extend(
        self, record: SampleRecord, token_ids: tuple[int, ...], logprobs: tuple[float, ...]
    ) -> None:
        """New tokens of a sample."""
        record.token_ids.extend(token_ids)
        record.logprobs.extend(logprobs)
        self._tell_growth()

    def _tell_growth(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def end(self, record: SampleRecord, reason: FinishReason, error: str, now: float) -> None:
        """The sample's one ending."""
        assert record.finish_reason is None, f"{record.sample.sample_id} ended twice"
        record.place(record.worker_id, now)
        record.finish_reason = reason
        record.error = error
        self._ended.append(record)
        if not self.open:
            self.ended_at = now
        self._changed.set()
        self._changed = asyncio.Event()
        self._tell_growth()

    async def news(self, known: tuple[int | None, ...], wait_s: float) -> tuple[SampleNews, ...]:
        """What is beyond ``known``, as soon as there is any, or nothing at the bound.

        Raises: RequestError.
        """
        if len(known) != len(self.records) or any(c is not None and c < 0 for c in known):
            raise RequestError(
                f"has {len(known)} entries for {len(self.records)} samples; give one per sample, "
                "a count of at least 0 or none",
                field="known",
            )
        try:
            async with asyncio.timeout(wait_s):
                while not (news := self._news(known)) and self.open:
                    await self._grown.wait()
        except TimeoutError:
            return ()
        return news

    def _news(self, known: tuple[int | None, ...]) -> tuple[SampleNews, ...]:
        told = (r.news(count) for r, count in zip(self.records.values(), known, strict=True))
        return tuple(news for news in told if news is not None)

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
        )
