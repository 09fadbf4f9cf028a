"""What the HTTP replica measures of its requests; the coordinator measures samples.

``docs/metrics.md`` is made from both. There is one replica (see ``deploy.application``), so a
scrape finds all of it: ``/metrics`` is the coordinator's text with this behind it. A replica that
was replaced counts from zero, as any process that starts anew.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NATIVE, SERVER = "native", "server"
NO_DIALECT = "none"
"""Of requests that match no route, or were refused before."""
DIALECTS = (NATIVE, "openai", "sglang", "vllm", "trl", SERVER)
_EXPECTED_CODES = (200, 400, 429, 500, 503)
_BUCKETS_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class ServiceMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.labels_of = {
            "flexfloor_http_requests": ("dialect", "code"),
            "flexfloor_http_open_requests": (),
            "flexfloor_http_request_seconds": ("dialect",),
            "flexfloor_http_first_event_seconds": ("dialect",),
        }
        self.requests = Counter(
            "flexfloor_http_requests",
            "Requests by what they were answered with; 499: the client had gone before.",
            ("dialect", "code"),
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "flexfloor_http_open_requests", "Requests being answered now.", registry=self.registry
        )
        self.request_s = Histogram(
            "flexfloor_http_request_seconds",
            "Seconds from a request's arrival to the end of its answer.",
            ("dialect",),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.first_event_s = Histogram(
            "flexfloor_http_first_event_seconds",
            "Seconds from a request's arrival to the first event of a streamed answer: its first "
            "token, but in the native dialect the line that names the rollout.",
            ("dialect",),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        for dialect in DIALECTS:  # a series that begins at its first event hides it
            for code in _EXPECTED_CODES:
                self.requests.labels(dialect, code)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class RequestMeter:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, began_s = self._metrics, time.monotonic()
        code = 500  # unless a response begins: it was answered with an error or not at all
        is_first = True

        async def watched(message: Message) -> None:
            nonlocal code, is_first
            if message["type"] == "http.response.start":
                code = message["status"]
            elif is_first and message.get("more_body"):
                metrics.first_event_s.labels(dialect_of(scope)).observe(time.monotonic() - began_s)
            is_first &= message["type"] == "http.response.start"
            await send(message)

        metrics.open_requests.inc()
        try:
            await self._app(scope, receive, watched)
        finally:
            metrics.open_requests.dec()
            metrics.requests.labels(dialect_of(scope), code).inc()
            metrics.request_s.labels(dialect_of(scope)).observe(time.monotonic() - began_s)


def dialect_of(scope: Scope) -> str:
    """By the tag of the route that the request has matched; control routes belong to theirs, and
    what every client or probe asks to none of them."""
    route = scope.get("route")
    if not isinstance(route, Route):
        return NO_DIALECT
    tags = getattr(route, "tags", ())
    if tags:
        return str(tags[0]).split()[0].lower()
    return NATIVE if route.path.startswith("/v1/") else SERVER
