"""KV blocks out of one engine and into another: the worker's half of a move by copying.

Into an engine they come through vLLM's KV connector interface: its scheduler asks how many of
a new sample's tokens are known already, allocates blocks for them, and its model runner has
them filled right before the forward that makes the next token. Out of an engine they are
read between two steps.

Invariant: bytes only. What lies in a block is not interpreted, so what comes out of another
engine with the same block layout is bit for bit what it had computed.

On GPUs both ways are staged through pinned host memory. Read, not measured.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from actors.sample_kv import SampleKv, digest_tokens
from placement.samples import Sample

Caches = Mapping[str, torch.Tensor]
"""Layer name -> its KV cache, [blocks, ...]; the same names in the same order everywhere."""


def block_layout(caches: Caches) -> tuple[tuple[str, str], ...]:
    """What must be the same on both sides; see ``SampleKv``."""
    return tuple((name, f"{c.dtype} {tuple(c.shape[1:])}") for name, c in caches.items())


def read_blocks(
    caches: Caches, block_ids: Sequence[int], sample: Sample, num_tokens: int
) -> SampleKv:
    """Copy the blocks of the first ``num_tokens`` tokens of ``sample`` to host memory."""
    layers = []
    for cache in caches.values():
        index = torch.as_tensor(block_ids, device=cache.device)
        blocks = cache.index_select(0, index).contiguous()
        if blocks.device.type != "cpu":
            blocks = torch.empty_like(blocks, device="cpu", pin_memory=True).copy_(blocks)
        layers.append(blocks.view(len(block_ids), -1).view(torch.uint8).numpy())
    return SampleKv(
        num_tokens, digest_tokens(sample, num_tokens), block_layout(caches), tuple(layers)
    )


def write_blocks(caches: Caches, block_ids: Sequence[int], kv: SampleKv) -> None:
    """Fill blocks with what ``read_blocks`` gave elsewhere, in the same layout."""
    for cache, blocks in zip(caches.values(), kv.layers, strict=True):
        staged = torch.empty(blocks.shape, dtype=torch.uint8, pin_memory=cache.device.type != "cpu")
        staged.numpy()[:] = blocks  # what Ray hands over is read-only, torch wants more
        shaped = staged.view(cache.dtype).view(len(blocks), *cache.shape[1:])
        index = torch.as_tensor(block_ids, device=cache.device)
        cache.index_copy_(0, index, shaped.to(cache.device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class _Load:
    kv: SampleKv
    block_ids: list[int]


@dataclass
class _Loads(KVConnectorMetadata):
    """What one step has to fill before its forward."""

    loads: list[_Load] = field(default_factory=list)


class SampleKvConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes two: one beside its scheduler, which is offered KV, and one beside its model
    runner, which fills blocks.

    Attributes:
        copied_bytes, copied_s: the runner's: what was filled in so far, and the seconds it took.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.copied_bytes = 0
        self.copied_s = 0.0
        self._offered: dict[str, SampleKv] = {}
        self._next = _Loads()

    # Beside the scheduler

    def offer(self, request_id: str, kv: SampleKv) -> None:
        """Use ``kv`` when this request is scheduled first. Bounded by the requests there are:
        it is let go when it was used, or with the request."""
        self._offered[request_id] = kv

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        kv = self._offered.get(request.request_id)
        if kv is None or num_computed_tokens:
            return 0, False
        return kv.num_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        kv = self._offered.pop(request.request_id, None)
        if kv is not None and num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self._next.loads.append(_Load(kv, block_ids[: kv.num_blocks]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._next = self._next, _Loads()
        return loads

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offered.pop(request.request_id, None)
        return False, None

    # Beside the model runner

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, _Loads)
        if not loads.loads:
            return
        start = time.perf_counter()
        caches = attention_caches(forward_context.no_compile_layers)
        for load in loads.loads:
            write_blocks(caches, load.block_ids, load.kv)
            self.copied_bytes += load.kv.num_bytes
        self.copied_s += time.perf_counter() - start

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was filled before the forward began."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing leaves an engine during its steps."""

    def wait_for_save(self) -> None:
        """See ``save_kv_layer``."""


def attention_caches(layers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The KV caches among an engine's layers (tensors of now: a resize of the pool replaces
    them)."""
    return {
        name: layer.kv_cache
        for name, layer in layers.items()
        if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)
    }
