"""One sample of a rollout and where it stands, from its acceptance to its end."""

import array
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.rollout_api import CancelledBy, SampleNews, SampleResult
from actors.token_detail import DetailSoFar
from actors.weight_spans import WeightSpans, last_version
from actors.weights_keeper import CHECKPOINT_VERSION
from placement.errors import MembershipError
from placement.ids import WorkerId
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
    tokens_when_bound: int = 0
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
    def unheard_of(self) -> bool:
        """It is bound to a worker that has not told anything of it."""
        return self.finish_reason is None and len(self.token_ids) == self.tokens_when_bound

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
        self.tokens_when_bound = len(self.token_ids)
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
