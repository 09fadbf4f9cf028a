"""What one engine does with samples, kernels and memory, beside any change of membership."""

import pytest
import torch

from actors.engines.kernel_probe import NUM_ROWS, in_fixed_tiles, probe_or_replace, probe_rows
from placement.errors import ExactModeRefusedError, MembershipError, ModelRefusedError
from placement.ids import SampleId
from placement.samples import FinishReason, Sample, Sampling
from tests.engine import faults, inspection
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same

pytestmark = pytest.mark.timeout(180)


def _sample(name: str, prompt_tokens: int, max_tokens: int, **fields: object) -> Sample:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompt = tuple(1 + i % 250 for i in range(prompt_tokens))
    return Sample(SampleId(name), prompt, sampling, seed=1, **fields)  # type: ignore[arg-type]


def test_the_facts_say_how_many_experts_a_token_reaches(group: LocalGroup) -> None:
    facts = group.builds[group.members[0]].facts
    assert 0 < facts.experts_per_token < facts.num_experts


def test_a_replayed_length_ends_a_sample_as_a_stop(group: LocalGroup) -> None:
    group.submit(group.members[0], _sample("replay", 8, 40, replay_stop_tokens=5))
    group.submit(group.members[1], _sample("whole", 8, 6))
    done = group.finish_all()
    replayed, whole = done[SampleId("replay")], done[SampleId("whole")]
    assert (replayed.finish, len(replayed.token_ids)) == (FinishReason.STOP, 5)
    assert (whole.finish, len(whole.token_ids)) == (FinishReason.LENGTH, 6)
    assert whole.token_ids[:5] == replayed.token_ids


def test_a_stop_token_ends_a_sample_and_is_its_last_token(group: LocalGroup) -> None:
    group.submit(group.members[0], _sample("free", 8, 12))
    tokens = group.finish_all()[SampleId("free")].token_ids
    sampling = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(tokens[4],))
    group.submit(
        group.members[0], Sample(SampleId("stopped"), tuple(range(1, 9)), sampling, seed=1)
    )
    stopped = group.finish_all()[SampleId("stopped")]
    assert stopped.finish is FinishReason.STOP
    assert stopped.token_ids == tokens[: tokens.index(tokens[4]) + 1]


def test_a_sample_that_cannot_fit_fails_by_itself_and_the_engine_lives(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    group.submit(group.members[0], _sample("long", 1000, 100), samples[0])
    done = group.finish_all()
    failed = done.pop(SampleId("long"))
    assert failed.finish is FinishReason.FAILED
    assert "1000 prompt tokens and max_tokens 100 exceed the model's 1024" in failed.error
    assert_same(done, reference)


def test_a_token_outside_the_vocabulary_fails_its_sample_and_not_the_engine(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    sampling = Sampling(max_tokens=4)
    group.submit(group.members[0], Sample(SampleId("alien"), (5, 4096), sampling, seed=1))
    group.submit(group.members[0], samples[1])
    done = group.finish_all()
    failed = done.pop(SampleId("alien"))
    assert failed.finish is FinishReason.FAILED
    assert "4096" in failed.error
    assert_same(done, reference)


def test_a_cancelled_sample_frees_its_kv_within_a_step(group: LocalGroup) -> None:
    worker = group.workers[group.members[0]]
    group.submit(group.members[0], _sample("endless", 200, 800))
    group.wait_for_tokens(SampleId("endless"), 2)
    steps = worker.do("collect", worker.acknowledged, 0.0).stats.steps
    worker.do("cancel", [SampleId("endless")])
    group.wait_until(lambda: SampleId("endless") in group.waiting)
    stats = worker.do("collect", worker.acknowledged, 0.0).stats
    assert (stats.running, stats.kv_used_tokens) == (0, 0)
    assert stats.steps - steps <= 3


def test_samples_whose_kv_lies_in_blocks_that_are_given_up_go_on_unharmed(
    model: str, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    """The pool is filled once, so that the workload's blocks lie high, then experts arrive."""
    group = LocalGroup(model, 2, max_workers=2, kv_memory_bytes=24 << 20)
    try:
        first = group.members[0]
        blocks = group.builds[first].kv_capacity_tokens // 128
        fillers = [_sample(f"filler-{i}", 700, 200) for i in range(min(blocks // 7, 12))]
        group.submit(first, *fillers)
        for filler in fillers:
            group.wait_for_tokens(filler.sample_id, 1)
        group.submit(first, *samples[:4])
        group.wait_for_tokens(samples[0].sample_id, 1)
        group.workers[first].do("cancel", [f.sample_id for f in fillers])
        group.wait_until(lambda: len(group.waiting) == len(fillers))
        group.waiting.clear()
        for filler in fillers:
            del group.responses[filler.sample_id]
        group.change(leave=(group.members[1],))
        assert_same(group.finish_all(), reference)
    finally:
        group.close()


def test_experts_are_refused_where_the_kv_in_use_leaves_no_room(model: str) -> None:
    group = LocalGroup(model, 2, max_workers=2, kv_memory_bytes=12 << 20)
    try:
        first, second = group.members
        blocks = group.builds[first].kv_capacity_tokens // 128
        full = [_sample(f"full-{i}", 900, 100) for i in range(blocks // 8)]
        group.submit(first, *full)
        for sample in full:
            group.wait_for_tokens(sample.sample_id, 1)
        change = group.plan(leave=(second,))
        with pytest.raises(MembershipError, match=r"KV blocks, and \d+ are in use"):
            group.prepare(change)
        for w in change.old_members:
            group.workers[w].do("discard", change.generation)
        group.wait_for_tokens(full[0].sample_id, 4)
    finally:
        group.close()


@pytest.mark.parametrize("tile", [16, 1])
def test_a_real_kernel_that_varies_does_not_vary_in_fixed_tiles(tile: int) -> None:
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    x = torch.randn(NUM_ROWS, 256, generator=torch.Generator().manual_seed(1))

    def linear(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, weight)

    stock = probe_rows("linear", lambda index: linear(x[index]))
    assert not stock.invariant, "this torch has a dense kernel that does not vary: choose another"
    tiled = in_fixed_tiles(linear, tile)
    assert probe_rows("linear", lambda index: tiled(x[index])).invariant


def test_an_engine_replaces_a_kernel_that_varies_and_then_keeps_the_promise(
    model: str, samples: list[Sample]
) -> None:
    group = LocalGroup(
        model,
        1,
        before_build=faults.use_torch_linear,
        engine_args={"max_model_len": 1024, "dtype": "float32"},
    )
    try:
        report = group.builds[group.members[0]].exact_report
        assert any("replaced by tiles of" in found for found in report.values()), report
        assert group.workers[group.members[0]].do(inspection.step_is_wrapped)
        group.submit(0, *samples[:6])
        together = group.finish_all()
        for sample in samples[:3]:
            group.submit(0, sample)
            assert_same(group.finish_all(), together)
    finally:
        group.close()


def test_exact_mode_is_refused_by_name_where_no_replacement_helps() -> None:
    calls = iter(range(1 << 20))

    def restless(index: torch.Tensor) -> torch.Tensor:
        return torch.full((len(index), 1), float(next(calls)))

    with pytest.raises(
        ExactModeRefusedError, match=r"lm_head varies: .* set model\.exact to false"
    ):
        probe_or_replace("lm_head", restless, lambda _tile: None)


def test_the_stock_combine_decodes_the_same_distribution_without_the_promise(
    model: str, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    group = LocalGroup(model, 2, exact=False)
    try:
        for i, sample in enumerate(samples[:6]):
            group.submit(group.members[i % 2], sample)
        done = group.finish_all()
    finally:
        group.close()
    for sample_id, response in done.items():
        expected = reference[sample_id]
        assert response.finish == expected.finish
        assert response.logprobs[0] == pytest.approx(expected.logprobs[0], abs=0.1)


def test_a_directory_that_is_no_model_is_refused_with_its_name(tmp_path: object) -> None:
    with pytest.raises(ModelRefusedError, match="vLLM cannot serve"):
        LocalGroup(str(tmp_path), 1)
