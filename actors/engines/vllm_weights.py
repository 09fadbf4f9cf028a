"""New weights into a running engine. Private API of vLLM 0.32, as in ``vllm_private``.

Tensors come under the checkpoint's names and go through vLLM's own loaders, which know how they
are stacked and in which slot an expert lies (``MoeLayers.place`` keeps its map). Two things are
vLLM's to do at start-up only and are done here: on CPUs an expert's weights are packed for the
kernel, so a checkpoint's rows must not be written into them as they are; and the kernels of dense
layers work on packed copies (``vllm_private.repack_dense``).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from actors.engines import vllm_private as private

_W13, _W2 = "w13_weight", "w2_weight"


@dataclass
class _Expert:
    """One expert of one layer, in the checkpoint's layout: [2 * inner, hidden], [hidden, inner]."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """w1 (gate), w3 (up) and w2 (down)."""

    @property
    def whole(self) -> bool:
        return self.parts.keys() == {"w1", "w2", "w3"}


def load_tensors(
    engine: private.HostedEngine,
    experts: private.MoeLayers,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write tensors of the checkpoint into this worker's weights.

    Experts of others are passed over. Of an expert, all tensors must come at once. Afterwards
    ``vllm_private.repack_dense`` is due, once for any number of calls.

    Raises:
        ValueError, RuntimeError, KeyError: a name or a shape is not this model's.
    """
    with torch.no_grad(), set_current_vllm_config(engine.config):
        if not private.runs_on_cpu():
            engine.model.load_weights(tensors)
            return
        for layer in experts.routed_layers():
            if getattr(layer.quant_method.moe_kernel.fused_experts, "_use_zentorch", False):
                raise RuntimeError("experts on ZenDNN keep weights that cannot be replaced")
        with _collected(experts) as collected:
            engine.model.load_weights(tensors)
        for layer in experts.routed_layers():
            _write(layer, collected[id(layer)])


@contextmanager
def _collected(experts: private.MoeLayers) -> Iterator[dict[int, dict[int, _Expert]]]:
    """While it lasts, expert weights are kept aside: layer -> slot -> expert."""
    collected: dict[int, dict[int, _Expert]] = {}
    loaders: list[tuple[Any, Any]] = []
    for layer in experts.routed_layers():
        collected[id(layer)] = {}
        collect = _collector(layer, collected[id(layer)])
        for name in (_W13, _W2):
            parameter = getattr(layer, name)
            loaders.append((parameter, parameter.weight_loader))
            parameter.weight_loader = collect
    try:
        yield collected
    finally:
        for parameter, loader in loaders:
            parameter.weight_loader = loader


def _collector(layer: Any, into: dict[int, _Expert]) -> Callable[..., bool]:
    def collect(
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        del param, weight_name, return_success
        slot = int(layer._map_global_expert_id_to_local_expert_id(expert_id))
        if slot < 0:
            return False
        into.setdefault(slot, _Expert()).parts[shard_id] = loaded_weight
        return True

    return collect


def _write(layer: Any, experts: dict[int, _Expert]) -> None:
    """Pack experts as vLLM packs them at start-up, all of a layer at once, into their slots."""
    if not experts:
        return
    if broken := [slot for slot, expert in experts.items() if not expert.whole]:
        raise ValueError(f"experts in slots {broken} of {layer.layer_name} came in part")
    parts = [expert.parts for expert in experts.values()]
    scratch = torch.nn.Module()
    for name, stacked in (
        (_W13, torch.stack([torch.cat([part["w1"], part["w3"]]) for part in parts])),
        (_W2, torch.stack([part["w2"] for part in parts])),
    ):
        typed = stacked.to(getattr(layer, name).dtype)
        scratch.register_parameter(name, torch.nn.Parameter(typed, requires_grad=False))
    layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(scratch)
    slots = torch.tensor(list(experts))
    for name in (_W13, _W2):
        rows, weights = getattr(scratch, name).data, getattr(layer, name).data
        if rows.shape[1:] != weights.shape[1:]:
            raise ValueError(
                f"{name} of {layer.layer_name} has slots of {tuple(weights.shape[1:])}, and "
                f"{tuple(rows.shape[1:])} came"
            )
        weights[slots] = rows
