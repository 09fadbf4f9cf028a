"""The service on a real port of this process, for clients that bring their own HTTP."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from service.app import create_app
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import SETTINGS, FakeTokenizer


@contextmanager
def serving(coordinator: FakeCoordinator) -> Iterator[str]:
    """Its address, while a thread serves with this fake."""
    app = create_app(coordinator, SETTINGS, FakeTokenizer())
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # who comes before the server does is not refused, but waits
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
