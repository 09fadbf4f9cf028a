"""Shrinking, growing and swapping a live group changes no token and no logprob."""

import pytest

from placement.ids import SampleId
from placement.samples import Sample
from tests.engine import inspection
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same

pytestmark = pytest.mark.timeout(300)


def _spread(group: LocalGroup, samples: list[Sample]) -> None:
    for i, sample in enumerate(samples):
        group.submit(group.members[i % len(group.members)], sample)


def test_a_group_that_shrinks_to_one_decodes_what_one_rank_would_have(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    first, second, third, fourth = group.members
    late = samples[-1]
    _spread(group, samples[:-1])
    group.wait_for_tokens(samples[0].sample_id, 3)
    group.change(leave=(second,))
    assert sorted(group.owner_E.count(w) for w in group.members) == [5, 5, 6]
    group.submit(third, late)
    group.change(leave=(fourth,))
    group.change(leave=(first,))
    assert group.members == (third,)
    done = group.finish_all()
    assert sum(len(r.workers) > 1 for r in done.values()) >= 3
    assert_same(done, reference)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_any_worker_may_leave_first(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response], rank: int
) -> None:
    _spread(group, samples)
    group.wait_for_tokens(samples[0].sample_id, 2)
    group.change(leave=(group.members[rank],))
    assert_same(group.finish_all(), reference)


def test_two_workers_leave_together_and_the_group_grows_twice_under_load(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    _, second, _, fourth = group.members
    group.change(leave=(second, fourth))
    group.change(leave=(group.members[0],))
    _spread(group, samples)
    group.change(join=1)
    group.change(join=2)
    assert len(group.members) == 4
    group.wait_for_tokens(samples[-1].sample_id, 6)
    group.change(leave=group.members[1:3])
    assert_same(group.finish_all(), reference)


def test_one_comes_as_another_goes(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    _spread(group, samples)
    leaver = group.members[2]
    group.change(leave=(leaver,), join=1)
    assert len(group.members) == 4
    assert leaver not in group.members
    assert_same(group.finish_all(), reference)


def test_weights_after_many_moves_equal_those_of_the_checkpoint(
    group: LocalGroup, model: str
) -> None:
    group.change(leave=group.members[:2])
    group.change(join=2)
    owned: dict[tuple[int, int], list[int]] = {}
    for w in group.members:
        mine = group.workers[w].do(inspection.expert_checksums)
        assert not mine.keys() & owned.keys(), "an expert has two owners"
        owned |= mine
    dense = {w: group.workers[w].do(inspection.dense_checksums) for w in group.members}
    fresh = LocalGroup(model, 1)
    try:
        assert owned == fresh.workers[fresh.members[0]].do(inspection.expert_checksums)
        expected = fresh.workers[fresh.members[0]].do(inspection.dense_checksums)
    finally:
        fresh.close()
    assert all(sums == expected for sums in dense.values())


def test_a_joiner_reads_no_checkpoint_shard(group: LocalGroup) -> None:
    group.change(leave=(group.members[-1],))
    group.change(join=1)
    assert group.workers[group.members[-1]].do(inspection.read_files) == []


def test_experts_take_their_memory_from_kv_and_give_it_back(group: LocalGroup) -> None:
    survivor = group.members[0]
    before = group.workers[survivor].do(inspection.footprint)
    expert_bytes = group.builds[survivor].facts.expert_bytes
    block_bytes = group.builds[survivor].facts.kv_block_bytes
    group.change(leave=group.members[1:])
    alone = group.workers[survivor].do(inspection.footprint)
    assert (before["expert_slots"], alone["expert_slots"]) == (4, 16)
    given_up = before["kv_blocks"] - alone["kv_blocks"]
    assert given_up * block_bytes >= 12 * expert_bytes
    assert (given_up - 1) * block_bytes < 12 * expert_bytes
    group.change(join=3)
    again = group.workers[survivor].do(inspection.footprint)
    assert again["kv_blocks"] == before["kv_blocks"]
    assert again["expert_slots"] == before["expert_slots"]


def _cycles(group: LocalGroup, count: int) -> list[dict[str, int]]:
    """Footprints of the one worker that stays, after each 4 -> 1 -> 4."""
    footprints = []
    for _ in range(count):
        group.change(leave=group.members[1:])
        group.change(join=3)
        footprints.append(group.workers[group.members[0]].do(inspection.footprint))
    return footprints


def _assert_flat(footprints: list[dict[str, int]], rss_slack_bytes: int) -> None:
    first, last = footprints[0], footprints[-1]
    grown = {k: (first[k], last[k]) for k in first if k != "rss_bytes" and first[k] != last[k]}
    assert not grown
    assert last["rss_bytes"] - first["rss_bytes"] < rss_slack_bytes, footprints


def test_three_cycles_leak_nothing(group: LocalGroup) -> None:
    _assert_flat(_cycles(group, 3), rss_slack_bytes=16 << 20)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_cycles_leak_nothing(group: LocalGroup) -> None:
    _assert_flat(_cycles(group, 20), rss_slack_bytes=32 << 20)
