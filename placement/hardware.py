"""GPUs and models by their data sheets, and what follows for memory and step time.

Nothing here was measured: peak rates come from the vendors' data sheets, and the shares of them
that real kernels reach are assumptions, named below. Where steps have been measured,
``StepTimeModel.fit`` replaces this.

Source: NVIDIA H100, H200 and DGX B200 data sheets (memory, dense BF16 tensor FLOPS, NVLink);
Qwen3-30B-A3B, Qwen3-235B-A22B and Kimi-K2 ``config.json`` (shapes).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from placement.cost import ReconfigurationCost, StepTimeModel
from placement.errors import PlanError
from placement.memory import MemoryBudget

MEMORY_RATE_RATIO = 0.75  # decode attention and thin GEMMs reach 70-85 % of peak bandwidth
FLOPS_RATIO = 0.5  # grouped GEMMs of uneven expert batches
LINK_RATIO = 0.7
ACTIVATION_BYTES = 3 * 10**9  # workspace, graphs, activations of a worker
LAUNCH_LAYER_S = 30e-6  # kernels of one layer that no roof explains
EXCHANGE_LAYER_S = 40e-6  # dispatch and combine of one layer: latency
REBUILD_S = 2.0  # agree, swap groups, recapture graphs of few sizes
EXCHANGE_BYTES_PER_VALUE = 3  # dispatched in 8 bits, combined in 16: 1 + 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """Rates are peaks. ``link_bytes_per_s``: one direction, within a node; ``network_...``:
    one direction, one adapter a GPU."""

    memory_bytes: int
    memory_bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    gpus_per_node: int = 8


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "H100": Gpu(80 * 10**9, 3.35e12, 989e12, 450e9, 50e9),
        "H200": Gpu(141 * 10**9, 4.8e12, 989e12, 450e9, 50e9),
        "B200": Gpu(180 * 10**9, 8.0e12, 2250e12, 900e9, 50e9),
    }
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and time depend on. Weights and KV are 16 bits wide unless
    ``bytes_per_weight`` says otherwise.

    Attributes:
        expert_layers: layers with routed experts.
        top_k: experts per token.
        expert_parameters: of one expert in one layer.
        dense_parameters: everything that is not a routed expert.
        kv_token_bytes: KV of one token in all layers.
    """

    layers: int
    expert_layers: int
    hidden: int
    num_experts: int
    top_k: int
    expert_parameters: int
    dense_parameters: int
    kv_token_bytes: int
    bytes_per_weight: float = 2.0

    @property
    def expert_bytes(self) -> int:
        """One expert in all layers."""
        return int(self.expert_layers * self.expert_parameters * self.bytes_per_weight)

    @property
    def dense_bytes(self) -> int:
        return int(self.dense_parameters * self.bytes_per_weight)

    @property
    def active_parameters(self) -> int:
        """Multiplied with for each token."""
        return self.dense_parameters + self.expert_layers * self.top_k * self.expert_parameters


MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        # grouped-query attention: layers x (K and V) x KV heads x head size x 2 bytes
        "qwen3-30b-a3b": ModelShape(
            48, 48, 2048, 128, 8, 3 * 2048 * 768, int(1.5e9), 48 * 2 * 4 * 128 * 2
        ),
        "qwen3-235b-a22b": ModelShape(
            94, 94, 4096, 128, 8, 3 * 4096 * 1536, int(7.8e9), 94 * 2 * 4 * 128 * 2
        ),
        # latent attention: layers x (512 latent + 64 rotary) x 2 bytes
        "kimi-k2-1t": ModelShape(61, 60, 7168, 384, 8, 3 * 7168 * 2048, int(11.7e9), 61 * 576 * 2),
    }
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on so many workers.

    Attributes:
        memory_ratio: share of a GPU's memory that the service may use.
        gpus_per_worker: a worker of several GPUs splits dense weights, KV and its experts over
            them; its rates add.
    """

    gpu: Gpu
    model: ModelShape
    num_workers: int
    memory_ratio: float
    gpus_per_worker: int = 1
    kv_block_tokens: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.memory_ratio <= 1:
            raise PlanError(f"is {self.memory_ratio}; it must be in (0, 1]", field="memory_ratio")
        if self.gpus_per_worker < 1:
            raise PlanError(
                f"is {self.gpus_per_worker}; a worker has at least 1", field="gpus_per_worker"
            )
        if self.kv_memory_bytes < 0:
            raise PlanError(
                f"{self.num_workers} workers with {self.usable_bytes} bytes each do not hold the "
                "weights; take more workers or raise memory_ratio",
                field="num_workers",
            )

    @property
    def usable_bytes(self) -> int:
        """Of one worker."""
        per_gpu = int(self.gpu.memory_bytes * self.memory_ratio) - ACTIVATION_BYTES
        return per_gpu * self.gpus_per_worker

    @property
    def kv_memory_bytes(self) -> int:
        """Of one worker at full width."""
        experts = -(-self.model.num_experts // self.num_workers)
        held_bytes = self.model.dense_bytes + experts * self.model.expert_bytes
        return self.usable_bytes - held_bytes

    def memory_budget(self) -> MemoryBudget:
        """Dense weights and activations are outside of it."""
        return MemoryBudget(
            num_experts=self.model.num_experts,
            max_workers=self.num_workers,
            expert_bytes=self.model.expert_bytes,
            kv_block_bytes=self.model.kv_token_bytes * self.kv_block_tokens,
            kv_block_tokens=self.kv_block_tokens,
            kv_memory_bytes=self.kv_memory_bytes,
        )

    def step_time_model(self) -> StepTimeModel:
        gpu, model = self.gpu, self.model
        read_bytes_per_s = gpu.memory_bytes_per_s * MEMORY_RATE_RATIO * self.gpus_per_worker
        flops = gpu.flops * FLOPS_RATIO * self.gpus_per_worker
        exchange_bytes = model.expert_layers * model.hidden * model.top_k * EXCHANGE_BYTES_PER_VALUE
        return StepTimeModel(
            fixed_s=model.layers * LAUNCH_LAYER_S
            + model.expert_layers * EXCHANGE_LAYER_S
            + model.dense_bytes / read_bytes_per_s,
            experts_s=model.num_experts * model.expert_bytes / read_bytes_per_s,
            context_token_s=model.kv_token_bytes / read_bytes_per_s,
            multiply_sample_s=2 * model.active_parameters / flops,
            exchange_sample_s=exchange_bytes / (self.link_bytes_per_s * self.gpus_per_worker),
            routed_ratio=model.top_k / model.num_experts,
        )

    def prefill_token_s(self) -> float:
        """One token of a prompt, or of a sample that is recomputed: bound by multiplying."""
        flops = self.gpu.flops * FLOPS_RATIO * self.gpus_per_worker
        return 2 * self.model.active_parameters / flops

    def reconfiguration_cost(self) -> ReconfigurationCost:
        bytes_per_s = self.link_bytes_per_s * self.gpus_per_worker
        return ReconfigurationCost(REBUILD_S, bytes_per_s, bytes_per_s)

    @property
    def link_bytes_per_s(self) -> float:
        """Of one GPU, between workers: the network's as soon as there are two nodes."""
        gpu = self.gpu
        one_node = self.num_workers * self.gpus_per_worker <= gpu.gpus_per_node
        return LINK_RATIO * (gpu.link_bytes_per_s if one_node else gpu.network_bytes_per_s)
