"""A disk that can be full, can be slow, and can lose its power in the middle of a write."""

import asyncio
import errno
import random
from collections.abc import Callable
from typing import Any


class FakeDisk:
    """Implements ``actors.journal_files.JournalFiles``.

    Attributes:
        room_bytes: how much more it takes; a write beyond leaves what still fits, as disks do.
        refuses_to_remove: files stay, with an error.
        synced: writes that have returned.
    """

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.room_bytes = 1 << 40
        self.refuses_to_remove = False
        self.synced = 0
        self.write_s = 0.004
        self._under_way: tuple[int, int, bytes] | None = None

    def numbers(self) -> list[int]:
        return sorted(self.files)

    def name(self, number: int) -> str:
        return f"segment {number}"

    def read(self, number: int) -> bytes:
        return self.files[number]

    def write(self, number: int, offset: int, content: bytes) -> None:
        self._put(number, offset, content[: self.room_bytes])
        if len(content) > self.room_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room_bytes -= len(content)
        self.synced += 1

    def _put(self, number: int, offset: int, content: bytes) -> None:
        before = self.files.get(number, b"")
        assert offset <= len(before), "a hole"
        self.files[number] = before[:offset] + content + before[offset + len(content) :]

    def cut(self, number: int, length: int) -> None:
        self.files[number] = self.files[number][:length]

    def remove(self, number: int) -> None:
        if self.refuses_to_remove:
            raise OSError(errno.EACCES, "Permission denied")
        self.room_bytes += len(self.files.pop(number, b""))

    def close(self) -> None:
        """The next process may open it."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.files.values()))

    async def off_loop(self, call: Callable[..., Any], *args: Any) -> None:
        """Takes time, and in the middle of it nothing or anything may be on the disk."""
        if call == self.write:
            self._under_way = args  # type: ignore[assignment]  # what ``write`` takes
        await asyncio.sleep(self.write_s / 2)
        call(*args)
        self._under_way = None
        await asyncio.sleep(self.write_s / 2)

    def lose_power(self, rng: random.Random) -> None:
        """Of a write under way any beginning stays, and of its rest perhaps only the length."""
        if self._under_way is None:
            return
        number, offset, content = self._under_way
        self._under_way = None
        kept = content[: rng.randint(0, len(content))]
        if rng.random() < 0.5:
            kept += bytes(rng.randint(0, len(content) - len(kept)))
        if kept or number in self.files:
            self._put(number, offset, kept)
