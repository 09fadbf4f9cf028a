"""The responses of one rollout, as portions that a dialect renders or all at once.

Token ids, logprobs and text of a portion agree: what lies behind a stop string is in none of
them, and a sample that has met one decodes no further.
"""

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import reduce

from actors.rollout_api import SampleNews, SampleResult
from actors.token_detail import DetailSoFar, TokenDetail, joined
from actors.weight_spans import WeightSpans, WeightVersions
from placement.errors import UnavailableError
from placement.ids import SampleId, make_sample_id
from placement.samples import FinishReason
from service.checks import Tokenizer
from service.following import Following
from service.generation import Generation
from service.text import TextReader


@dataclass(frozen=True, slots=True)
class Portion:
    """What is new of one response. The last portion of a response has a finish reason.

    Attributes:
        index: of the response, in the order of the request: prompt by prompt.
        start: index of its first token in the response.
        text: "" without a tokenizer; may lag behind the tokens until the last portion.
        stop_reason: the stop string or the asked-for token id that ended it.
        weight_version: of its last token.
        weight_versions: of the response up to its end, as of ``SampleResult``.
        detail: of these tokens, what was asked for beside them.
        whole_detail: in the last portion, of the whole response.
    """

    index: int
    prompt_index: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    weight_version: str
    detail: TokenDetail | None = None
    whole_detail: TokenDetail | None = None
    weight_versions: WeightVersions = ()


class _Response:
    """One response, read from what the coordinator tells of its sample."""

    def __init__(self, generation: Generation, index: int, tokenizer: Tokenizer | None) -> None:
        request = generation.rollout
        self._index = index
        self.prompt_index, sample_index = divmod(index, request.num_samples)
        self.sample_id: SampleId = make_sample_id(
            request.rollout_id, self.prompt_index, sample_index
        )
        cut = generation.cuts[self.prompt_index]
        self._stop_token_ids = request.samplings[self.prompt_index].stop_token_ids
        self._include_stop = cut.include_stop
        self._only_prompt = cut.only_prompt
        self._so_far = DetailSoFar()
        self._weight_spans = WeightSpans()
        self._reader = (
            TextReader(
                tokenizer,
                cut.stop,
                include_stop=cut.include_stop,
                skip_special_tokens=cut.skip_special_tokens,
            )
            if tokenizer is not None
            else None
        )

    def portion(self, news: SampleNews) -> Portion:
        """Raises: UnavailableError, if the sample has failed."""
        if news.finish_reason is FinishReason.FAILED:
            raise UnavailableError(f"sample {self.sample_id} failed: {news.error}")
        ended_by_token = news.finish_reason is FinishReason.STOP and bool(news.token_ids)
        count, text, stopped_by = len(news.token_ids), "", None
        if self._reader is not None:
            # The token that ends a response is no more part of its text than a stop string is.
            hidden = int(ended_by_token and not self._include_stop)
            count, text = self._reader.read(news.token_ids[: count - hidden])
            stopped_by = self._reader.stopped_by
            if news.finish_reason is not None or stopped_by is not None:
                text += self._reader.end()
            if stopped_by is None:
                count += hidden
        finish_reason = FinishReason.STOP if stopped_by is not None else news.finish_reason
        stop_reason: str | int | None = stopped_by
        if stopped_by is None and ended_by_token and news.token_ids[-1] in self._stop_token_ids:
            stop_reason = news.token_ids[-1]
        if self._only_prompt:
            count, text, stop_reason = 0, "", None
            if finish_reason is FinishReason.STOP:
                finish_reason = FinishReason.LENGTH
        detail = self._detail(news, count)
        for start, version in news.weight_versions or ((news.start, news.weight_version),):
            self._weight_spans.extend(start, version)
        return Portion(
            index=self._index,
            prompt_index=self.prompt_index,
            start=news.start,
            token_ids=news.token_ids[:count],
            logprobs=news.logprobs[:count],
            text=text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            weight_version=news.weight_version,
            detail=detail,
            whole_detail=None if finish_reason is None else self._so_far.between(0),
            weight_versions=self._weight_spans.between(0, news.start + count),
        )

    def _detail(self, news: SampleNews, num_tokens: int) -> TokenDetail | None:
        """Of the tokens that are shown; what is told of the prompt comes with the first one."""
        if news.detail is None:
            return None
        detail = replace(news.detail.cut(0, num_tokens), prompt=news.detail.prompt)
        if self._only_prompt and detail.layout is not None and news.detail.routed:
            # The last row is that of making the token which is not shown.
            rows = news.detail.routed[0][: -detail.layout.row_bytes]
            detail = replace(detail, routed=(rows,))
        self._so_far.add(detail)
        return detail


class Responses:
    """Of a rollout that is followed; use ``portions`` or ``whole``, once."""

    def __init__(
        self, generation: Generation, following: Following, tokenizer: Tokenizer | None
    ) -> None:
        self.generation = generation
        self.following = following
        self.tokenizer = tokenizer
        self._responses = [
            _Response(generation, index, tokenizer)
            for index in range(len(generation.rollout.prompts) * generation.rollout.num_samples)
        ]

    async def portions(self) -> AsyncIterator[list[Portion]]:
        """Raises: UnavailableError, UnknownIdError."""
        known: list[int | None] = [0] * len(self._responses)
        while any(count is not None for count in known):
            portions = []
            met_stop: list[SampleId] = []
            for news in await self.following.next_tokens(tuple(known)):
                index = self._index(news)
                portion = self._responses[index].portion(news)
                portions.append(portion)
                known[index] = news.start + len(news.token_ids)
                if portion.finish_reason is not None:
                    known[index] = None
                    if news.finish_reason is None:
                        met_stop.append(self._responses[index].sample_id)
            if met_stop:
                self.following.end_samples(tuple(met_stop))
            if portions:
                yield portions

    async def whole(self) -> list[Portion]:
        """Each response as one portion, in the order of the request.

        Raises: UnavailableError, UnknownIdError.
        """
        if any(cut.stop for cut in self.generation.cuts):
            parts: defaultdict[int, list[Portion]] = defaultdict(list)
            async for portions in self.portions():
                for portion in portions:
                    parts[portion.index].append(portion)
            return [_joined(parts[index]) for index in range(len(self._responses))]
        # Nothing to watch for: ask for ends alone, which costs the coordinator far less.
        ended: list[Portion] = []
        done = False
        while not done:
            batch = await self.following.next_batch()
            for result in batch.samples:
                news = _as_news(result)
                ended.append(self._responses[self._index(news)].portion(news))
            done = batch.done
        return sorted(ended, key=lambda portion: portion.index)

    def _index(self, news: SampleNews) -> int:
        return news.prompt_index * self.generation.rollout.num_samples + news.sample_index


def _as_news(result: SampleResult) -> SampleNews:
    return SampleNews(
        prompt_index=result.prompt_index,
        sample_index=result.sample_index,
        start=0,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        finish_reason=result.finish_reason,
        error=result.error,
        weight_version=result.weight_version,
        weight_versions=result.weight_versions,
        detail=result.detail,
    )


def _joined(parts: list[Portion]) -> Portion:
    last = parts[-1]
    return Portion(
        index=last.index,
        prompt_index=last.prompt_index,
        start=0,
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        text="".join(part.text for part in parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        weight_version=last.weight_version,
        detail=reduce(joined, (part.detail for part in parts)),
        whole_detail=last.whole_detail,
        weight_versions=last.weight_versions,
    )
