"""What a kernel promises: is a row's result the same in every batch?

Exact mode stands on it. Each probe compares bits, at batch sizes from 1 to 64 that cross the
usual tile widths, and for attention also prefill against decode and any split of a prefill.
A kernel that varies can be wrapped so that it always sees the same number of rows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from placement.errors import ExactModeRefusedError

BATCH_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64)
NUM_ROWS = 192
TILES = (16, 1)
"""Rows per call of a replaced kernel: first a tile that keeps most of the speed, last row by
row, which cannot vary."""

Rows = Callable[[torch.Tensor], torch.Tensor]
"""(row indices [B], ascending and contiguous) -> results [B, ...]."""

Kernel = Callable[..., torch.Tensor]
"""(tensors of B rows each) -> B result rows."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``invariant``: no row differed. ``detail`` says where it did, or what was done."""

    kernel: str
    invariant: bool
    detail: str


def probe_rows(kernel: str, rows: Rows, num_rows: int = NUM_ROWS) -> Finding:
    """Compare each row computed alone with the same row in batches of other sizes."""
    index = torch.arange(num_rows)
    alone = torch.cat([rows(index[i : i + 1]) for i in range(num_rows)])
    for size in BATCH_SIZES:
        for first in range(0, num_rows - size + 1, size):
            batch = rows(index[first : first + size])
            differs = (batch != alone[first : first + size]).flatten(1).any(1)
            if differs.any():
                return Finding(
                    kernel,
                    False,
                    f"{int(differs.sum())} of {size} rows differ from the same rows alone",
                )
    return Finding(kernel, True, f"batches of 1 to {BATCH_SIZES[-1]} agree bit for bit")


def in_fixed_tiles(kernel: Kernel, tile: int) -> Kernel:
    """``kernel``, always called with exactly ``tile`` rows.

    The last tile is filled up with zero rows. What varies with the batch can then no longer
    vary; the price is a call per tile.
    """

    def tiled(*columns: torch.Tensor) -> torch.Tensor:
        num_rows = columns[0].shape[0]
        padding = -num_rows % tile
        if padding:
            columns = tuple(torch.cat([c, c.new_zeros((padding, *c.shape[1:]))]) for c in columns)
        tiles = zip(*(c.split(tile) for c in columns), strict=True)
        return torch.cat([kernel(*parts) for parts in tiles])[:num_rows]

    return tiled


def probe_or_replace(name: str, rows: Rows, replace: Callable[[int], None]) -> str:
    """Probe a kernel; let ``replace(tile)`` put it in fixed tiles if it varies.

    Returns: what was found, or what replaced it at which cost.

    Raises:
        ExactModeRefusedError: it varies in every tile.
    """
    found = probe_rows(name, rows)
    if found.invariant:
        return found.detail
    stock_s = _seconds(rows)
    for tile in TILES:
        replace(tile)
        again = probe_rows(name, rows)
        if again.invariant:
            return (
                f"varies ({found.detail}); replaced by tiles of {tile} rows, "
                f"{_seconds(rows) / stock_s:.1f} times the stock kernel's time at 64 rows"
            )
    raise ExactModeRefusedError(
        f"{name} varies: {found.detail}; no replacement helped; set model.exact to false",
        field="model.exact",
    )


def _seconds(rows: Rows, repeats: int = 5) -> float:
    index = torch.arange(64)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        rows(index)
        best = min(best, time.perf_counter() - start)
    return best


Piece = tuple[int, int, int]
"""(sequence, first position, end position): query tokens whose keys up to ``end`` exist."""


def probe_attention(
    attend: Callable[[list[Piece]], list[torch.Tensor]], sequence_tokens: list[int]
) -> Finding:
    """Prefill against decode, alone against batched, whole against chunked.

    Args:
        attend: writes the pieces' keys and values, returns the output of each piece.
        sequence_tokens: length of each sequence, at least 9 of them; longest first.
    """
    kernel = "attention"
    whole = [attend([(s, 0, n)])[0] for s, n in enumerate(sequence_tokens)]
    last = [(s, n - 1, n) for s, n in enumerate(sequence_tokens)]
    for s, piece in enumerate(last):
        if not torch.equal(attend([piece])[0], whole[s][-1:]):
            return Finding(kernel, False, "a decoded token differs from the same in prefill")
    for size in BATCH_SIZES:
        batch = last[:size]
        for piece, out in zip(batch, attend(batch), strict=True):
            if not torch.equal(out, whole[piece[0]][-1:]):
                return Finding(kernel, False, f"decode differs in a batch of {len(batch)}")
    longest = sequence_tokens[0]
    for cut in {1, 3, longest // 4, longest // 2, longest - 1}:
        parts = attend([(0, 0, cut)]) + attend([(0, cut, longest)])
        if not torch.equal(torch.cat(parts), whole[0]):
            return Finding(kernel, False, f"prefill differs when it is split after {cut} tokens")
    mixed = attend([(0, 0, longest), *last[1:9]])
    expected = [whole[0], *(whole[s][-1:] for s in range(1, 9))]
    if not all(torch.equal(a, b) for a, b in zip(mixed, expected, strict=True)):
        return Finding(kernel, False, "prefill and decode in one batch differ from each alone")
    return Finding(kernel, True, "prefill, decode, batches and chunks agree bit for bit")
