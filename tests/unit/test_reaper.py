import queue
import threading

import pytest

from actors.reaper import Reaper

pytestmark = pytest.mark.timeout(20)


def test_without_a_heartbeat_it_reaps_once_and_says_how_long_it_was_silent() -> None:
    reasons: queue.Queue[str] = queue.Queue()
    reaper = Reaper(0.1, reasons.put)
    reaper.start()
    assert reasons.get(timeout=10).startswith("no coordinator has been heard of for 0.")
    reaper.stop()
    assert reasons.empty()


def test_heartbeats_hold_it_off() -> None:
    reaped = threading.Event()
    reaper = Reaper(1.0, lambda reason: reaped.set())
    reaper.start()
    for _ in range(15):
        assert not reaped.wait(0.1)
        reaper.beat()
    assert reaped.wait(10)
    reaper.stop()


def test_a_stopped_one_never_reaps() -> None:
    reaped = threading.Event()
    reaper = Reaper(0.2, lambda reason: reaped.set())
    reaper.start()
    reaper.stop()
    reaper.stop()
    assert not reaped.wait(0.5)
