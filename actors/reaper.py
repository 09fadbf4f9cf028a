"""What ends the workers and their leases when no coordinator is alive any more.

A thread with a deadline that every heartbeat moves. It knows no Ray: what reaping means is
given to it.
"""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Reaper:
    """Calls ``reap(reason)`` once, on its own thread, when no heartbeat came for ``timeout_s``.

    The clock starts with ``start``: a coordinator that never appears is missed like one that
    has gone.
    """

    def __init__(self, timeout_s: float, reap: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._reap = reap
        self._changed = threading.Condition()
        self._beaten_s = time.monotonic()
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, name="reaper", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """A coordinator is alive."""
        with self._changed:
            self._beaten_s = time.monotonic()

    def stop(self) -> None:
        """Never reap. Idempotent; returns when the thread has ended."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                silent_s = time.monotonic() - self._beaten_s
                if silent_s >= self._timeout_s:
                    break
                self._changed.wait(self._timeout_s - silent_s)
            if self._stopped:
                return
        reason = f"no coordinator has been heard of for {silent_s:.1f} s"
        logger.error(
            "%s (bound: coordinator.reaper_timeout_s = %g): workers and leases end now",
            reason,
            self._timeout_s,
        )
        self._reap(reason)
