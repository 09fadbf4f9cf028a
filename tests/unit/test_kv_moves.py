"""How long a leaver is kept for the KV of its samples, and what is learnt from copies."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from actors.kv_moves import KvMoves
from actors.ports import Lease
from actors.protocol import Evicted, StepStats
from actors.roster import Roster, Worker
from actors.sample_kv import FetchedKv
from actors.telemetry import Telemetry
from placement.errors import MembershipError
from placement.ids import SampleId, WorkerId
from placement.samples import Sample, Sampling
from tests.unit.coordinator_harness import make_settings
from tests.unit.fake_cluster import FACTS
from tests.unit.virtual_time import clock, run

LEAVE_TIMEOUT_S = 5.0
SAMPLES = [
    Sample(SampleId(f"r/{i}/0"), (1, 2, 3), Sampling(50), seed=i, generated_ids=(4, 5))
    for i in range(3)
]
STATS = StepStats(9, 0.9, 0.0, 0, 0, 64, 0.0, (), prefilled_tokens=1000, prefill_s=1.0)


@dataclass
class FakePort:
    """A worker that gives KV away in ``fetch_s``, or fails; and remembers what it was given."""

    fetch_s: float = 0.5
    fails: bool = False
    given: list[tuple[list[SampleId], bool]] = field(default_factory=list)

    async def fetch_kv(self, sample_ids: list[SampleId]) -> FetchedKv:
        await asyncio.sleep(self.fetch_s)
        if self.fails:
            raise MembershipError("it has left")
        return FetchedKv(tuple(sample_ids), 1 << 20, {})

    async def submit(self, samples: list[Sample], kv: FetchedKv | None = None) -> None:
        self.given.append(([sample.sample_id for sample in samples], kv is not None))


class FakeCrew:
    """What ``KvMoves`` asks of a crew."""

    def __init__(self, policy: str) -> None:
        self.settings = make_settings(move_samples_by=policy, leave_timeout_s=LEAVE_TIMEOUT_S)
        self.roster = Roster()
        totals: Any = None
        self.telemetry = Telemetry(totals)
        self.clock = clock

    @property
    def capacity(self) -> Any:
        @dataclass
        class FakeCapacity:
            facts = FACTS

        return FakeCapacity()

    def worker(self, number: int, port: FakePort) -> Worker:
        lease = Lease(f"lease-{number}", "a", 0.0)
        fake: Any = port
        worker = Worker(WorkerId(number), lease, port=fake, stats=STATS)
        self.roster.workers[worker.worker_id] = worker
        return worker


def _moves(policy: str) -> tuple[FakeCrew, KvMoves]:
    crew = FakeCrew(policy)
    fake: Any = crew
    return crew, KvMoves(fake)


def test_a_leaver_is_not_kept_for_a_sample_that_found_no_room() -> None:
    async def main() -> None:
        crew, moves = _moves("copy")
        leaver = crew.worker(0, FakePort())
        moves.offer(Evicted(SAMPLES[0].sample_id, 4), leaver)
        waiting = asyncio.ensure_future(moves.until_fetched(leaver))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        moves.give_up(moves.kept())
        started_at = clock()
        await waiting
        assert clock() == started_at

    run(main())


def test_a_leaver_goes_once_its_kv_was_fetched_and_others_do_not_matter() -> None:
    async def main() -> None:
        crew, moves = _moves("copy")
        leaver, other = crew.worker(0, FakePort()), crew.worker(1, FakePort())
        stays = FakePort()
        moves.offer(Evicted(SAMPLES[0].sample_id, 4), leaver)
        moves.offer(Evicted(SAMPLES[1].sample_id, 4), other)
        submitting = asyncio.ensure_future(moves.submit(crew.worker(2, stays), SAMPLES[::2]))
        started_at = clock()
        await moves.until_fetched(leaver)
        assert clock() - started_at == 0.5
        await submitting
        assert stays.given == [([SAMPLES[2].sample_id], False), ([SAMPLES[0].sample_id], True)]
        assert moves.kept() == {SAMPLES[1].sample_id}

    run(main())


def test_the_wait_for_kv_has_a_bound() -> None:
    async def main() -> None:
        crew, moves = _moves("copy")
        leaver = crew.worker(0, FakePort())
        moves.offer(Evicted(SAMPLES[0].sample_id, 4), leaver)
        started_at = clock()
        await moves.until_fetched(leaver)
        assert clock() - started_at == LEAVE_TIMEOUT_S
        assert not moves.kept()

    run(main())


def test_a_sample_arrives_without_its_kv_if_the_leaver_refuses() -> None:
    async def main() -> None:
        crew, moves = _moves("copy")
        leaver, stays = crew.worker(0, FakePort(fails=True)), FakePort()
        moves.offer(Evicted(SAMPLES[0].sample_id, 4), leaver)
        await moves.submit(crew.worker(1, stays), SAMPLES[:1])
        assert stays.given == [([SAMPLES[0].sample_id], False)]
        assert not moves.kept()

    run(main())


def test_after_a_slow_copy_short_contexts_are_recomputed_and_long_ones_still_copied() -> None:
    async def main() -> None:
        crew, moves = _moves("auto")
        leaver, stays = crew.worker(0, FakePort(fetch_s=0.5)), crew.worker(1, FakePort())
        moves.offer(Evicted(SAMPLES[0].sample_id, 100), leaver)
        assert moves.kept(), "nothing is known of copies yet: one is tried"
        await moves.submit(stays, SAMPLES[:1])
        # A token is computed in a millisecond, a copy takes half a second.
        moves.offer(Evicted(SAMPLES[1].sample_id, 400), leaver)
        moves.offer(Evicted(SAMPLES[2].sample_id, 600), leaver)
        assert moves.kept() == {SAMPLES[2].sample_id}
        # Filling blocks turns out to be slow on those who stay.
        stays.stats = replace(STATS, copied_kv_bytes=1 << 10, copied_kv_s=60.0)
        moves.give_up(moves.kept())
        moves.offer(Evicted(SAMPLES[2].sample_id, 600), leaver)
        assert not moves.kept()

    run(main())
