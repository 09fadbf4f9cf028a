"""The two ways in which an answer goes out while its client may go: whole, or as a stream.

Both leave what they follow, whatever happens, and say whether the client has gone.
"""

from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from placement.errors import FlexFloorError
from service.following import Following
from service.watch import ClientGoneError, ClientWatch

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs do


async def answer_whole(
    following: Following, receive: Receive, answer: Coroutine[Any, Any, Response]
) -> Response:
    """The answer, once it is there."""
    client_gone = True  # also if this request is cancelled
    try:
        async with ClientWatch(receive) as watch:
            response = await watch.first(answer)
        client_gone = False
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except FlexFloorError:
        client_gone = False
        raise
    finally:
        following.leave(client_gone=client_gone)
    return response


class FollowedStream(Response):
    """Sends each body as soon as it is there. Errors are the business of ``bodies``: the status
    has gone out before.

    Its own ASGI loop, not Starlette's: one that is never started would never leave
    ``following``.
    """

    def __init__(self, following: Following, bodies: AsyncIterator[bytes], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._following = following
        self._bodies = bodies

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
                while (body := await watch.first(self._next_body())) is not None:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            client_gone = False
        except (ClientGoneError, OSError):  # OSError: the server refuses to send to it
            return
        finally:
            self._following.leave(client_gone=client_gone)

    async def _next_body(self) -> bytes | None:
        return await anext(self._bodies, None)
