import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from deploy.demo.borrowing import Borrowing

BOUND_S = 40.0


class Holder:
    """An actor that is only there to hold slots."""

    def ready(self) -> bool:
        return True


@pytest.fixture
def all_slots_held(cluster: str) -> Iterator[tuple[str, list[ray.actor.ActorHandle]]]:
    holders = [ray.remote(num_gpus=1, num_cpus=0)(Holder).remote() for _ in range(4)]
    ray.get([holder.ready.remote() for holder in holders], timeout=BOUND_S)
    yield cluster, holders
    for holder in holders:
        ray.kill(holder)


def wait_for(borrowing: Borrowing, event: str, count: int) -> None:
    deadline = time.monotonic() + BOUND_S
    while len(borrowing.events(event)) < count:
        assert time.monotonic() < deadline, f"{borrowing.events()} after {BOUND_S} s"
        time.sleep(0.05)


def assert_gone(pid: int) -> None:
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([process], timeout=10)
    assert not alive


@pytest.mark.timeout(120)
def test_the_other_job_works_on_a_slot_only_when_it_is_free_and_gives_it_back(
    all_slots_held: tuple[str, list[ray.actor.ActorHandle]], tmp_path: Path
) -> None:
    address, holders = all_slots_held
    with Borrowing(address, 2, tmp_path / "log", limit_s=BOUND_S) as borrowing:
        borrowing.wait_until_waiting(BOUND_S)
        assert borrowing.events("borrowed") == ()
        freed_at = time.time()
        ray.kill(holders[0])
        wait_for(borrowing, "worked", 1)
        (record,) = borrowing.stop()
    assert record.slot.startswith("GPU:")
    assert freed_at < record.started_at < record.returned_at
    assert record.chunks >= 1
    assert_gone(record.pid)


@pytest.mark.timeout(120)
def test_the_other_job_ends_when_its_input_ends_as_it_does_when_the_demo_dies(
    cluster: str, tmp_path: Path
) -> None:
    with Borrowing(cluster, 1, tmp_path / "log", limit_s=BOUND_S) as borrowing:
        wait_for(borrowing, "worked", 1)
        (place,) = borrowing.events("borrowed")
    assert len(borrowing.events("returned")) == 1
    assert_gone(place["pid"])
