"""Defects that tests plant inside a worker process, to see that they are caught."""

import os
import signal
from typing import Any

import torch

import actors.migration as migration
from actors.member import Member
from placement.errors import WeightUpdateError
from placement.ids import Generation


def corrupt_next_expert(member: Member) -> None:
    """Swap two experts of the next transfer on arrival, as a wrong index would."""
    del member
    unpack = migration._unpack

    def swapped(buffer: torch.Tensor, weights: list[list[torch.Tensor]]) -> None:
        unpack(buffer, weights[::-1] if len(weights) > 1 else [w[::-1] for w in weights])

    migration._unpack = swapped


def mend_experts(member: Member) -> None:
    """Undo ``corrupt_next_expert``."""
    del member
    import importlib

    fresh = importlib.util.find_spec("actors.migration")
    assert fresh is not None
    assert fresh.loader is not None
    module = importlib.util.module_from_spec(fresh)
    fresh.loader.exec_module(module)
    migration._unpack = module._unpack


def skip_checksums(member: Member) -> None:
    """Believe whatever arrives."""
    del member
    migration.checksum = lambda _tensor: 0


def die_in_transfer(member: Member) -> None:
    """Kill this process when the first layer of experts has come, in the middle of the rest."""
    exchange = migration.GlooTransport.exchange

    def exchange_and_die(self: migration.GlooTransport, sends: Any, receives: Any) -> None:
        exchange(self, sends, receives)
        if any(t.dtype is torch.uint8 for _, t in receives) and member._prepared:
            layers_seen.append(len(receives))
        if len(layers_seen) > 1:  # dense weights first, then the first layer of experts
            os.kill(os.getpid(), signal.SIGKILL)

    layers_seen: list[int] = []
    migration.GlooTransport.exchange = exchange_and_die  # type: ignore[method-assign]


def die_at_commit(member: Member, generation: Generation) -> None:
    """Kill this process at the moment it would cross over."""
    cross = member._cross

    def die(wanted: Generation) -> None:
        if wanted == generation:
            os.kill(os.getpid(), signal.SIGKILL)
        cross(wanted)

    member._cross = die  # type: ignore[method-assign]


def die_in_first_step(member: Member) -> None:
    """Kill this process inside the forward pass of its first step."""
    engine = member._engine

    def die() -> list[object]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    engine._experts._layers[-1].register_forward_pre_hook(lambda *_args: die() and None)


def use_torch_linear(member: Member) -> None:
    """Let vLLM fall back to torch's dense kernel, which in float32 varies with the batch."""
    del member
    import vllm._custom_ops as ops

    ops._supports_onednn = False


def fail_in_load(member: Member) -> None:
    """Break the next load of weights off when its first chunk has been loaded."""
    engine = member._engine
    load = engine.load_chunk

    def load_and_fail(chunk: Any) -> None:
        load(chunk)
        del engine.load_chunk  # the next one works again
        raise WeightUpdateError("made to fail behind its first chunk")

    engine.load_chunk = load_and_fail  # type: ignore[method-assign]
