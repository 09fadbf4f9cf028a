"""A change that fails costs no sample, no token and no worker of the old group."""

import pytest

from actors.protocol import RolledBack
from placement.errors import ExpertChecksumError, MembershipError
from placement.ids import SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import Sample
from tests.engine import faults, inspection
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same

pytestmark = pytest.mark.timeout(240)


def _load(group: LocalGroup, samples: list[Sample]) -> None:
    for i, sample in enumerate(samples):
        group.submit(group.members[i % len(group.members)], sample)
    group.wait_for_tokens(samples[0].sample_id, 2)


def _discard(group: LocalGroup, change: GroupChange) -> None:
    for w in change.old_members:
        group.workers[w].do("discard", change.generation)


@pytest.fixture
def pair(group: LocalGroup) -> LocalGroup:
    """Two of the shared group's members; the other two have left."""
    group.change(leave=group.members[2:])
    return group


def test_a_joiner_killed_before_it_prepares_costs_nothing(
    pair: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    before = pair.workers[pair.members[0]].do(inspection.footprint)
    _load(pair, samples)
    change = pair.plan(join=1)
    pair.retire(change.joiners[0])
    calls = [pair.workers[w].call("prepare", change) for w in change.old_members]
    for call in calls:
        with pytest.raises(MembershipError):
            call.result(60)
    _discard(pair, change)
    assert_same(pair.finish_all(), reference)
    after = pair.workers[pair.members[0]].do(inspection.footprint)
    for key in ("process_groups", "kv_blocks", "expert_slots"):
        assert after[key] == before[key]


def test_a_joiner_killed_in_the_middle_of_a_transfer_costs_nothing(
    pair: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    _load(pair, samples)
    change = pair.plan(join=1)
    joiner = change.joiners[0]
    pair.workers[joiner].do(faults.die_in_transfer)
    calls = {w: pair.workers[w].call("prepare", change) for w in (*change.old_members, joiner)}
    _drop(pair, joiner)
    for w in change.old_members:
        with pytest.raises(MembershipError):
            calls[w].result(60)
    _discard(pair, change)
    assert_same(pair.finish_all(), reference)
    pair.change(join=1)
    assert len(pair.members) == 3


@pytest.mark.parametrize("moment", ["commit", "first_step"])
def test_a_joiner_killed_as_it_crosses_costs_nothing(
    pair: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response], moment: str
) -> None:
    _load(pair, samples)
    change = pair.plan(join=1)
    joiner = change.joiners[0]
    pair.prepare(change)
    if moment == "commit":
        pair.workers[joiner].do(faults.die_at_commit, change.generation)
    else:
        pair.workers[joiner].do(faults.die_in_first_step)
    for w in (*change.old_members, joiner):
        pair.workers[w].call("switch", change.generation)
    _drop(pair, joiner)
    for w in change.old_members:
        rolled_back: RolledBack = pair.wait_for_rollback(w, change.generation)
        assert rolled_back.error
    done = pair.finish_all()
    assert_same(done, reference)
    pair.change(join=1)  # and the next try succeeds
    assert len(pair.members) == 3


def _drop(group: LocalGroup, worker_id: WorkerId) -> None:
    """Wait until the worker has died of its planted defect."""
    worker = group.workers.pop(worker_id)
    worker.process.join(60)
    assert not worker.process.is_alive()


def test_a_leaver_that_stands_by_takes_its_part_again_after_a_rollback(
    pair: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    _load(pair, samples)
    change = pair.plan(leave=(pair.members[1],))
    before = pair.members, pair.owner_E
    pair.prepare(change)
    pair.switch(change)
    pair.members, pair.owner_E = before
    for w in change.old_members:
        pair.workers[w].do("rollback", change.generation)
        pair.wait_for_rollback(w, change.generation)
    moved = list(pair.waiting)
    assert pair.workers[change.leavers[0]].do("fetch_kv", moved) == {}
    pair.place_waiting()
    assert_same(pair.finish_all(), reference)
    assert not any(pair.stats(w).kv_used_tokens for w in pair.members), "KV is still held"


def test_a_damaged_expert_stops_the_change_and_the_old_owner_keeps_it(
    pair: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    _load(pair, samples)
    survivor, leaver = pair.members
    pair.workers[survivor].do(faults.corrupt_next_expert)
    change = pair.plan(leave=(leaver,))
    with pytest.raises(ExpertChecksumError, match=r"expert \d+ of layer \d+ came from worker"):
        pair.prepare(change)
    pair.workers[survivor].do(faults.mend_experts)
    _discard(pair, change)
    assert_same(pair.finish_all(), reference)


def test_without_checksums_a_wrong_expert_shows_in_the_comparison(
    model: str, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    """Negative control: the comparison that the other tests stand on can fail."""
    group = LocalGroup(model, 2)
    try:
        for w in group.members:
            group.workers[w].do(faults.skip_checksums)
        group.workers[group.members[0]].do(faults.corrupt_next_expert)
        _load(group, samples)
        group.change(leave=(group.members[1],))
        done = group.finish_all()
        with pytest.raises(AssertionError):
            assert_same(done, reference)
    finally:
        group.close()
