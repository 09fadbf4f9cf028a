"""A network between the client and the service in this process that loses what it is told to."""

from collections.abc import AsyncIterator

import httpx


class FakeNetwork(httpx.AsyncBaseTransport):
    """``cuts``: for each answer in turn, after how many bytes of its body the connection is lost;
    ``LOST`` loses the request itself, None lets it pass. Later ones pass, too.

    ``refusals``: answers that come instead, first come first served.
    """

    LOST = -1

    def __init__(self, service: httpx.AsyncBaseTransport) -> None:
        self._service = service
        self.cuts: list[int | None] = []
        self.refusals: list[httpx.Response] = []
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.raw_path.decode()}")
        cut = self.cuts.pop(0) if self.cuts else None
        if cut == self.LOST:
            raise httpx.ConnectError("nobody listens", request=request)
        if self.refusals:
            return self.refusals.pop(0)
        response = await self._service.handle_async_request(request)
        if cut is None:
            return response
        content = await response.aread()
        return httpx.Response(
            response.status_code, headers=response.headers, stream=_Cut(content[:cut])
        )


class _Cut(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content
        raise httpx.ReadError("the connection was reset")
