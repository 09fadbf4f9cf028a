"""What a journal promises on its own: whatever happens to its files, what was promised is found
again or refused by name."""

import asyncio
import functools
import logging
import multiprocessing
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.durable_journal import DurableJournal, open_journal
from actors.journal import Aborted, Accepted, Bound, Closed, Ended, Generated, JournalEntry
from actors.journal_format import HEAD, Opened, encode, frame
from actors.rollout_api import (
    CancelledBy,
    RolloutRequest,
    RolloutUsage,
    SampleStart,
    Strategy,
)
from actors.token_detail import PromptScores, RoutingLayout, TokenDetail
from placement.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason, Sampling
from tests.unit.fake_disk import FakeDisk
from tests.unit.virtual_time import run

R, S = RolloutId("r"), SampleId("r/0/0")


def accepted(name: str = "r", seed: int = 7) -> Accepted:
    request = RolloutRequest(RolloutId(name), ((1, 2),), 1, (Sampling(9),), seed)
    return Accepted(request.rollout_id, request, 1.5)


def generated(count: int = 3, name: str = "r") -> Generated:
    ids, logprobs = tuple(range(count)), tuple(-i / 3 for i in range(count))
    return Generated(RolloutId(name), SampleId(f"{name}/0/0"), 0, ids, logprobs)


def journal_on(disk: FakeDisk, max_bytes: int = 1 << 30, **more: Any) -> DurableJournal:
    return DurableJournal(disk, "model", max_bytes, off_loop=disk.off_loop, **more)


def found_on(disk: FakeDisk) -> list[JournalEntry]:
    return list(journal_on(disk).entries())


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def bounded(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return bounded


async def write(disk: FakeDisk, *entries: JournalEntry) -> None:
    """One frame per entry."""
    journal = journal_on(disk)
    for entry in entries:
        journal.append(entry)
        await journal.written()


EVERYTHING: tuple[JournalEntry, ...] = (
    Accepted(
        R,
        RolloutRequest(
            *(R, ((1, 2), (3,)), 2, (Sampling(9, 0.5, 0.9, 4, (1, 7), True, 3, 2, True),), 2**63),
            strategy=Strategy.STATIC,
            replay_stop_tokens=((4, 5), (6, 7)),
            sample_samplings=((Sampling(3), Sampling(4)), (Sampling(5), Sampling(6))),
            terms="ä terms",
            priority=-3,
            deadline_s=1.25,
            num_wanted=1,
            starts=(SampleStart((8, 9), 2**62), SampleStart(), SampleStart(), SampleStart()),
        ),
        1.5,
    ),
    Bound(R, S, WorkerId(3), 2.5),
    Generated(
        *(R, S, 2, (151_000, 0), (-0.1, float("-inf"))),
        TokenDetail(
            (((7, -1.0), (8, -2.0)), ((8, -2.0),)),
            (b"\x01\x00\x03", b"\xf5FRM"),
            RoutingLayout(1, 1, "uint8"),
            PromptScores(b"1234", b"5678", 1, b"abcd", b"efgh"),
        ),
        "step 7",
    ),
    Bound(R, S, None, 3.5),
    Aborted(R, CancelledBy.DEADLINE, "over", 3.75),
    Ended(R, S, FinishReason.ABORT, "why", 4.5, CancelledBy.DEADLINE),
    Closed(R, RolloutUsage(1.0, 2.0, 3.0, 4.0, 5.0, 6, 7, 8, 9.0)),
)


@in_virtual_time
async def test_every_kind_of_entry_is_found_again_as_it_was() -> None:
    disk = FakeDisk()
    await write(disk, *EVERYTHING)
    assert found_on(disk) == list(EVERYTHING)


@in_virtual_time
async def test_what_many_wait_for_is_one_write_and_in_order() -> None:
    disk = FakeDisk()
    journal = journal_on(disk)
    journal.append(accepted())
    first = asyncio.ensure_future(journal.written())
    await asyncio.sleep(disk.write_s / 4)
    entries = [Bound(R, S, WorkerId(i), float(i)) for i in range(50)]
    waiting = []
    for entry in entries:
        journal.append(entry)
        waiting.append(asyncio.ensure_future(journal.written()))
    await asyncio.gather(first, *waiting)
    assert disk.synced == 2
    assert found_on(disk) == [accepted(), *entries]


@in_virtual_time
async def test_nobody_is_told_before_it_is_on_the_disk() -> None:
    disk = FakeDisk()
    journal = journal_on(disk)
    journal.append(accepted())
    waiting = asyncio.ensure_future(journal.written())
    await asyncio.sleep(disk.write_s / 4)
    assert not waiting.done()
    assert not disk.files
    await waiting
    assert disk.files
    await journal.written()  # there is nothing to write
    assert disk.synced == 1


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 1 << 20), zeros=st.booleans())
def test_a_last_write_that_is_torn_anywhere_is_cut_off_and_all_before_stays(
    cut: int, zeros: bool
) -> None:
    @in_virtual_time
    async def main() -> None:
        disk = FakeDisk()
        await write(disk, accepted(), generated())
        whole = disk.files[1]
        before = len(whole)
        await write_more(disk, Ended(R, S, FinishReason.STOP, "", 2.0))
        (last,) = set(disk.files) - {1}
        torn = disk.files[last][: cut % len(disk.files[last])]
        if zeros:
            torn = torn.ljust(len(disk.files[last]), b"\0")
        disk.files[last] = torn
        assert found_on(disk) == [accepted(), generated()]
        assert len(disk.files[1]) == before
        await write_more(disk, Ended(R, S, FinishReason.LENGTH, "", 3.0))
        assert found_on(disk)[2:] == [Ended(R, S, FinishReason.LENGTH, "", 3.0)]

    main()


async def write_more(disk: FakeDisk, entry: JournalEntry) -> None:
    journal = journal_on(disk)
    journal.append(entry)
    await journal.written()


@in_virtual_time
async def test_every_byte_of_the_last_frame_may_be_missing() -> None:
    disk = FakeDisk()
    await write(disk, accepted(), generated())
    whole = disk.files[1]
    last = len(whole) - len(frame(encode(generated()), 1, 0))
    for length in range(last, len(whole)):
        disk.files = {1: whole[:length]}
        journal = journal_on(disk)
        assert list(journal.entries()) == [accepted()]
        assert journal.figures().cut_bytes == length - last
        assert disk.files[1] == whole[:last]


@in_virtual_time
async def test_what_is_cut_off_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    await write(disk, accepted(), generated())
    disk.files[1] = disk.files[1][:-1]
    with caplog.at_level(logging.WARNING):
        journal_on(disk)
    assert "are cut off" in caplog.text


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 1 << 20), bit=st.integers(0, 7), later_segment=st.booleans())
def test_damage_before_the_end_is_refused_with_file_and_offset(
    at: int, bit: int, later_segment: bool
) -> None:
    @in_virtual_time
    async def main() -> None:
        disk = FakeDisk()
        await write(disk, accepted(), generated())
        promised = len(disk.files[1])
        if later_segment:
            await write_more(disk, Bound(R, S, None, 9.0))
        else:
            promised -= len(frame(encode(generated()), 1, 0))
        damaged = bytearray(disk.files[1])
        damaged[at % promised] ^= 1 << bit
        disk.files[1] = bytes(damaged)
        before = dict(disk.files)
        with pytest.raises(ConfigError, match="segment 1") as refused:
            found_on(disk)
        assert refused.value.field == "coordinator.journal_dir"
        assert disk.files == before, "what is refused is left as it is"

    main()


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200), headed=st.booleans(), framed=st.booleans())
def test_a_file_of_anything_is_refused_or_empty_and_never_believed(
    content: bytes, headed: bool, framed: bool
) -> None:
    disk = FakeDisk()
    if framed:
        content = frame(content, 1, len(HEAD) if headed else 0)
    disk.files[1] = HEAD + content if headed else content
    try:
        found = found_on(disk)
    except ConfigError as error:
        if "segment 1" not in error.message:
            raise
    else:
        assert found == []


def test_another_version_another_model_and_another_place_are_refused() -> None:
    disk = FakeDisk()
    opened = frame(encode(Opened(1, "other")), 1, len(HEAD))
    disk.files[1] = HEAD + opened
    with pytest.raises(ConfigError, match="'other' was served"):
        journal_on(disk)
    disk.files[1] = HEAD[:8] + b"\x09\0\0\0" + opened
    with pytest.raises(ConfigError, match="version 9"):
        journal_on(disk)
    disk.files = {2: HEAD + opened, 3: HEAD + frame(encode(Opened(3, "model")), 3, len(HEAD))}
    with pytest.raises(ConfigError, match="segment 2 is damaged at byte 12"):
        journal_on(disk)


@in_virtual_time
async def test_a_frame_inside_of_what_is_written_is_no_frame() -> None:
    """Else the torn end of a journal could look like its middle, and be refused."""
    disk = FakeDisk()
    inner = frame(encode(accepted("forged")), 1, 0)
    await write(disk, accepted(), replace(generated(1), detail=TokenDetail(routed=(inner,))))
    disk.files[1] = disk.files[1][:-1]
    assert found_on(disk) == [accepted()]


@in_virtual_time
async def test_a_missing_file_is_noticed_by_the_rollout_that_it_began() -> None:
    disk = FakeDisk()
    await write(disk, accepted())
    await write_more(disk, generated())
    del disk.files[1]
    with pytest.raises(ConfigError, match=r"segment 2.*one is missing"):
        found_on(disk)


def test_a_number_that_does_not_fit_is_refused_and_nothing_was_appended() -> None:
    journal = journal_on(FakeDisk())
    with pytest.raises(RequestError, match="64 bits"):
        journal.append(accepted(seed=1 << 70))
    assert journal.figures().kept_bytes == 0


# What is forgotten


@in_virtual_time
async def test_segments_go_when_all_their_rollouts_were_forgotten_and_not_before() -> None:
    disk = FakeDisk()
    journal = journal_on(disk, segment_bytes=2000)
    for index in range(200):
        name = f"r{index}"
        journal.append(accepted(name))
        journal.append(generated(8, name))
        if index >= 5 and index != 50:  # one stays
            journal.forget(RolloutId(f"r{index - 5}"))
        await journal.written()
    assert len(disk.files) < 12, "nothing was removed"
    left = {entry.rollout_id for entry in found_on(disk)}
    assert left == {"r45", *(f"r{index}" for index in range(195, 200))}


@in_virtual_time
async def test_a_forgotten_rollout_never_comes_back_whichever_segments_stay() -> None:
    disk = FakeDisk()
    journal = journal_on(disk, segment_bytes=1)
    open_one, gone = accepted("open"), accepted("gone")
    journal.append(open_one)
    journal.append(gone)
    await journal.written()
    journal.forget(gone.rollout_id)
    await journal.written()
    for index in range(3):
        journal.append(accepted(f"later {index}"))
        await journal.written()
        journal.forget(RolloutId(f"later {index}"))
        await journal.written()
    assert [entry.rollout_id for entry in found_on(disk)] == ["open"]
    again = journal_on(disk, segment_bytes=1)
    again.append(accepted("gone", seed=8))
    await again.written()
    assert found_on(disk) == [open_one, accepted("gone", seed=8)], "its id may be used again"


@in_virtual_time
async def test_a_segment_that_cannot_be_removed_is_removed_later() -> None:
    disk = FakeDisk()
    disk.refuses_to_remove = True
    journal = journal_on(disk, segment_bytes=1)
    journal.append(accepted())
    await journal.written()
    journal.forget(R)
    await journal.written()
    assert 1 in disk.files
    assert found_on_copy(disk) == []
    disk.refuses_to_remove = False
    journal.append(accepted("next"))
    await journal.written()
    assert 1 not in disk.files


def found_on_copy(disk: FakeDisk) -> list[JournalEntry]:
    """Without touching the files of a journal that goes on."""
    copy = FakeDisk()
    copy.files = dict(disk.files)
    return found_on(copy)


@in_virtual_time
async def test_a_crash_between_any_two_removals_leaves_a_journal_that_opens() -> None:
    for seed in range(30):
        rng, disk = random.Random(seed), FakeDisk()
        expected: list[str] = []
        for life in range(4):
            journal = journal_on(disk, segment_bytes=200)
            found = list(dict.fromkeys(entry.rollout_id for entry in journal.entries()))
            assert set(expected) <= set(found), "a rollout that was promised is missing"
            expected = list(found)
            doing = asyncio.ensure_future(_live(journal, rng, life, expected))
            await asyncio.sleep(rng.uniform(0, 0.2))
            doing.cancel()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if task.get_coro().__qualname__.startswith(("_live", "DurableJournal")):  # type: ignore[union-attr]
                    task.cancel()
            await asyncio.sleep(0)
            disk.lose_power(rng)


async def _live(
    journal: DurableJournal, rng: random.Random, life: int, promised: list[str]
) -> None:
    for index in range(1000):
        name = f"{life}-{index}"
        journal.append(accepted(name))
        journal.append(generated(5, name))
        await journal.written()
        promised.append(name)
        while len(promised) > 4:
            journal.forget(RolloutId(promised.pop(rng.randrange(len(promised)))))


# What does not fit


@in_virtual_time
async def test_a_full_journal_refuses_new_rollouts_and_still_takes_what_was_accepted() -> None:
    disk = FakeDisk()
    journal = journal_on(disk, max_bytes=1000)
    journal.append(accepted())
    journal.append(generated(200))
    await journal.written()
    with pytest.raises(OverloadedError, match="journal_max_bytes = 1000"):
        journal.append(accepted("next"))
    journal.append(Ended(R, S, FinishReason.STOP, "", 2.0))
    await journal.written()
    assert len(found_on(disk)) == 3


@in_virtual_time
async def test_a_full_disk_refuses_new_rollouts_and_loses_nothing() -> None:
    disk = FakeDisk()
    journal = journal_on(disk)
    journal.append(accepted())
    await journal.written()
    disk.room_bytes = 20
    journal.append(generated())
    for _ in range(3):
        with pytest.raises(UnavailableError, match="No space left"):
            await journal.written()
        with pytest.raises(UnavailableError, match="make room"):
            journal.append(accepted("next"))
        assert "No space" in journal.figures().trouble
    assert found_on_copy(disk) == [accepted()]
    journal.append(Ended(R, S, FinishReason.STOP, "", 2.0))
    disk.room_bytes = 1 << 20
    await journal.written()
    assert journal.figures().trouble == ""
    journal.append(accepted("next"))
    await journal.written()
    assert found_on(disk) == [
        *(accepted(), generated(), Ended(R, S, FinishReason.STOP, "", 2.0), accepted("next"))
    ]


@in_virtual_time
async def test_room_is_noticed_by_whoever_asks_next_although_nobody_waits() -> None:
    disk = FakeDisk()
    disk.room_bytes = 0
    journal = journal_on(disk)
    journal.append(accepted())
    with pytest.raises(UnavailableError):
        await journal.written()
    disk.room_bytes = 1 << 20
    with pytest.raises(UnavailableError):
        journal.append(accepted("next"))
    await asyncio.sleep(1.0)
    journal.append(accepted("next"))
    await journal.written()
    assert len(found_on(disk)) == 2


# On a real disk


def test_a_directory_holds_what_was_written_for_the_next_process(tmp_path: Path) -> None:
    place = str(tmp_path / "new" / "journal")
    journal = open_journal(place, "model", 1 << 30)

    async def write_all(journal: DurableJournal, entries: Sequence[JournalEntry]) -> None:
        for entry in entries:
            journal.append(entry)
        await journal.close()

    asyncio.run(write_all(journal, EVERYTHING))
    later = open_journal(place, "model", 1 << 30)
    assert list(later.entries()) == list(EVERYTHING)
    assert later.figures().replayed == len(EVERYTHING)
    asyncio.run(write_all(later, [accepted("next")]))
    assert sorted(path.name for path in Path(place).iterdir()) == [
        *("0000000001.segment", "0000000002.segment", "lock")
    ]


def _hold(place: str, holds: Any, end: Any) -> None:
    open_journal(place, "model", 1 << 30)
    holds.set()
    end.wait(30)


def test_two_processes_cannot_write_one_journal(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    holds, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), holds, end))
    other.start()
    try:
        assert holds.wait(60)
        with pytest.raises(ConfigError, match="locked by another process"):
            open_journal(str(tmp_path), "model", 1 << 30)
    finally:
        other.kill()
        other.join(10)
    open_journal(str(tmp_path), "model", 1 << 30)  # a lock ends with its process


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_journal(str(tmp_path / "file"), "model", 1 << 30)
    (tmp_path / "notes.segment").write_text("")
    with pytest.raises(ConfigError, match=r"notes\.segment"):
        open_journal(str(tmp_path), "model", 1 << 30)
