"""A journal that outlives its coordinator: segments in a directory, written in groups.

``append`` encodes an entry and returns; ``written`` puts all that waits into one frame and syncs
it, in a thread, one write at a time, so the order of entries is the order of their appending and
nobody pays for a sync of his own. A write that fails is tried again with the same bytes and more
behind them, at the same place.

``actors.journal_segments`` says which segments can be removed; one goes only when it is on the
disk that its rollouts were forgotten.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
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
from actors.journal_segments import Segment, Segments
from placement.errors import ConfigError, OverloadedError, UnavailableError
from placement.ids import RolloutId

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 32 << 20
"""A segment this large is followed by the next: what is removed is removed in such portions."""


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
        self._segments = Segments()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
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
        self._segments.begin()

    # What an earlier process left

    def _open_segments(self, numbers: list[int]) -> None:
        """Raises: ConfigError."""
        index = 0
        for number in numbers:
            segment = self._segments.add(number)
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
                    self._segments.forget(entry.rollout_id, entry.through or number)
                segment.note(entry)
            if not segment.size_bytes:
                del self._segments.by_number[number]

    def _check_opened(self, opened: Opened, number: int) -> None:
        if (opened.number, opened.model) != (number, self._model):
            raise ConfigError(
                f"{self._files.name(number)} was written as segment {opened.number} while "
                f"{opened.model!r} was served, and this is segment {number} of {self._model!r}; "
                "choose another directory, or move this one away",
                field=FIELD,
            )

    def _read(self, number: int, segment: Segment, *, last: bool) -> Iterator[Written]:
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
        for number, segment in list(self._segments.by_number.items()):
            for entry in self._read(number, segment, last=False) if segment.size_bytes else ():
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
        kept_bytes = self._kept_bytes(without=self._segments.dropped())
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
        self._segments.coming.note(entry)
        self._appended += 1

    def forget(self, rollout_id: RolloutId) -> None:
        self._segments.forget(rollout_id)
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
        for forgotten in self._segments.say_again():
            self._add(forgotten, encode(forgotten))
        number, upto = self._segments.active, self._appended
        segment = self._segments.take_coming()  # before anybody forgets what is on its way
        dropped = self._segments.dropped()
        payload = b"".join(self._pending)
        self._pending, self._pending_bytes = [], len(payload)
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
            self._segments.begin()
        await self._remove(dropped)

    def _beginning(self, number: int) -> bytes:
        opened = encode(Opened(number, self._model))
        return HEAD + frame(opened, number, len(HEAD))

    async def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            try:
                await self._off_loop(self._files.remove, number)
            except OSError as error:
                _log.warning("%s cannot be removed yet: %s", self._files.name(number), error)
                return  # a later one may say what happened to its rollouts
            self._segments.by_number.pop(number, None)

    def _kept_bytes(self, without: Collection[int] = ()) -> int:
        return self._segments.size_bytes(without) + self._pending_bytes

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
