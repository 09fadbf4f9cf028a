from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.horizon import Horizon, Ladder, Load, Prices, foresee, price
from placement.programme import cheapest_path, dearest_affordable
from placement.remaining import Remaining
from tests.unit.foreseen_group import COSTS

LADDER = Ladder(widths=(1, 2, 4, 8), kv_tokens_C=(50_000, 60_000, 70_000, 80_000), max_samples=64)


def load_of(lengths: list[int], sigma: float = 1e-3, generated: int = 0) -> Load:
    count = len(lengths)
    return Load(
        Remaining(
            np.log(np.array(lengths, np.float64)),
            np.full(count, sigma),
            np.full(count, float(generated)),
            np.full(count, 32_768.0),
        ),
        np.full(count, 100.0 + generated),
        np.ones(count),
    )


def priced(load: Load, ladder: Ladder = LADDER) -> tuple[Horizon, Prices]:
    horizon = foresee(load, first_steps=64)
    return horizon, price(horizon, ladder, COSTS)


def test_with_true_lengths_the_end_is_known() -> None:
    for lengths in ([700] * 20 + [9000], [50], list(range(100, 4000, 37))):
        assert foresee(load_of(lengths), 64).steps.sum() == pytest.approx(
            max(lengths), rel=0.01, abs=4
        )


def test_many_doubtful_samples_end_later_than_each_of_them_is_expected_to() -> None:
    one = foresee(load_of([1000], sigma=0.4), 64).steps.sum()
    many = foresee(load_of([1000] * 64, sigma=0.4), 64).steps.sum()
    assert one == pytest.approx(1000 * np.exp(0.08), rel=0.03)
    sample = np.exp(np.log(1000) + 0.4 * np.random.default_rng(0).standard_normal((4000, 64)))
    assert many == pytest.approx(sample.max(axis=1).mean(), rel=0.03)


def test_a_thinned_load_looks_ahead_to_the_same_future() -> None:
    rng = np.random.default_rng(1)
    lengths = np.exp(7.5 + 0.8 * rng.standard_normal(6000)).astype(int).tolist()
    load = load_of(lengths, sigma=0.3)
    thin = load.thinned()
    assert len(thin.weight_N) < 1200
    assert thin.weight_N.sum() == pytest.approx(6000)
    expected = load.remaining.expected_tokens().sum()
    assert thin.remaining.expected_tokens() @ thin.weight_N == pytest.approx(expected, rel=0.02)


def test_a_path_narrows_where_the_tail_begins_and_not_before() -> None:
    horizon, prices = priced(load_of([1000] * 400 + [20_000]))
    path = cheapest_path(horizon, LADDER, prices, 0.9, 8)
    assert path.width_K[0] == 8
    assert path.width_K[-1] < 8
    assert list(path.width_K) == sorted(path.width_K, reverse=True)


def test_there_is_a_path_even_where_nothing_fits() -> None:
    crowded = replace(LADDER, kv_tokens_C=(1, 1, 1, 1))
    horizon, prices = priced(load_of([5000] * 50), crowded)
    assert not prices.fits_KC[0].any()
    assert set(cheapest_path(horizon, crowded, prices, 1.0, 8).width_K) == {8}


@given(
    st.lists(st.integers(1, 30_000), min_size=1, max_size=40),
    st.floats(0.001, 1.5),
    st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_a_higher_price_never_occupies_more_nor_ends_sooner(
    lengths: list[int], sigma: float, dearer: float
) -> None:
    horizon, prices = priced(load_of(lengths, sigma))
    cheap = cheapest_path(horizon, LADDER, prices, dearer / 2, 8)
    dear = cheapest_path(horizon, LADDER, prices, dearer, 8)
    # What the programme minimises counts a change 1.3 times; hence the slack of one change.
    slack_s = 0.3 * prices.change_s_KCC[np.isfinite(prices.change_s_KCC)].max() * 8
    assert dear.seconds >= cheap.seconds - slack_s
    assert np.isfinite(dear.seconds)


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=40), st.floats(0, 0.5))
@settings(max_examples=40, deadline=None)
def test_the_price_of_a_guarantee_keeps_to_it(lengths: list[int], share: float) -> None:
    horizon, prices = priced(load_of(lengths, sigma=0.3))
    staying_s = float(prices.decode_s_KC[:, -1].sum())
    chosen, path = dearest_affordable(horizon, LADDER, prices, 8, staying_s * (1 + share))
    assert 0 <= chosen <= 1
    assert path.seconds <= staying_s * (1 + share) + 1e-9
