"""Decides whether exact mode may start: probes the kernels, replaces those that vary.

Raises ``ExactModeRefusedError`` where no replacement helps. What was found and replaced is
reported, with the cost of each replacement.
"""

from functools import partial

import torch

from actors.engines import vllm_private as private
from actors.engines.kernel_probe import (
    NUM_ROWS,
    Kernel,
    in_fixed_tiles,
    probe_attention,
    probe_or_replace,
)
from placement.errors import ExactModeRefusedError

PROBE_SEQUENCE_TOKENS = [160 - 2 * i for i in range(64)]


def ensure_exact(engine: private.HostedEngine, experts: private.MoeLayers) -> dict[str, str]:
    """Kernel -> what was found or replaced.

    Raises:
        ExactModeRefusedError: a kernel varies and cannot be replaced.
    """
    if not private.runs_on_cpu():
        raise ExactModeRefusedError(
            "exact mode is proven on the CPU build only: no CUDA kernel set has been shown to "
            "give a row the same bits in every batch; set model.exact to false",
            field="model.exact",
        )
    report: dict[str, str] = {}
    for name, module in private.dense_layers(engine).items():
        same_shape = private.layers_of_shape(engine, module.weight.shape)

        def wrap_all(tile: int, layers: list[torch.nn.Module] = same_shape) -> None:
            for layer in layers:
                private.wrap_dense(layer, partial(in_fixed_tiles, tile=tile))

        report[name] = probe_or_replace(name, _dense_rows(module), wrap_all)
    report["experts"] = probe_or_replace(
        "experts",
        experts.probe_rows(NUM_ROWS),
        lambda tile: experts.wrap_rows(partial(in_fixed_tiles, tile=tile)),
    )
    attention = probe_attention(
        private.attention_probe(engine, PROBE_SEQUENCE_TOKENS), PROBE_SEQUENCE_TOKENS
    )
    if not attention.invariant:
        raise ExactModeRefusedError(
            f"the attention kernel varies: {attention.detail}; set model.exact to false",
            field="model.exact",
        )
    report["attention"] = attention.detail
    return report


def _dense_rows(module: torch.nn.Module) -> Kernel:
    weight = module.weight
    x = torch.randn(NUM_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.to(weight.dtype)
    return lambda index: private.dense_rows(module)(x[index])
