"""The two ways in which a rollout's samples are answered: line by line, or all at the end."""

import json
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actors.rollout_api import RolloutStatus, SampleResult
from placement.errors import FlexFloorError
from service.errors import describe
from service.following import Following
from service.native import Tokenizer, to_answer
from service.schemas import RolloutAnswer, SampleAnswer
from service.watch import ClientGoneError, ClientWatch

NDJSON = "application/x-ndjson"
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs do

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


async def answer_when_done(
    following: Following, receive: Receive, tokenizer: Tokenizer | None
) -> Response:
    """Wait for all samples; leaves ``following``."""
    client_gone = True  # also if this request is cancelled
    try:
        async with ClientWatch(receive) as watch:
            samples: list[SampleResult] = []
            done = False
            while not done:
                batch = await watch.first(following.next_batch())
                samples += batch.samples
                done = batch.done
            status = await following.last_status()
        client_gone = False
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except FlexFloorError:
        client_gone = False
        raise
    finally:
        following.leave(client_gone=client_gone)
    return answer_json(status, samples, tokenizer, cursor=batch.cursor, done=True)


class RolloutStream(Response):
    """NDJSON: the accepted rollout, a line per ended sample, the summary.

    Its own ASGI loop, not a generator: one that is never started would never leave
    ``following``. An error after the start becomes the last line.
    """

    media_type = NDJSON

    def __init__(self, following: Following, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._following = following
        self._tokenizer = tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_gone = True
        try:
            async with ClientWatch(receive) as watch:
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                await self._send_lines(watch, send)
            client_gone = False
        except (ClientGoneError, OSError):  # OSError: the server refuses to send to it
            return
        finally:
            self._following.leave(client_gone=client_gone)

    async def _send_lines(self, watch: ClientWatch, send: Send) -> None:
        async def put(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await put(rollout_line("rollout", self._following.status))
            done = False
            while not done:
                batch = await watch.first(self._following.next_batch())
                if batch.samples:
                    await put(b"".join(sample_line(s, self._tokenizer) for s in batch.samples))
                done = batch.done
            await put(rollout_line("summary", await self._following.last_status()), more=False)
        except FlexFloorError as error:
            await put(_line("error", describe(error)), more=False)
