from hypothesis import given
from hypothesis import strategies as st

from placement.ids import RolloutId, make_sample_id
from placement.samples import Sample, Sampling, derive_sample_seed


def test_seeds_are_what_they_were() -> None:
    # Golden values: a seed that changed would change every recorded rollout.
    assert derive_sample_seed(0, 0, 0) == 3051931488724851722
    assert derive_sample_seed(0, 0, 1) == 3857964456596338571
    assert derive_sample_seed(1234, 5, 6) == 3256558449176216031


def test_neighbouring_requests_share_no_sample() -> None:
    seeds = {
        derive_sample_seed(request, prompt, sample)
        for request in range(20)
        for prompt in range(20)
        for sample in range(20)
    }
    assert len(seeds) == 20**3


def test_seeds_are_spread_over_all_their_bits() -> None:
    seeds = [derive_sample_seed(7, prompt, sample) for prompt in range(50) for sample in range(40)]
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert 0.44 < share < 0.56, bit  # five standard deviations of a fair coin


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_seed_fits_a_signed_64_bit_integer(request: int, prompt: int, sample: int) -> None:
    assert 0 <= derive_sample_seed(request, prompt, sample) < 2**63


def test_a_moved_sample_keeps_all_but_its_tokens() -> None:
    sample_id = make_sample_id(RolloutId("r"), 3, 1)
    sample = Sample(sample_id, (1, 2, 3), Sampling(max_tokens=8), seed=5, replay_stop_tokens=6)
    moved = sample.continued((9, 9))
    assert (sample.context_tokens, moved.context_tokens) == (3, 5)
    assert moved.max_context_tokens == sample.max_context_tokens == 11
    assert moved.continued(()) == sample
    assert sample_id == "r/3/1"
