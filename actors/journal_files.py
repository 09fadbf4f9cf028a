"""A journal's files: numbered segments in one directory that one process writes.

What ``write`` has returned from outlives the machine's power. A lock that ends with its process
keeps a second writer out.
"""

import fcntl
import os
import re
from pathlib import Path
from typing import Protocol

from placement.errors import ConfigError

_SUFFIX = ".segment"
_LOCK = "lock"
_FIELD = "coordinator.journal_dir"


class JournalFiles(Protocol):
    """All but ``numbers`` and ``name`` may raise ``OSError``, and then can be tried again."""

    def numbers(self) -> list[int]:
        """Of the segments that are there, ascending."""
        ...

    def name(self, number: int) -> str: ...

    def read(self, number: int) -> bytes: ...

    def write(self, number: int, offset: int, content: bytes) -> None:
        """Returns when ``content`` is on the disk; if it raises, any of it may be there."""
        ...

    def cut(self, number: int, length: int) -> None: ...

    def remove(self, number: int) -> None: ...

    def close(self) -> None: ...


class DirectoryFiles:
    """Raises:
    ConfigError: the directory cannot be used, or another process uses it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._open: tuple[int, int] | None = None
        """Number and descriptor of the segment that was written last."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{directory!r} cannot be written ({error}); name a directory of the coordinator's "
                "node that it may write",
                field=_FIELD,
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"{directory!r} is locked by another process ({error}); end it, or give each "
                "runtime a directory of its own",
                field=_FIELD,
            ) from error

    def numbers(self) -> list[int]:
        names = [path.stem for path in self._directory.glob(f"*{_SUFFIX}")]
        strange = [name for name in names if not re.fullmatch(r"[0-9]{10}", name)]
        if strange:
            raise ConfigError(
                f"{self._directory} holds {strange[0] + _SUFFIX!r}, which is no segment's name; "
                "move it away",
                field=_FIELD,
            )
        return sorted(int(name) for name in names)

    def name(self, number: int) -> str:
        return str(self._path(number))

    def read(self, number: int) -> bytes:
        return self._path(number).read_bytes()

    def write(self, number: int, offset: int, content: bytes) -> None:
        descriptor = self._descriptor(number)
        left = memoryview(content)
        while left:
            written = os.pwrite(descriptor, left, offset)
            left, offset = left[written:], offset + written
        os.fsync(descriptor)

    def cut(self, number: int, length: int) -> None:
        descriptor = os.open(self._path(number), os.O_RDWR)
        try:
            os.ftruncate(descriptor, length)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        self._close_segment()
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:010d}{_SUFFIX}"

    def _descriptor(self, number: int) -> int:
        if self._open is None or self._open[0] != number:
            self._close_segment()
            descriptor = os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._sync_directory()
            except OSError:
                os.close(descriptor)
                raise
            self._open = (number, descriptor)
        return self._open[1]

    def _close_segment(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _sync_directory(self) -> None:
        """Else a crash may forget that there is a new file."""
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
