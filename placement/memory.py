"""How much KV a worker has left beside the experts that it holds, and how few workers will do.

A worker has a fixed budget for experts and KV. The fewer workers share the experts, the more
each of them holds, and the KV gives up whole blocks for that. A *width* is a number of
workers; at width w the worker with most experts holds ceil(E / w) of them (E = experts per
layer), and that worker's KV is the one that plans count with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.errors import PlanError
from placement.ids import WorkerId
from placement.rooms import Room, place

NULL_BLOCKS = 1
"""vLLM keeps block 0 as its null block: it is allocated and never holds a token."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What one worker has for routed experts and KV.

    Attributes:
        num_experts: per layer.
        max_workers: the width at which ``kv_memory_bytes`` is the KV.
        expert_bytes: one expert in all layers.
        kv_block_bytes: one KV block in all layers.
        kv_block_tokens: tokens in a block.
        kv_memory_bytes: KV of a worker that holds ceil(num_experts / max_workers) experts.
    """

    num_experts: int
    max_workers: int
    expert_bytes: int
    kv_block_bytes: int
    kv_block_tokens: int
    kv_memory_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_experts", "max_workers", "kv_block_bytes", "kv_block_tokens"):
            if getattr(self, name) < 1:
                raise PlanError(f"is {getattr(self, name)}; it must be at least 1", field=name)
        for name in ("expert_bytes", "kv_memory_bytes"):
            if getattr(self, name) < 0:
                raise PlanError(f"is {getattr(self, name)}; it must not be negative", field=name)
        if self.max_workers > self.num_experts:
            raise PlanError(
                f"{self.max_workers} workers cannot share {self.num_experts} experts: each needs "
                f"at least one; use at most {self.num_experts}",
                field="max_workers",
            )

    def experts_at(self, width: int) -> int:
        """Experts of the worker that holds most of them."""
        if not 1 <= width <= self.max_workers:
            raise PlanError(f"width {width} is not between 1 and {self.max_workers}")
        return -(-self.num_experts // width)

    def kv_blocks_at(self, width: int) -> int:
        """Blocks of the worker with most experts, the null block included; 0 where the experts
        alone do not fit."""
        blocks_for_experts = -(-self._extra_expert_bytes(width) // self.kv_block_bytes)
        return max(0, self.kv_memory_bytes // self.kv_block_bytes - blocks_for_experts)

    def kv_memory_bytes_at(self, width: int) -> int:
        """KV memory of that worker: what to build it with when a group starts at ``width``."""
        return self.kv_blocks_at(width) * self.kv_block_bytes

    def kv_tokens_at(self, width: int) -> int:
        """Tokens that fit in that worker's usable blocks."""
        return max(0, self.kv_blocks_at(width) - NULL_BLOCKS) * self.kv_block_tokens

    def explain(self, width: int, needed_tokens: int) -> str:
        """One line: what ``needed_tokens`` of KV a worker take at this width, and what is there."""
        extra_experts = self.experts_at(width) - self.experts_at(self.max_workers)
        extra_bytes = self._extra_expert_bytes(width)
        blocks = -(-needed_tokens // self.kv_block_tokens) + NULL_BLOCKS
        kv_bytes = blocks * self.kv_block_bytes
        return (
            f"at width {width} a worker holds up to {self.experts_at(width)} experts, "
            f"{extra_experts} more than at width {self.max_workers}: they need {extra_bytes} "
            f"bytes, and {needed_tokens} KV tokens need {kv_bytes} bytes ({blocks} blocks with "
            f"the null block); of {extra_bytes + kv_bytes} bytes needed, {self.kv_memory_bytes} "
            f"are there, room for {self.kv_tokens_at(width)} KV tokens"
        )

    def _extra_expert_bytes(self, width: int) -> int:
        return (self.experts_at(width) - self.experts_at(self.max_workers)) * self.expert_bytes


def kv_tokens_at_width(
    num_experts: int,
    max_workers: int,
    expert_bytes: int,
    kv_block_bytes: int,
    kv_block_tokens: int,
    kv_memory_bytes: int,
) -> tuple[int, ...]:
    """KV tokens of the worker with most experts, by width; index 0 is unused (0).

    Arguments as in ``MemoryBudget``. Never falls as the width grows; 0 where the experts do not
    fit.

    Raises:
        PlanError: an argument is out of range.
    """
    budget = MemoryBudget(
        num_experts, max_workers, expert_bytes, kv_block_bytes, kv_block_tokens, kv_memory_bytes
    )
    return (0, *(budget.kv_tokens_at(width) for width in range(1, max_workers + 1)))


def floor_workers(kv_tokens_at_width: Sequence[int], max_model_len: int) -> int | None:
    """Fewest workers that hold all experts and, each, one sample of full length.

    None if not even the widest group does (``MemoryBudget.explain`` says by how much).
    """
    for width in range(1, len(kv_tokens_at_width)):
        if kv_tokens_at_width[width] >= max(1, max_model_len):
            return width
    return None


@dataclass(frozen=True, slots=True)
class _FullLength:
    max_context_tokens: int


def floor_workers_with_running(
    kv_tokens_at_width: Sequence[int],
    max_model_len: int,
    running_max_context_tokens: Sequence[int],
    max_samples: int,
    kv_block_tokens: int = 1,
) -> int | None:
    """Fewest workers that, besides, hold every running sample at its full length.

    The samples are packed afresh, longest first; whether they can get there from where they are
    is the release rule's question.

    Args:
        running_max_context_tokens: ``max_context_tokens`` of each running sample.
        max_samples: most samples that one worker decodes at once.

    Returns:
        None if the widest group does not hold them.
    """
    floor = floor_workers(kv_tokens_at_width, max_model_len)
    if floor is None:
        return None
    samples = [_FullLength(n) for n in sorted(running_max_context_tokens, reverse=True)]
    for width in range(floor, len(kv_tokens_at_width)):
        rooms = [
            Room(WorkerId(rank), rank, max_samples, kv_tokens_at_width[width])
            for rank in range(width)
        ]
        if len(place(samples, rooms, kv_block_tokens)) == len(samples):
            return width
    return None
