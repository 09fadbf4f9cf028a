"""A journal that outlives its coordinator: segments in a directory, written in groups.

``append`` encodes an entry and returns; ``written`` puts all that waits into one frame and syncs
it, in a thread, one write at a time, so the order of entries is the order of their appending and
nobody pays for a sync of his own. A write that fails is tried again with the same bytes and more
behind them, at the same place.

A segment is removed when every rollout in it was forgotten. If it says that a rollout was forgotten
of which an earlier segment, which stays, has something, that is said again at the end before it
goes: a restart would find that rollout again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from actors.journal import Accepted, JournalEntry, JournalFigures
from actors.journal_files import DirectoryFiles, JournalFiles
from actors.journal_format import (
    FIELD,
    HEAD,
    Forgotten,
    Opened,
    Written,
    encode,
    entries,
    frame,
    payloads,
)
from placement.errors import ConfigError, OverloadedError, UnavailableError
from placement.ids import RolloutId

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 32 << 20
"""A segment this large is followed by the next: what is removed is removed in such portions."""


@dataclass(slots=True)
class _Segment:
    """Of ``number``, or what is to be written next.

    Attributes:
        named: rollouts with entries in it; ``live``: those that were not forgotten.
        forgets: rollouts that it says were forgotten, with ``Forgotten.through``.
    """

    size_bytes: int = 0
    named: set[RolloutId] = field(default_factory=set)
    live: set[RolloutId] = field(default_factory=set)
    forgets: dict[RolloutId, int] = field(default_factory=dict)

    def note(self, entry: Written) -> None:
        if isinstance(entry, Forgotten):
            self._forget(entry.rollout_id, entry.through)
        elif not isinstance(entry, Opened):
            self.named.add(entry.rollout_id)
            self.live.add(entry.rollout_id)

    def absorb(self, later: "_Segment") -> None:
        self.named |= later.named
        self.live |= later.live
        for rollout_id, through in later.forgets.items():
            self._forget(rollout_id, through)

    def _forget(self, rollout_id: RolloutId, through: int) -> None:
        before = self.forgets.get(rollout_id, through)
        self.forgets[rollout_id] = max(before, through) if before and through else 0


def open_journal(directory: str, model: str, max_bytes: int) -> "DurableJournal":
    """Raises: ConfigError, if the directory or what is in it cannot be used."""
    files = DirectoryFiles(directory)
    try:
        return DurableJournal(files, model, max_bytes)
    except BaseException:
        files.close()
        raise


class DurableJournal:
    """Args:
    model: what is served; another one's journal is refused.
    max_bytes: no rollout is accepted beyond it. What happens to those that were is written
        all the same: it is bounded by what was accepted.
    off_loop: calls a function that blocks.

    Raises:
        ConfigError: what is there is damaged, or not ours.
    """

    def __init__(
        self,
        files: JournalFiles,
        model: str,
        max_bytes: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        off_loop: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._files = files
        self._model = model
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._off_loop = off_loop
        self._segments: dict[int, _Segment] = {}
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._next = _Segment()
        """What the pending entries are about."""
        self._appended = 0
        self._durable = 0
        self._commit: asyncio.Future[None] | None = None
        self._trouble = ""
        self._forgotten_at: dict[RolloutId, int] = {}
        """How many of all entries found are not of a later rollout of this id."""
        self._forgotten_through: dict[RolloutId, int] = {}
        """The same in segments."""
        self._written_bytes = self._writes = self._replayed = self._cut_bytes = 0
        self._write_s = 0.0
        numbers = files.numbers()
        self._open_segments(numbers)
        self._active = numbers[-1] + 1 if numbers else 1
        self._segments[self._active] = _Segment()

    # What an earlier process left

    def _open_segments(self, numbers: list[int]) -> None:
        """Raises: ConfigError."""
        index = 0
        for number in numbers:
            segment = self._segments[number] = _Segment()
            for entry in self._read(number, segment, last=number == numbers[-1]):
                if isinstance(entry, Opened):
                    self._check_opened(entry, number)
                index += 1
                if isinstance(entry, Forgotten):
                    if not entry.through:
                        self._forgotten_at[entry.rollout_id] = index
                    else:
                        through = self._forgotten_through.get(entry.rollout_id, 0)
                        self._forgotten_through[entry.rollout_id] = max(through, entry.through)
                    for known_number, known in self._segments.items():
                        if known_number <= (entry.through or number):
                            known.live.discard(entry.rollout_id)
                segment.note(entry)
            if not segment.size_bytes:
                del self._segments[number]

    def _check_opened(self, opened: Opened, number: int) -> None:
        if (opened.number, opened.model) != (number, self._model):
            raise ConfigError(
                f"{self._files.name(number)} was written as segment {opened.number} while "
                f"{opened.model!r} was served, and this is segment {number} of {self._model!r}; "
                "choose another directory, or move this one away",
                field=FIELD,
            )

    def _read(self, number: int, segment: _Segment, *, last: bool) -> Iterator[Written]:
        name = self._files.name(number)
        try:
            content = self._files.read(number)
            found, end = payloads(content, number, name, last=last)
            if end < len(content) or not end:
                _log.warning(
                    "%s ends with a write that was not finished: %d bytes behind byte %d are cut "
                    "off, nobody was told of them",
                    *(name, len(content) - end, end),
                )
                self._cut_bytes += len(content) - end
                if end:
                    self._files.cut(number, end)
                else:
                    self._files.remove(number)
        except OSError as error:
            raise ConfigError(f"{name} cannot be read ({error})", field=FIELD) from error
        segment.size_bytes = end
        for payload in found:
            yield from entries(payload, name)

    def entries(self) -> Iterable[JournalEntry]:
        """What was found when the journal was opened, in the order in which it happened.

        Raises: ConfigError, if a file in between is missing.
        """
        index = self._replayed = 0
        accepted: set[RolloutId] = set()
        for number in [n for n, segment in self._segments.items() if segment.size_bytes]:
            for entry in self._read(number, self._segments[number], last=False):
                index += 1
                if isinstance(entry, Opened | Forgotten):
                    continue
                if index <= self._forgotten_at.get(entry.rollout_id, 0):
                    continue
                if number <= self._forgotten_through.get(entry.rollout_id, 0):
                    continue
                if isinstance(entry, Accepted):
                    accepted.add(entry.rollout_id)
                elif entry.rollout_id not in accepted:
                    raise ConfigError(
                        f"{self._files.name(number)} tells of rollout {entry.rollout_id}, and no "
                        "file before it of its acceptance: one is missing; restore it, or move the "
                        "directory away to go on without what it holds",
                        field=FIELD,
                    )
                self._replayed += 1
                yield entry

    # What happens now

    def append(self, entry: JournalEntry) -> None:
        encoded = encode(entry)
        if isinstance(entry, Accepted):
            self._check_room(len(encoded))
        self._add(entry, encoded)

    def _check_room(self, size_bytes: int) -> None:
        if self._trouble:
            self._begin_commit()
            raise UnavailableError(self._trouble, field=FIELD)
        if self._kept_bytes() + size_bytes <= self._max_bytes:
            return
        kept_bytes = self._kept_bytes(without=self._dropped())
        if kept_bytes + size_bytes > self._max_bytes:
            raise OverloadedError(
                f"the journal holds {kept_bytes} bytes, and {size_bytes} more would exceed "
                f"coordinator.journal_max_bytes = {self._max_bytes}; wait until rollouts have "
                "ended, or raise it",
                field="coordinator.journal_max_bytes",
            )

    def _add(self, entry: Written, encoded: bytes) -> None:
        self._pending.append(encoded)
        self._pending_bytes += len(encoded)
        self._next.note(entry)
        self._appended += 1

    def forget(self, rollout_id: RolloutId) -> None:
        for segment in (*self._segments.values(), self._next):
            segment.live.discard(rollout_id)
        forgotten = Forgotten(rollout_id)
        self._add(forgotten, encode(forgotten))

    async def written(self) -> None:
        target = self._appended
        while self._durable < target:
            await asyncio.shield(self._begin_commit())
            if self._trouble and self._durable < target:
                raise UnavailableError(self._trouble, field=FIELD)

    def _begin_commit(self) -> "asyncio.Future[None]":
        if self._commit is None:
            self._commit = asyncio.ensure_future(self._write())
        return self._commit

    async def _write(self) -> None:
        """All that waits now, as one frame."""
        number, upto = self._active, self._appended
        segment = self._segments[number]
        payload = b"".join(self._pending)
        self._pending, self._pending_bytes = [], len(payload)
        segment.absorb(self._next)  # before anybody forgets what is on its way
        self._next = _Segment()
        content = self._beginning(number) if not segment.size_bytes else b""
        offset = segment.size_bytes
        content += frame(payload, number, offset + len(content))
        began_s = time.perf_counter()
        try:
            await self._off_loop(self._files.write, number, offset, content)
        except BaseException as error:
            self._pending.insert(0, payload)
            if not isinstance(error, OSError):
                raise
            self._trouble = (
                f"the journal cannot be written ({self._files.name(number)}: {error}); make room "
                "there, and what waits goes on"
            )
            return
        finally:
            self._commit = None
            self._pending_bytes = sum(map(len, self._pending))
        self._trouble = ""
        self._durable = upto
        self._writes += 1
        self._write_s += time.perf_counter() - began_s
        self._written_bytes += len(content)
        segment.size_bytes = offset + len(content)
        if segment.size_bytes >= self._segment_bytes:
            self._active = number + 1
            self._segments[self._active] = _Segment()
        await self._remove_dropped()

    def _beginning(self, number: int) -> bytes:
        opened = encode(Opened(number, self._model))
        return HEAD + frame(opened, number, len(HEAD))

    async def _remove_dropped(self) -> None:
        """Only now: that their rollouts were forgotten is on the disk."""
        self._say_again()
        for number in self._dropped() if not self._next.forgets else ():
            try:
                await self._off_loop(self._files.remove, number)
            except OSError as error:
                _log.warning("%s cannot be removed yet: %s", self._files.name(number), error)
                return  # a later one may say what happened to its rollouts
            self._segments.pop(number, None)

    def _say_again(self) -> None:
        """What segments that could go say of rollouts in those that stay."""
        staying: set[RolloutId] = set()
        for number, segment in self._segments.items():
            if segment.live or number == self._active:
                staying |= segment.named
                continue
            for rollout_id in staying.intersection(segment.forgets):
                forgotten = Forgotten(rollout_id, segment.forgets.pop(rollout_id) or number)
                self._add(forgotten, encode(forgotten))

    def _dropped(self) -> list[int]:
        """Segments that nobody needs, in the order in which they may go."""
        if all(
            segment.live for number, segment in self._segments.items() if number != self._active
        ):
            return []
        dropped: list[int] = []
        earlier: set[RolloutId] = set()
        for number, segment in self._segments.items():
            if number == self._active:
                break
            if segment.live or earlier.intersection(segment.forgets):
                earlier |= segment.named
            else:
                dropped.append(number)
        return dropped

    def _kept_bytes(self, without: Collection[int] = ()) -> int:
        sizes = (s.size_bytes for number, s in self._segments.items() if number not in without)
        return sum(sizes) + self._pending_bytes

    def figures(self) -> JournalFigures:
        return JournalFigures(
            written_bytes=self._written_bytes,
            writes=self._writes,
            write_s=self._write_s,
            replayed=self._replayed,
            cut_bytes=self._cut_bytes,
            kept_bytes=self._kept_bytes(),
            trouble=self._trouble,
        )

    async def close(self) -> None:
        try:
            await self.written()
        finally:
            self._files.close()
