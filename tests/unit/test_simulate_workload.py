import numpy as np
import pytest

from placement.errors import PlanError
from placement.simulate.workload import RecordedPrompt, resample, synthetic_prompts

RECORDED = [
    RecordedPrompt(100 + i, tuple(range(10 * i + 1, 10 * i + 5)), (7 * i + 1,)) for i in range(5)
]


def test_a_prompt_that_comes_once_has_exactly_its_recorded_responses() -> None:
    batch = resample(RECORDED, 20, 4, 1000, seed=1)
    groups = {tuple(batch.response_tokens_N[batch.prompt_N == p].tolist()) for p in range(5)}
    assert groups == {prompt.response_tokens for prompt in RECORDED}
    assert set(batch.history) == {f"p{p}" for p in range(5)}


def test_a_larger_batch_draws_every_prompt_before_any_is_drawn_again() -> None:
    batch = resample(RECORDED, 60, 4, 1000, seed=1)
    tokens = batch.prompt_tokens_N[::4]
    assert len(batch) == 60
    assert [sorted(tokens[i : i + 5].tolist()) for i in (0, 5, 10)] == [
        [100, 101, 102, 103, 104]
    ] * 3
    for prompt in range(15):
        recorded = RECORDED[batch.prompt_tokens_N[batch.prompt_N == prompt][0] - 100]
        drawn = set(batch.response_tokens_N[batch.prompt_N == prompt].tolist())
        assert drawn <= set(recorded.response_tokens)


def test_lengths_are_cut_at_the_limit_and_seeds_differ() -> None:
    one, two = (resample(RECORDED, 20, 4, 30, seed=seed) for seed in (1, 2))
    assert one.longest_tokens == 30
    assert not np.array_equal(one.response_tokens_N, two.response_tokens_N)


def test_the_synthetic_family_has_the_spread_that_was_asked_for() -> None:
    prompts = synthetic_prompts(400, 16, seed=0, between_sigma=0.8, within_sigma=0.6)
    log = np.log([prompt.response_tokens for prompt in prompts])
    assert float(np.median(np.exp(log))) == pytest.approx(3000, rel=0.15)
    assert float(log.std(axis=1).mean()) == pytest.approx(0.6, rel=0.05)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="has no prompts"):
        resample([], 8, 4, 100, seed=0)
