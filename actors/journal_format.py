"""The bytes of a journal's segments: a head, then frames, each with a mark, length and checksum.

A frame holds what was written and synced at once, so a frame behind another one proves that the
other was whole: damage with an intact frame behind it is damage to what was promised, damage at the
very end is a write that a crash cut short. The checksum also covers where the frame is, so bytes
that somebody sent inside a request are no frame, and neither is one in another place.

Entries are MessagePack, decoded into the records of ``actors.journal`` and nothing else: reading
a journal runs no code from it, whoever wrote it.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.journal import Aborted, Accepted, Bound, Closed, Ended, Generated, JournalEntry
from placement.errors import ConfigError, RequestError
from placement.ids import RolloutId

FORMAT = b"FLXJRNL\n"
VERSION = 1
FIELD = "coordinator.journal_dir"

_HEAD = struct.Struct("<8sI")  # format, version
_FRAME = struct.Struct("<4sII")  # mark, bytes of the payload, checksum
_ENTRY = struct.Struct("<BI")  # kind, bytes
_PLACE = struct.Struct("<QQ")  # segment, offset
_MARK = b"\xf5FRM"
_MOST_MARKS = 1000
"""Marks that are looked at behind damage; nobody but an attacker makes so many that are none."""

HEAD = _HEAD.pack(FORMAT, VERSION)


@dataclass(frozen=True, slots=True)
class Opened:
    """The first entry of a segment: which one it is, and what is served."""

    number: int
    model: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A rollout, ended, that can no longer be asked for.

    ``through``: it is in segments up to this one, and what later ones have of it is a later rollout
    of this id; 0: it is in what stands before this entry.
    """

    rollout_id: RolloutId
    through: int = 0


Written = JournalEntry | Opened | Forgotten

_KINDS: tuple[type[Any], ...] = (
    *(Opened, Accepted, Bound, Generated, Ended, Forgotten, Aborted, Closed),
)
"""Their places are their numbers in the files: new ones go to the end."""
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS = tuple(msgspec.msgpack.Decoder(kind) for kind in _KINDS)
_ENCODER = msgspec.msgpack.Encoder()


def encode(entry: Written) -> bytes:
    """Raises: RequestError, for a number that is no 64-bit one."""
    try:
        body = _ENCODER.encode(entry)
    except OverflowError as error:
        raise RequestError(
            f"a number of {getattr(entry, 'rollout_id', 'it')} does not fit into 64 bits "
            f"({error}), so it cannot be journaled; send a smaller one"
        ) from error
    return _ENTRY.pack(_NUMBER_OF[type(entry)], len(body)) + body


def frame(payload: bytes, number: int, offset: int) -> bytes:
    """Entries as they stand at ``offset`` of segment ``number``."""
    return _FRAME.pack(_MARK, len(payload), _checksum(payload, number, offset)) + payload


def payloads(content: bytes, number: int, name: str, *, last: bool) -> tuple[list[bytes], int]:
    """The intact frames of a segment, and the offset behind them.

    Args:
        last: of the journal's segments. Only its end can have been cut short.

    Raises:
        ConfigError: it is no segment of this version, or damaged elsewhere than at that end.
    """
    if not content.startswith(HEAD):
        unwritten = HEAD.startswith(content[: len(HEAD)].rstrip(b"\0"))
        if last and unwritten and not _intact_behind(content, number, 0):
            return [], 0
        raise _no_segment(content, name)
    found: list[bytes] = []
    offset = len(HEAD)
    while offset < len(content):
        payload = _payload_at(content, number, offset)
        if payload is None:
            if last and not _intact_behind(content, number, offset + 1):
                return found, offset
            raise ConfigError(
                f"{name} is damaged at byte {offset} of {len(content)}, and what follows was "
                "promised to be kept; restore the file from a copy, or move the directory away "
                "to go on without what it holds",
                field=FIELD,
            )
        found.append(payload)
        offset += _FRAME.size + len(payload)
    return found, offset


def entries(payload: bytes, name: str) -> Iterator[Written]:
    """Raises: ConfigError, for what no version of this wrote."""
    at = 0
    while at < len(payload):
        try:
            kind, size = _ENTRY.unpack_from(payload, at)
            at += _ENTRY.size
            if size > len(payload) - at:
                raise ValueError(f"an entry of {size} bytes in {len(payload) - at}")
            entry: Written = _DECODERS[kind].decode(memoryview(payload)[at : at + size])
        except (struct.error, IndexError, ValueError) as error:  # msgspec's are ValueErrors
            raise ConfigError(
                f"{name} holds an entry that this version cannot read ({error}); start the version "
                "that wrote it, or move the directory away to go on without what it holds",
                field=FIELD,
            ) from error
        at += size
        yield entry


def _payload_at(content: bytes, number: int, offset: int) -> bytes | None:
    """None: no intact frame begins there."""
    begin = offset + _FRAME.size
    if begin > len(content):
        return None
    mark, size, checksum = _FRAME.unpack_from(content, offset)
    if mark != _MARK or size > len(content) - begin:
        return None
    payload = content[begin : begin + size]
    return payload if _checksum(payload, number, offset) == checksum else None


def _intact_behind(content: bytes, number: int, offset: int) -> bool:
    for _ in range(_MOST_MARKS):
        offset = content.find(_MARK, offset)
        if offset < 0:
            return False
        if _payload_at(content, number, offset) is not None:
            return True
        offset += 1
    return True  # not what a crash leaves behind


def _checksum(payload: bytes, number: int, offset: int) -> int:
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(number, offset)))


def _no_segment(content: bytes, name: str) -> ConfigError:
    said = "is not a segment of a journal"
    if content.startswith(FORMAT) and len(content) >= _HEAD.size:
        version = _HEAD.unpack_from(content)[1]
        said = f"has version {version} of the journal's format, and this one reads {VERSION}"
    return ConfigError(
        f"{name} {said}; start the version that wrote it, or choose another directory",
        field=FIELD,
    )
