"""How the native dialect answers: a line per sample, or one answer at the end."""

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
from service.native import to_answer
from service.schemas import RolloutAnswer, SampleAnswer

NDJSON = "application/x-ndjson"

_STATUS: TypeAdapter[RolloutStatus] = TypeAdapter(RolloutStatus)
_SAMPLE: TypeAdapter[SampleAnswer] = TypeAdapter(SampleAnswer)
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


def rollout_line(kind: str, status: RolloutStatus) -> bytes:
    return _line(kind, _STATUS.dump_python(status, mode="json"))


def sample_line(sample: SampleResult, tokenizer: Tokenizer | None) -> bytes:
    return _line("sample", _SAMPLE.dump_python(to_answer(sample, tokenizer), mode="json"))


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


async def answer_lines(following: Following, tokenizer: Tokenizer | None) -> AsyncIterator[bytes]:
    """The accepted rollout, a line per ended sample, the summary; an error is the last line."""
    try:
        yield rollout_line("rollout", following.status)
        done = False
        while not done:
            batch = await following.next_batch()
            if batch.samples:
                yield b"".join(sample_line(sample, tokenizer) for sample in batch.samples)
            done = batch.done
        yield rollout_line("summary", await following.last_status())
    except FlexFloorError as error:
        yield _line("error", describe(error))
