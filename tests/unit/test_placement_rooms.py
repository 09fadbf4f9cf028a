from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from placement.ids import WorkerId
from placement.rooms import Room, kv_need_tokens, place


@dataclass(frozen=True)
class FakeSample:
    name: int
    max_context_tokens: int


def rooms(*capacities: int, max_samples: int = 8) -> list[Room]:
    return [Room(WorkerId(i), i, max_samples, tokens) for i, tokens in enumerate(capacities)]


def names_by_room(placed: list[tuple[FakeSample, Room]]) -> list[tuple[int, int]]:
    return [(sample.name, room.rank) for sample, room in placed]


def samples_of(*lengths: int) -> list[FakeSample]:
    return [FakeSample(i, length) for i, length in enumerate(lengths)]


lengths_st = st.lists(st.integers(1, 30), max_size=25)
capacities_st = st.lists(st.integers(0, 60), min_size=1, max_size=6)


def test_a_need_is_whole_blocks() -> None:
    assert [kv_need_tokens(n, 16) for n in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_the_least_loaded_room_is_taken_and_the_first_rank_among_equals() -> None:
    placed = place(samples_of(5, 3, 1, 1), rooms(10, 10, 10), 1)
    assert names_by_room(placed) == [(0, 0), (1, 1), (2, 2), (3, 2)]


def test_blocks_are_counted_where_tokens_alone_would_fit() -> None:
    assert len(place(samples_of(17, 17), rooms(48), 1)) == 2
    assert len(place(samples_of(17, 17), rooms(48), 16)) == 1


def test_a_long_sample_that_waits_keeps_one_room_and_no_more() -> None:
    # 9 tokens wait; the least loaded room that could hold them takes nothing else meanwhile.
    full = rooms(10, 10, 4)
    full[0].add(5)
    full[1].add(6)
    placed = place(samples_of(9, 4, 4), full, 1)
    assert names_by_room(placed) == [(1, 2), (2, 1)]


def test_a_sample_just_shorter_than_one_that_waits_passes_it() -> None:
    loaded = rooms(10, 10)
    for room in loaded:
        room.add(2)
    assert names_by_room(place(samples_of(9, 8), loaded, 1)) == [(1, 1)]


def test_a_sample_that_no_room_could_ever_hold_keeps_none() -> None:
    assert names_by_room(place(samples_of(99, 4, 4), rooms(4, 4), 1)) == [(1, 0), (2, 1)]


def test_a_stream_of_short_samples_cannot_starve_a_long_one() -> None:
    """Each turn the oldest short sample ends and as many new ones queue as could fill the rooms."""
    long = FakeSample(-1, 10)
    running: list[tuple[FakeSample, int]] = [(FakeSample(i, 4), i % 2) for i in range(4)]
    for turn in range(10):
        now = rooms(10, 10)
        for sample, rank in running:
            now[rank].add(sample.max_context_tokens)
        queue = [long, *(FakeSample(100 * turn + i, 4) for i in range(10))]
        placed = place(queue, now, 1)
        if any(sample is long for sample, _ in placed):
            return
        running = [*running, *((sample, room.rank) for sample, room in placed)][1:]
    raise AssertionError("the long sample found no room in 10 turns")


@given(capacities_st, lengths_st, st.integers(1, 4), st.sampled_from([1, 4]))
def test_no_room_is_ever_overfull(
    capacities: list[int], lengths: list[int], max_samples: int, block: int
) -> None:
    filled = rooms(*capacities, max_samples=max_samples)
    placed = place(samples_of(*lengths), filled, block)
    assert not any(room.overfull for room in filled)
    assert [s.name for s, _ in placed] == sorted({s.name for s, _ in placed})
    for room in filled:
        here = [sample for sample, place_ in placed if place_ is room]
        assert room.num_samples == len(here)
        assert room.need_tokens == sum(kv_need_tokens(s.max_context_tokens, block) for s in here)


@given(capacities_st, lengths_st, st.integers(1, 4))
def test_what_waits_fits_nowhere_but_in_the_one_room_kept_for_an_earlier_sample(
    capacities: list[int], lengths: list[int], max_samples: int
) -> None:
    filled = rooms(*capacities, max_samples=max_samples)
    samples = samples_of(*lengths)
    placed = {sample.name for sample, _ in place(samples, filled, 1)}
    waiting = [sample for sample in samples if sample.name not in placed]
    if not waiting:
        return
    first, *later = waiting
    assert not any(room.fits(first.max_context_tokens) for room in filled)
    still_open = {r.rank for s in later for r in filled if r.fits(s.max_context_tokens)}
    assert len(still_open) <= 1


@given(st.integers(1, 60), st.lists(st.integers(0, 20), min_size=1, max_size=6), lengths_st)
def test_a_plan_that_fits_equal_rooms_fits_unchanged_where_some_have_more(
    capacity: int, extra: list[int], lengths: list[int]
) -> None:
    samples = samples_of(*lengths)
    equal = place(samples, rooms(*(capacity for _ in extra)), 1)
    larger = place(samples, rooms(*(capacity + more for more in extra)), 1)
    if len(equal) == len(samples):
        assert names_by_room(larger) == names_by_room(equal)
