import pytest

from placement.simulate.bound import bound_of
from placement.simulate.contest import Entrant, Terms, play, static_widths
from tests.unit.simulated import batch_of, cluster, workload

TOLERANCE = 1.001  # the bound's own grid


@pytest.mark.parametrize("entrant", [Entrant.CHUNK, Entrant.LEAST_LOADED, Entrant.SIMPLE])
@pytest.mark.parametrize("kv_tokens", [6_000, 40_000])
def test_nobody_beats_the_bound(entrant: Entrant, kv_tokens: int) -> None:
    machine, work = cluster(kv_tokens=kv_tokens), workload(120)
    least = bound_of(machine, work)
    outcome = play(machine, work, entrant, Terms())
    assert outcome.span_s * TOLERANCE >= least.span_s
    assert outcome.occupied_worker_s * TOLERANCE >= least.occupied_worker_s


def test_one_sample_alone_on_the_floor_is_its_own_bound() -> None:
    machine, work = cluster(num_workers=1), batch_of([1000])
    outcome = play(machine, work, Entrant.CHUNK, Terms())
    assert bound_of(machine, work).span_s == pytest.approx(outcome.span_s, rel=0.001)


def test_static_widths_begin_with_all_workers_and_stay_above_the_floor() -> None:
    assert static_widths(cluster(8), 4000) == (8, 6, 4)
    tight = cluster(8, kv_tokens=5_000)
    assert static_widths(tight, 4000)[-1] >= tight.floor(4000) > 2
