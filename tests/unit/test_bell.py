import asyncio

from actors.bell import Bell
from tests.unit.service_client import run_bounded


def test_a_ring_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    async def test() -> None:
        bell = Bell()
        bell.ring()  # nobody waits
        waiting = [asyncio.create_task(bell.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        bell.ring()
        await asyncio.gather(*waiting)
        late = asyncio.create_task(bell.wait())
        await asyncio.sleep(0)
        assert not late.done()
        bell.ring()
        await late

    run_bounded(test())
