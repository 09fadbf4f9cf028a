"""What the tests ask from inside a worker process."""

import gc
from pathlib import Path

import psutil

from actors.engines import vllm_private
from actors.member import Member
from actors.migration import checksum


def expert_checksums(member: Member) -> dict[tuple[int, int], list[int]]:
    """(layer, expert) -> checksums of its weights, of the experts that this worker owns."""
    engine = member._engine
    me = engine.worker_id
    owned = [e for e, owner in enumerate(engine.placement.owner_E) if owner == me]
    return {
        (layer, expert): [checksum(w) for w in engine.expert_weights(layer, expert)]
        for layer in range(engine.num_layers)
        for expert in owned
    }


def dense_checksums(member: Member) -> list[int]:
    return [checksum(t) for t in member._engine.dense_tensors()]


def footprint(member: Member) -> dict[str, int]:
    """What must not grow with the number of changes."""
    import torch.distributed.distributed_c10d as c10d
    import vllm.distributed.parallel_state as parallel_state

    gc.collect()
    process = psutil.Process()
    engine = member._engine
    return {
        "rss_bytes": process.memory_info().rss,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "process_groups": len(c10d._world.pg_map),
        "coordinators": len(parallel_state._groups),
        "expert_slots": engine._experts.num_slots,
        "kv_blocks": engine._kv.num_blocks,
    }


def read_files(member: Member) -> list[str]:
    """Checkpoint shards that this process has read or holds (from its memory map)."""
    del member
    maps = Path("/proc/self/maps").read_text()
    return sorted({line.split()[-1] for line in maps.splitlines() if ".safetensors" in line})


def step_is_wrapped(member: Member) -> bool:
    """Is a dense layer's stock kernel replaced?"""
    return any(
        hasattr(layer, "flexfloor_wrap")
        for layer in vllm_private.dense_layers(member._engine._hosted).values()
    )
