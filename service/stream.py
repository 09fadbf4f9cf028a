"""How the native dialect answers: lines as samples end or grow, or one answer at the end.

Every line says from which cursor to read on behind it. What is new of several samples is one
line: whoever has all of it has its cursor, so nothing is read twice or missed.
"""

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import Response

from actors.rollout_api import RolloutStatus, SampleResult
from placement.errors import FlexFloorError
from service.checks import Tokenizer
from service.errors import describe
from service.following import Following
from service.native import to_answer, to_news
from service.schemas import NewsAnswer, RolloutAnswer, SampleAnswer, StreamOf

NDJSON = "application/x-ndjson"

_STATUS: TypeAdapter[RolloutStatus] = TypeAdapter(RolloutStatus)
_SAMPLE: TypeAdapter[SampleAnswer] = TypeAdapter(SampleAnswer)
_NEWS: TypeAdapter[tuple[NewsAnswer, ...]] = TypeAdapter(tuple[NewsAnswer, ...])
_ANSWER: TypeAdapter[RolloutAnswer] = TypeAdapter(RolloutAnswer)


def answer_json(
    rollout: RolloutStatus,
    samples: Iterable[SampleResult],
    tokenizer: Tokenizer | None,
    *,
    cursor: int,
    done: bool,
) -> Response:
    answers = tuple(to_answer(sample, tokenizer) for sample in samples)
    body = _ANSWER.dump_json(RolloutAnswer(rollout, answers, cursor, done))
    return Response(body, media_type="application/json")


def _line(kind: str, values: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, **values}, ensure_ascii=False).encode() + b"\n"


def _rollout_line(kind: str, status: RolloutStatus, cursor: int) -> bytes:
    return _line(kind, {"cursor": cursor, **_STATUS.dump_python(status, mode="json")})


def _sample_line(sample: SampleResult, cursor: int, tokenizer: Tokenizer | None) -> bytes:
    values = _SAMPLE.dump_python(to_answer(sample, tokenizer), mode="json")
    return _line("sample", {"cursor": cursor, **values})


async def answer_when_done(following: Following, tokenizer: Tokenizer | None) -> Response:
    """All samples, once they have ended."""
    samples: list[SampleResult] = []
    done = False
    while not done:
        batch = await following.next_batch()
        samples += batch.samples
        done = batch.done
    status = await following.last_status()
    return answer_json(status, samples, tokenizer, cursor=batch.cursor, done=True)


async def answer_lines(
    following: Following, tokenizer: Tokenizer | None, of: StreamOf
) -> AsyncIterator[bytes]:
    """The rollout, lines with what is new of it, the summary; an error is the last line."""
    try:
        yield _rollout_line("rollout", following.status, following.cursor)
        lines = _samples(following, tokenizer) if of is StreamOf.SAMPLES else _tokens(following)
        async for line in lines:
            yield line
        yield _rollout_line("summary", await following.last_status(), following.cursor)
    except FlexFloorError as error:
        yield _line("error", describe(error))


async def _samples(following: Following, tokenizer: Tokenizer | None) -> AsyncIterator[bytes]:
    done = False
    while not done:
        before = following.cursor
        batch = await following.next_batch()
        if batch.samples:
            yield b"".join(
                _sample_line(sample, cursor, tokenizer)
                for cursor, sample in enumerate(batch.samples, before + 1)
            )
        done = batch.done


async def _tokens(following: Following) -> AsyncIterator[bytes]:
    done = False
    while not done:
        batch = await following.next_growth()
        if batch.news:
            news = _NEWS.dump_python(tuple(map(to_news, batch.news)), mode="json")
            yield _line("tokens", {"cursor": batch.cursor, "samples": news})
        done = batch.done
