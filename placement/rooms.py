"""Room on workers: how many samples, and how much KV, still fit; and who goes where.

A sample is counted with the KV of its full length (prompt plus ``max_tokens``, in whole
blocks) from the moment it is bound, so a worker never has to preempt one.

Placing is list scheduling by least load: the next sample goes to the worker whose samples
need least KV. Load, not free KV, because then a plan that fits workers of capacity c also
fits, unchanged, workers that have more than c: a release that was checked against the
smallest survivor cannot fail on the others. Where capacities are equal the two are the same.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from placement.ids import WorkerId


class NeedsKV(Protocol):
    """Anything that occupies KV up to a known length."""

    @property
    def max_context_tokens(self) -> int: ...


S = TypeVar("S", bound=NeedsKV)


def kv_need_tokens(max_context_tokens: int, kv_block_tokens: int) -> int:
    """KV that a sample of this full length occupies: whole blocks."""
    return -(-max_context_tokens // kv_block_tokens) * kv_block_tokens


@dataclass(slots=True)
class Room:
    """What is bound to one worker, against what it can hold. Changes as samples are placed.

    Attributes:
        rank: breaks ties.
        need_tokens: KV of all samples bound here, at their full length.
    """

    worker_id: WorkerId
    rank: int
    max_samples: int
    kv_capacity_tokens: int
    num_samples: int = 0
    need_tokens: int = 0

    def add(self, need_tokens: int) -> None:
        self.num_samples += 1
        self.need_tokens += need_tokens

    @property
    def full(self) -> bool:
        return self.num_samples >= self.max_samples

    @property
    def overfull(self) -> bool:
        """More is bound here than fits: its samples were bound to a larger worker."""
        return self.num_samples > self.max_samples or self.need_tokens > self.kv_capacity_tokens

    @property
    def free_tokens(self) -> int:
        return self.kv_capacity_tokens - self.need_tokens

    def fits(self, need_tokens: int) -> bool:
        return not self.full and need_tokens <= self.free_tokens


def place(
    samples: Iterable[S],
    rooms: Sequence[Room],
    kv_block_tokens: int,
    patience: int | None = None,
) -> list[tuple[S, Room]]:
    """Bind samples, in their order, to rooms (which it fills); returns the pairs, in order.

    A sample that fits nowhere waits and later ones may pass it, so that no room is left empty
    for nothing. But the first that waits keeps the least loaded worker that could ever hold it:
    nothing more is bound there, the load there only falls, and smaller samples cannot starve it.

    Args:
        patience: after so many samples without room, the rest is not looked at; None: it is.
    """
    open_rooms = [(room.need_tokens, room.rank, room) for room in rooms if not room.full]
    heapq.heapify(open_rooms)
    kept: Room | None = None
    refused_tokens: int | None = None  # room only shrinks: what is not smaller fits nowhere either
    placed = []
    num_refused = 0
    for sample in samples:
        if not open_rooms or num_refused == patience:
            break
        need_tokens = kv_need_tokens(sample.max_context_tokens, kv_block_tokens)
        if refused_tokens is not None and need_tokens >= refused_tokens:
            num_refused += 1
            continue
        room = _take_least_loaded(open_rooms, need_tokens)
        if room is not None:
            room.add(need_tokens)
            placed.append((sample, room))
            if not room.full:
                heapq.heappush(open_rooms, (room.need_tokens, room.rank, room))
            continue
        num_refused += 1
        if kept is None:
            able = [r for r in rooms if r.kv_capacity_tokens >= need_tokens]
            if able:
                kept = min(able, key=lambda r: (r.need_tokens, r.rank))
                open_rooms = [entry for entry in open_rooms if entry[2] is not kept]
                heapq.heapify(open_rooms)
        # Exactly what is free, so that the many that are too large are told at one comparison.
        refused_tokens = 1 + max((entry[2].free_tokens for entry in open_rooms), default=-1)
    return placed


def _take_least_loaded(open_rooms: list[tuple[int, int, Room]], need_tokens: int) -> Room | None:
    """Pop the least loaded room that has space for ``need_tokens``; the others stay."""
    passed = []
    found = None
    while open_rooms and found is None:
        entry = heapq.heappop(open_rooms)
        if entry[2].fits(need_tokens):
            found = entry[2]
        else:
            passed.append(entry)
    for entry in passed:
        heapq.heappush(open_rooms, entry)
    return found
