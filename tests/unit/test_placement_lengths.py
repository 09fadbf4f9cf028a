import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import PlanError
from placement.lengths import LengthPredictor
from placement.remaining import Remaining, log_normal_sf

PROMPTS = 100
SAMPLES = 4


def rollout(seed: int, shift: float = 0.0, within: float = 0.3) -> list[tuple[str, int]]:
    """Prompts with levels of their own (the same for every seed) and samples around them."""
    levels = 7.0 + 0.9 * np.random.default_rng(0).standard_normal(PROMPTS) + shift
    noise = within * np.random.default_rng(seed).standard_normal((PROMPTS, SAMPLES))
    tokens = np.exp(levels[:, None] + noise).astype(int) + 1
    return [(f"p{i}", int(n)) for i, row in enumerate(tokens) for n in row]


def taught(*rollouts: list[tuple[str, int]]) -> LengthPredictor:
    predictor = LengthPredictor()
    for samples in rollouts:
        for key, tokens in samples:
            predictor.observe(key, tokens)
        predictor.begin_rollout()
    return predictor


def errors(predictor: LengthPredictor, samples: list[tuple[str, int]]) -> np.ndarray:
    return np.array([math.log(n) - predictor.belief(key).mu for key, n in samples])


def decode(predictor: LengthPredictor, samples: list[tuple[str, int]], step: int) -> None:
    """Everything up to this step: short samples have ended, the others have so many tokens."""
    for key, tokens in samples:
        if tokens <= step:
            predictor.observe(key, tokens)
    predictor.refresh((key, step) for key, tokens in samples if tokens > step)


def test_a_prompt_is_expected_to_be_as_long_as_it_was() -> None:
    predictor = taught(rollout(1))
    assert predictor.trusted
    assert predictor.skill > 0.8
    error = errors(predictor, rollout(2))
    assert np.sqrt(np.mean(error**2)) < 0.4  # 0.9 between prompts, 0.3 within


def test_beliefs_are_as_doubtful_as_they_are_wrong() -> None:
    predictor = taught(rollout(1), rollout(2), rollout(3))
    sigma = np.array([predictor.belief(key).sigma for key, _ in rollout(4)])
    z = errors(predictor, rollout(4)) / sigma
    assert 0.7 < z.std() < 1.2


def test_a_prompt_whose_samples_differ_more_is_believed_less_exactly() -> None:
    predictor = LengthPredictor()
    rng = np.random.default_rng(0)
    for _ in range(2):  # the second time it is the past that says so
        for number in range(60):
            steady, wild = 2000 * np.exp(0.1 * rng.standard_normal((2, 8)) * [[1], [8]])
            for tokens in steady:
                predictor.observe(f"steady-{number}", int(tokens))
            for tokens in wild:
                predictor.observe(f"wild-{number}", int(tokens))
        wild_sigma, steady_sigma = (
            np.mean([predictor.belief(f"{kind}-{n}").sigma for n in range(60)])
            for kind in ("wild", "steady")
        )
        assert wild_sigma > 1.25 * steady_sigma
        predictor.begin_rollout()
    assert predictor.belief("wild-0").sigma > 1.1 * predictor.belief("steady-0").sigma


def test_without_history_the_first_samples_of_a_prompt_foretell_the_others() -> None:
    predictor = LengthPredictor()
    samples = rollout(1)
    for key, tokens in samples[::2]:
        predictor.observe(key, tokens)
    predictor.refresh(())
    assert predictor.trusted
    assert np.sqrt(np.mean(errors(predictor, samples[1::2]) ** 2)) < 0.45


def test_a_policy_that_writes_longer_is_noticed_while_most_samples_still_run() -> None:
    predictor, samples = taught(rollout(1)), rollout(2, shift=0.5)
    assert errors(predictor, samples).mean() > 0.4
    decode(predictor, samples, int(np.quantile([n for _, n in samples], 0.3)))
    assert abs(errors(predictor, samples).mean()) < 0.2


def test_what_still_runs_counts_or_everything_would_look_short() -> None:
    samples = rollout(2)
    step = int(np.quantile([n for _, n in samples], 0.3))
    seen, blind = taught(rollout(1)), taught(rollout(1))
    decode(seen, samples, step)
    for key, tokens in samples:
        if tokens <= step:
            blind.observe(key, tokens)
    blind.refresh(())
    assert abs(errors(seen, samples).mean()) < abs(errors(blind, samples).mean())


def test_a_history_of_other_prompts_is_not_trusted() -> None:
    """The same keys with lengths that have nothing to do with them."""
    rng = np.random.default_rng(5)
    shuffled = [key for key, _ in rollout(1)]
    rng.shuffle(shuffled)
    one_each = [(f"p{i}", int(np.exp(7 + 0.9 * rng.standard_normal()))) for i in range(PROMPTS)]
    predictor = taught([(k, n) for k, (_, n) in zip(shuffled, rollout(1), strict=True)], one_each)
    beliefs = {predictor.belief(f"p{i}") for i in range(PROMPTS)}
    assert not predictor.trusted
    assert len(beliefs) == 1


def test_too_few_samples_are_no_skill() -> None:
    predictor = LengthPredictor()
    for _ in range(10):
        predictor.observe("p", 100)
    assert predictor.skill == 0.0


def test_a_cut_response_counts_as_longer_than_it_is() -> None:
    cut, whole = taught(rollout(1)), taught(rollout(1))
    for _ in range(8):
        cut.observe("p3", 200, censored=True)
        whole.observe("p3", 200)
    for predictor in (cut, whole):
        predictor.refresh(())
    assert cut.belief("p3").mu > whole.belief("p3").mu


def test_a_response_without_tokens_is_an_error() -> None:
    with pytest.raises(PlanError, match="response_tokens"):
        LengthPredictor().observe("p", 0)


def test_only_so_many_prompts_are_remembered_and_the_oldest_are_forgotten() -> None:
    predictor = LengthPredictor(max_prompts=3)
    for key in "abc":
        predictor.observe(key, 10)
    predictor.begin_rollout()
    for key in "da":
        predictor.observe(key, 10)
    predictor.begin_rollout()
    assert [past.prompt_key for past in predictor.history().prompts] == ["c", "d", "a"]


def test_a_restart_changes_no_belief() -> None:
    predictor = taught(rollout(1), rollout(2))
    again = LengthPredictor(predictor.history())
    for key in ("p0", "p17", "never seen"):
        assert again.belief(key) == predictor.belief(key)


@given(
    mu=st.floats(0, 11),
    sigma=st.floats(1e-3, 2),
    generated=st.integers(0, 60_000),
    further=st.integers(0, 60_000),
)
@settings(max_examples=200)
def test_what_is_left_lies_between_nothing_and_the_limit(
    mu: float, sigma: float, generated: int, further: int
) -> None:
    limit = float(generated + further)
    left = Remaining(*(np.array([x]) for x in (mu, sigma, float(generated), limit)))
    expected = left.expected_tokens()[0]
    assert 0 <= expected <= further + 1e-6
    points = np.linspace(0, max(1, further), 9)
    survival = left.survival(points)[:, 0]
    assert np.all(np.diff(survival) <= 1e-9)
    assert np.all((survival >= 0) & (survival <= 1))
    assert survival[-1] == 0  # at the limit


def test_the_mean_of_what_is_left_is_the_integral_of_its_survival() -> None:
    left = Remaining(*(np.array([x]) for x in (8.0, 0.4, 2500.0, 9000.0)))
    points = np.arange(0, 6500) + 0.5
    assert left.expected_tokens()[0] == pytest.approx(left.survival(points).sum(), rel=1e-3)


def test_the_tail_of_the_normal_does_not_underflow() -> None:
    assert log_normal_sf(np.array([0.0]))[0] == pytest.approx(math.log(0.5), abs=1e-6)
    assert log_normal_sf(np.array([40.0]))[0] == pytest.approx(-804.608, abs=1e-3)
