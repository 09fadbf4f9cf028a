"""``flexfloor serve``: cluster, runtime and HTTP service, from their start to their end.

What was started is ended in reverse order, whether the end is Ctrl-C, SIGTERM or an error
halfway through the start.
"""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import FrameType
from typing import TextIO

from actors.ray_coordinator import COORDINATOR, launch, shutdown_runtime
from deploy import application
from deploy.cluster import ray_cluster
from deploy.config import FlexFloorConfig
from placement.errors import ConfigError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_until_signal(
    config: FlexFloorConfig,
    address: str | None,
    out: TextIO,
    say: Callable[[str], None],
    *,
    coordinator: str = COORDINATOR,
) -> None:
    """Serve until a stop signal.

    Args:
        out: gets exactly one line, once requests can be decoded. What Ray prints by itself
            goes to stderr.
        say: told what is being waited for.
        coordinator: import path of what the coordinator's actor hosts.

    Raises: FlexFloorError.
    """
    check_port(config.service.host, config.service.port)
    with redirect_stdout(sys.stderr), stop_signals_interrupt(), ExitStack() as started:
        try:
            started.enter_context(
                ray_cluster(
                    address, config.namespace, config.lease.resources, config.group.max_workers, say
                )
            )
            interrupt_on_stop_signals()  # again: starting Ray sets handlers of its own
            # Not before: a launch that is refused must not end the runtime that is there.
            client = launch(config.runtime, say=say, coordinator=coordinator)
            started.callback(shutdown_runtime, config.namespace, say=say)
            started.callback(application.stop)
            url = application.run(config)
            workers = asyncio.run(client.health()).workers
            out.write(f"FlexFloor serves {config.model.path} on {workers} workers at {url}\n")
            out.flush()
            threading.Event().wait()
        except KeyboardInterrupt:
            say("ending the HTTP service, workers and leases")
        finally:
            ignore_stop_signals()


def check_port(host: str, port: int) -> None:
    """Raises: ConfigError, before minutes of start-up end in a proxy that cannot listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"is {port}, but {host}:{port} cannot be listened on ({error.strerror}); "
                "choose another port",
                field="service.port",
            ) from error


def ignore_stop_signals() -> None:
    """The end is on its way; a second Ctrl-C must not leave half of it behind."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupt_on_stop_signals() -> None:
    """SIGTERM raises KeyboardInterrupt as Ctrl-C does."""
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """``interrupt_on_stop_signals``, and the handlers of before are back afterwards."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    interrupt_on_stop_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
