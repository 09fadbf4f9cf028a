"""A sample that moves with its KV goes on as if it had stayed: tokens and logprobs, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from actors.sample_kv import SampleKv, digest_tokens
from placement.ids import SampleId, WorkerId
from placement.samples import Sample, Sampling
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same

pytestmark = pytest.mark.timeout(240)

RESPONSE_TOKENS = 60
TOKENS_BEFORE_MOVE = 8


@pytest.fixture
def copying_group(group: LocalGroup) -> Iterator[LocalGroup]:
    group.copies = True
    group.moved_kv.clear()
    yield group
    group.copies = False


def _sample(prompt_tokens: int, temperature: float) -> Sample:
    sampling = Sampling(max_tokens=RESPONSE_TOKENS, temperature=temperature, ignore_eos=True)
    prompt = tuple(1 + (7 * i) % 250 for i in range(prompt_tokens))
    return Sample(SampleId(f"{prompt_tokens}/{temperature}"), prompt, sampling, seed=prompt_tokens)


def _around_an_edge(block_tokens: int) -> list[Sample]:
    """Greedy and sampled in turn, so long that whenever they move, one is at a block's edge."""
    prompts = [5, *range(block_tokens - 20, block_tokens - 6), 3 * block_tokens]
    return [_sample(prompt, float(i % 2)) for i, prompt in enumerate(prompts)]


def _unmoved(group: LocalGroup, samples: list[Sample]) -> dict[SampleId, Response]:
    group.submit(group.members[0], *samples)
    return group.finish_all()


def _stop_after(group: LocalGroup, sample: Sample, num_tokens: int) -> tuple[Sample, SampleKv]:
    """Decode that many tokens, then let the worker leave; the sample as it then is, and its KV."""
    leaver = group.members[-1]
    held = replace(sample, sample_id=SampleId(f"{sample.sample_id} held"))
    group.submit(leaver, held)
    group.wait_for_tokens(held.sample_id, num_tokens)
    group.change(leave=(leaver,))
    done = group.finish_all()[held.sample_id]
    kv = group.moved_kv[held.sample_id]
    generated = done.token_ids[: kv.num_tokens + 1 - len(sample.prompt_ids)]
    return sample.continued(tuple(generated)), kv


def _goes_on(group: LocalGroup, sample: Sample, kv: SampleKv) -> Response:
    """The rest of a response, decoded behind its KV."""
    sample_id = sample.sample_id
    group.responses[sample_id] = Response(sample, token_ids=list(sample.generated_ids))
    group.submit(group.members[0], sample, kv={sample_id: kv})
    return group.finish_all()[sample_id]


def test_samples_that_move_by_copy_equal_those_that_stayed(copying_group: LocalGroup) -> None:
    group = copying_group
    block_tokens = group.builds[group.members[0]].facts.kv_block_tokens
    samples = _around_an_edge(block_tokens)
    reference = _unmoved(group, samples)
    before = {w: group.stats(w) for w in group.members}
    leaver = group.members[-1]
    change = group.plan(leave=(leaver,))
    group.prepare(change)
    group.submit(leaver, *samples)
    group.wait_for_tokens(samples[-1].sample_id, TOKENS_BEFORE_MOVE)
    group.switch(change)
    group.finalize(change)
    # The next change takes KV from those who stay, with the copied blocks in use.
    group.change(leave=group.members[1:2])
    done = group.finish_all()
    assert_same(done, reference)
    assert all(len(response.workers) > 1 for response in done.values())
    filled = {kv.num_tokens % block_tokens for kv in group.moved_kv.values()}
    assert 0 in filled, "no sample moved at the edge of a block"
    assert len(filled) > 10
    assert {kv.num_blocks for kv in group.moved_kv.values()} >= {1, 2, 4}
    now = {w: group.stats(w) for w in group.members}
    copied = sum(now[w].copied_kv_bytes - before[w].copied_kv_bytes for w in now)
    assert copied > 0
    assert all(now[w].refused_kv == before[w].refused_kv for w in now)
    assert all(now[w].prefilled_tokens == before[w].prefilled_tokens for w in now)


def test_a_sample_may_move_again_and_again_with_its_kv(
    copying_group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    group = copying_group
    group.submit(group.members[-1], *samples)
    for count in (2, 6, 12):
        group.wait_for_tokens(samples[-1].sample_id, count)
        group.change(leave=(group.members[-1],))
    assert len(group.members) == 1
    assert_same(group.finish_all(), reference)


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "recomputed"])
def test_a_sample_moved_between_two_that_decode_on_equals_one_that_stayed(
    copying_group: LocalGroup,
    samples: list[Sample],
    reference: dict[SampleId, Response],
    copies: bool,
) -> None:
    group = copying_group
    group.copies = copies
    one, other = group.members[:2]
    generation = group.generation
    group.submit(one, *samples[::2])
    group.submit(other, *samples[1::2])
    moved_bytes = 0
    for count, sample in enumerate(samples[-4:], start=2):
        group.wait_for_tokens(sample.sample_id, 2 * count)
        there = group.responses[sample.sample_id].workers[-1]
        moved_bytes += group.move(sample.sample_id, other if there == one else one)
    moved = [s.sample_id for s in samples if len(group.responses[s.sample_id].workers) == 2]
    assert moved == [sample.sample_id for sample in samples[-4:]]
    assert (moved_bytes > 0) == copies
    assert_same(group.finish_all(), reference)
    assert group.generation == generation, "nobody left for it"


def test_kv_copied_into_one_block_is_in_use_when_the_pool_grows_back(
    copying_group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    group = copying_group
    group.submit(group.members[-1], *samples)
    group.wait_for_tokens(samples[-1].sample_id, 4)
    group.change(leave=group.members[1:])
    group.change(join=3)
    assert_same(group.finish_all(), reference)


def test_one_wrong_block_shows_in_the_logprobs(copying_group: LocalGroup) -> None:
    group = copying_group
    whole = _sample(100, 0.0)
    reference = _unmoved(group, [whole])[whole.sample_id]
    moved, kv = _stop_after(group, whole, TOKENS_BEFORE_MOVE)
    num_known = len(moved.generated_ids)
    faithful = _goes_on(group, moved, kv)
    assert faithful.token_ids == reference.token_ids
    assert faithful.logprobs == reference.logprobs[num_known:]
    wrong = kv.layers[0].copy()
    wrong[0, : wrong.shape[1] // 2] = 0
    spoilt = _goes_on(group, moved, replace(kv, layers=(wrong, *kv.layers[1:])))
    assert spoilt.logprobs != reference.logprobs[num_known:]


def test_kv_that_is_not_this_samples_or_has_other_blocks_is_recomputed(
    copying_group: LocalGroup,
) -> None:
    group = copying_group
    whole = _sample(100, 1.0)
    reference = _unmoved(group, [whole])[whole.sample_id]
    moved, kv = _stop_after(group, whole, TOKENS_BEFORE_MOVE)
    num_known = len(moved.generated_ids)
    other = replace(moved, prompt_ids=(9, *moved.prompt_ids[1:]))
    garbage = tuple(np.zeros_like(layer) for layer in kv.layers)
    first, *others = kv.block_layout
    misfits = [
        replace(kv, token_digest=digest_tokens(other, kv.num_tokens), layers=garbage),
        replace(kv, num_tokens=moved.context_tokens, layers=garbage),
        replace(kv, block_layout=((first[0], "torch.float16 (2, 2)"), *others), layers=garbage),
    ]
    refused_before = group.stats(group.members[0]).refused_kv
    for misfit in misfits:
        rest = _goes_on(group, moved, misfit)
        assert rest.token_ids == reference.token_ids
        assert rest.logprobs == reference.logprobs[num_known:]
    assert group.stats(group.members[0]).refused_kv == refused_before + len(misfits)


def test_kv_can_be_fetched_once_and_only_of_samples_that_went(copying_group: LocalGroup) -> None:
    group = copying_group
    leaver, sample = group.members[-1], _sample(30, 0.0)
    group.submit(leaver, sample)
    group.wait_for_tokens(sample.sample_id, 2)
    assert group.workers[leaver].do("fetch_kv", [sample.sample_id]) == {}, "it is still running"
    change = group.plan(leave=(leaver,))
    group.prepare(change)
    group.switch(change)
    assert sample.sample_id in group.moved_kv
    ids = [sample.sample_id, SampleId("nobody")]
    assert group.workers[WorkerId(leaver)].do("fetch_kv", ids) == {}
    group.finalize(change)
    group.finish_all()
