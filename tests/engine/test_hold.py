"""A held member decodes nothing, loses nothing, and is in nobody's way."""

import pytest

from placement.ids import SampleId
from placement.samples import Sample
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same

pytestmark = pytest.mark.timeout(180)


def _tokens(group: LocalGroup, sample: Sample) -> int:
    return len(group.responses[sample.sample_id].token_ids)


def test_peers_of_a_held_member_decode_on_and_its_own_samples_stand_still(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    held = group.members[1]
    mine, others = samples[-1], samples[:6]
    group.submit(held, mine)
    group.wait_for_tokens(mine.sample_id, 3)
    for _ in range(2):  # a second time changes nothing
        group.workers[held].do("hold")
    group.collect(held)
    before = _tokens(group, mine)
    group.submit(group.members[0], *others)
    group.wait_until(lambda: all(group.responses[s.sample_id].finish for s in others))
    assert _tokens(group, mine) == before
    assert before < mine.sampling.max_tokens
    group.workers[held].do("unhold")
    assert_same(group.finish_all(), reference)


def test_a_group_of_which_all_are_held_still_changes(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    for i, sample in enumerate(samples):
        group.submit(group.members[i % 4], sample)
    group.wait_for_tokens(samples[-1].sample_id, 2)
    for worker in group.members:
        group.workers[worker].do("hold")
    for worker in group.members:
        group.collect(worker)
    standing = {s.sample_id: _tokens(group, s) for s in samples}
    crossed = group.change(leave=(group.members[2],))
    group.change(join=1)
    assert len(crossed) == 4
    for worker in group.members[:3]:
        group.collect(worker)
    moved = {i for i, r in group.responses.items() if r.workers[-1] == group.members[3]}
    assert all(_tokens(group, s) == standing[s.sample_id] for s in samples if s not in moved)
    for worker in group.members:
        group.workers[worker].do("unhold")
    assert_same(group.finish_all(), reference)
