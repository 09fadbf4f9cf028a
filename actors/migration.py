"""Moves weights between workers: dense weights to joiners, experts to their new owners.

One transport interface: gloo for host memory, NCCL (through cupy) for GPU memory. Experts
travel layer by layer, so staging is bounded by one layer's share; every expert carries a
checksum of its source, and what arrived is checked where it will be used.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from placement.errors import ExpertChecksumError
from placement.ids import WorkerId
from placement.membership import ExpertMove, GroupChange

BUCKET_BYTES = 64 << 20
"""Dense weights travel in buckets of about this size: bounded staging, few messages."""

_WEIGHT = -7046029254386353131  # 2^64 / golden ratio, odd, as int64: spreads neighbours


class ExpertStore(Protocol):
    """Where experts are read from and written to (the engine)."""

    @property
    def num_layers(self) -> int: ...

    def expert_weights(self, layer: int, expert: int) -> list[torch.Tensor]: ...

    def dense_tensors(self) -> list[torch.Tensor]: ...


class Transport(Protocol):
    """Point-to-point messages between the workers of one change."""

    def exchange(
        self,
        sends: list[tuple[WorkerId, torch.Tensor]],
        receives: list[tuple[WorkerId, torch.Tensor]],
    ) -> None:
        """All messages at once; returns when all have arrived. At most one message per pair
        and direction. Raises when a peer is gone or the transport's bound has passed."""
        ...

    def close(self) -> None: ...


class GlooTransport:
    """Host memory over a gloo group whose ranks are worker ids."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def exchange(
        self,
        sends: list[tuple[WorkerId, torch.Tensor]],
        receives: list[tuple[WorkerId, torch.Tensor]],
    ) -> None:
        works = [dist.irecv(t, src=peer, group=self._group) for peer, t in receives]
        works += [dist.isend(t, dst=peer, group=self._group) for peer, t in sends]
        for work in works:
            if work is not None:
                work.wait()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def checksum(tensor: torch.Tensor) -> int:
    """Position-dependent 64-bit sum over a tensor's bytes, computed where the tensor lies."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    index = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    total = int((words * (index * _WEIGHT | 1)).sum())
    for i, byte in enumerate(data[words.numel() * 8 :].tolist()):
        total += (byte + 1) * (i + 3)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def pairs_of(moves: Iterable[ExpertMove]) -> dict[tuple[WorkerId, WorkerId], list[int]]:
    """(source, destination) -> experts, ascending: the messages of each layer."""
    pairs: dict[tuple[WorkerId, WorkerId], list[int]] = {}
    for move in sorted(moves, key=lambda m: m.expert):
        pairs.setdefault((move.source, move.destination), []).append(move.expert)
    return pairs


def move_experts(
    store: ExpertStore, transport: Transport, worker_id: WorkerId, moves: tuple[ExpertMove, ...]
) -> int:
    """This worker's part in ``moves``. Returns the bytes received.

    Raises:
        ExpertChecksumError: an expert arrived with other bytes than its source sent.
    """
    pairs = pairs_of(moves)
    outgoing = {d: experts for (s, d), experts in pairs.items() if s == worker_id}
    incoming = {s: experts for (s, d), experts in pairs.items() if d == worker_id}
    sums_out: dict[WorkerId, list[int]] = {d: [] for d in outgoing}
    sums_in: dict[WorkerId, list[int]] = {s: [] for s in incoming}
    received = 0
    for layer in range(store.num_layers):
        sends = []
        for destination, experts in outgoing.items():
            weights = [store.expert_weights(layer, e) for e in experts]
            sends.append((destination, _packed(weights)))
            sums_out[destination] += [checksum(w) for ws in weights for w in ws]
        receives = []
        for source, experts in incoming.items():
            size = sum(
                w.numel() * w.element_size()
                for e in experts
                for w in store.expert_weights(layer, e)
            )
            device = store.expert_weights(layer, experts[0])[0].device
            receives.append((source, torch.empty(size, dtype=torch.uint8, device=device)))
        transport.exchange(sends, receives)
        for source, buffer in receives:
            received += buffer.numel()
            weights = [store.expert_weights(layer, e) for e in incoming[source]]
            _unpack(buffer, weights)
            sums_in[source] += [checksum(w) for ws in weights for w in ws]
    _compare(transport, sums_out, sums_in, incoming, worker_id, store.num_layers)
    return received


def _packed(weights: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([w.contiguous().view(-1).view(torch.uint8) for ws in weights for w in ws])


def _unpack(buffer: torch.Tensor, weights: list[list[torch.Tensor]]) -> None:
    offset = 0
    for ws in weights:
        for w in ws:
            size = w.numel() * w.element_size()
            w.copy_(buffer[offset : offset + size].view(w.dtype).view(w.shape))
            offset += size


def _compare(
    transport: Transport,
    sums_out: dict[WorkerId, list[int]],
    sums_in: dict[WorkerId, list[int]],
    incoming: dict[WorkerId, list[int]],
    worker_id: WorkerId,
    num_layers: int,
) -> None:
    sends = [(d, torch.tensor(sums, dtype=torch.int64)) for d, sums in sums_out.items()]
    receives = [(s, torch.empty(len(sums), dtype=torch.int64)) for s, sums in sums_in.items()]
    transport.exchange(sends, receives)
    for source, sent in receives:
        for i, (theirs, ours) in enumerate(zip(sent.tolist(), sums_in[source], strict=True)):
            if theirs != ours:
                per_layer = len(sums_in[source]) // num_layers
                experts = incoming[source]
                expert = experts[i % per_layer // (per_layer // len(experts))]
                raise ExpertChecksumError(
                    f"expert {expert} of layer {i // per_layer} came from worker {source} to "
                    f"worker {worker_id} with checksum {ours:#x} instead of {theirs:#x}; "
                    "the change is given up and the old owner keeps it"
                )


def move_dense(
    store: ExpertStore, transport: Transport, worker_id: WorkerId, change: GroupChange
) -> int:
    """Send or receive the dense weights of joiners. Returns the bytes received.

    Raises:
        ExpertChecksumError: dense weights arrived damaged.
    """
    destinations = [joiner for joiner, source in change.dense_sources if source == worker_id]
    sources = [source for joiner, source in change.dense_sources if joiner == worker_id]
    received = 0
    for bucket in _buckets(store.dense_tensors()) if destinations or sources else []:
        flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in bucket])
        own_sum = torch.tensor([checksum(flat)], dtype=torch.int64)
        for destination in destinations:
            transport.exchange([(destination, flat)], [])
            transport.exchange([(destination, own_sum)], [])
        for source in sources:
            transport.exchange([], [(source, flat)])
            transport.exchange([], [(source, own_sum)])
            if checksum(flat) != int(own_sum):
                raise ExpertChecksumError(
                    f"dense weights came from worker {source} to worker {worker_id} damaged"
                )
            _unpack(flat, [bucket])
            received += flat.numel()
    return received


def _buckets(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
