"""Every touch of vLLM's private API. Written for vLLM 0.32.0; nothing else may know it.

Sections: version - groups - start of an engine - requests and steps - sampling - experts -
KV blocks - gaps of the CPU platform. Import it only after ``environment.set_environment``.

Invariants that the rest builds on: parameters keep their Parameter objects (vLLM hangs
weight loaders on them); one step is one forward on every rank; nothing here blocks except
collectives, whose groups carry a timeout.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import vllm
import vllm.model_executor.layers.utils as linear_layers
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader
from vllm.platforms import current_platform
from vllm.utils import is_moe_layer
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker import gpu_worker

from actors.engines.environment import FIXED_ENGINE_ARGS
from actors.engines.exact_combine import exact_experts
from actors.engines.kernel_probe import Kernel, Piece
from actors.engines.kv_copy import SampleKvConnector, attention_caches, block_layout, read_blocks
from actors.engines.sampling_noise import draw, noise_key
from actors.engines.vllm_watch import ForwardWatch
from actors.groups import GenerationGroups, imagine_group
from actors.sample_kv import SampleKv
from actors.token_detail import Alternatives, TokenDetail
from placement.errors import ModelRefusedError
from placement.ids import WorkerId
from placement.samples import FinishReason, Sample

VLLM_SERIES = "0.32."
PEER_LOAD_FORMAT = "flexfloor-peer"


def check_version() -> None:
    """Raises: ModelRefusedError: this vLLM is not the one that this module knows."""
    if not vllm.__version__.startswith(VLLM_SERIES):
        raise ModelRefusedError(
            f"vLLM {vllm.__version__} is installed, this release works with {VLLM_SERIES}x only; "
            "install the pinned one"
        )


def runs_on_cpu() -> bool:
    return bool(current_platform.is_cpu())


# ------------------------------------------------------------------------------------ groups


@contextmanager
def _ready_groups(*groups: dist.ProcessGroup) -> Iterator[None]:
    """``GroupCoordinator`` asks torch for two new groups; it is given these instead."""
    waiting = iter(groups)
    new_group = dist.new_group
    same_node = parallel_state.in_the_same_node_as
    dist.new_group = lambda *_args, **_kwargs: next(waiting)
    # A collective question whose answer only tunes shared-memory shortcuts that we do not use.
    parallel_state.in_the_same_node_as = lambda group, *_args, **_named: [True] * group.size()
    try:
        yield
    finally:
        dist.new_group = new_group
        parallel_state.in_the_same_node_as = same_node


def _coordinator(
    name: str,
    members: list[int],
    device: dist.ProcessGroup,
    host: dist.ProcessGroup,
    **options: Any,
) -> parallel_state.GroupCoordinator:
    with _ready_groups(device, host):
        return parallel_state.GroupCoordinator(
            [members],
            0,
            dist.get_backend(device),
            group_name=name,
            **options,
        )


@dataclass(frozen=True, slots=True)
class Coordinators:
    """vLLM's world, data-parallel and expert-parallel groups of one generation."""

    world: parallel_state.GroupCoordinator
    data: parallel_state.GroupCoordinator
    expert: parallel_state.GroupCoordinator

    @classmethod
    def build(cls, groups: GenerationGroups) -> "Coordinators":
        """Build and activate. Data before expert: the expert group's all-to-all caches it.

        On GPUs imagined groups get no communicators (NCCL would wait for the peers): until a
        worker enters real ones, its experts see its own tokens only. Read, not measured.
        """
        members: list[int] = list(groups.members)
        communicate = runs_on_cpu() or not groups.imagined
        world = _coordinator(
            "world", members, groups.device, groups.host, use_device_communicator=False
        )
        data = _coordinator(
            "dp", members, groups.device, groups.host, use_device_communicator=communicate
        )
        _activate(world, data, None)
        expert = _coordinator(
            "ep",
            members,
            groups.device,
            groups.host,
            use_device_communicator=communicate,
            use_all2all=communicate,
        )
        built = cls(world, data, expert)
        built.activate()
        return built

    def activate(self) -> None:
        _activate(self.world, self.data, self.expert)

    def dismantle(self) -> None:
        """Let go of communicators and names; the process groups are their owner's to close."""
        for coordinator in (self.data, self.expert, self.world):
            if coordinator.device_communicator is not None:
                coordinator.device_communicator.destroy()
                coordinator.device_communicator = None
            parallel_state._groups.pop(coordinator.unique_name, None)
            del coordinator.device_group, coordinator.cpu_group


def _activate(world: Any, data: Any, expert: Any) -> None:
    parallel_state._replace_active_groups(world=world, dp=data, ep=expert, eplb=None, node_count=1)


def enter_groups(engine: "HostedEngine", groups: GenerationGroups) -> Coordinators:
    """vLLM's groups over ready process groups, live from now on."""
    with set_current_vllm_config(engine.config):
        engine.coordinators = Coordinators.build(groups)
    return engine.coordinators


def _hook_group_creation(groups: GenerationGroups, worker_id: WorkerId) -> list[Coordinators]:
    """Replace vLLM's one call that would create a world. The list is filled by it."""
    built: list[Coordinators] = []

    def create(*_args: Any, **_kwargs: Any) -> None:
        alone = imagine_group("solo", (worker_id,), worker_id)
        for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP"):
            solo = _coordinator(
                name.strip("_").lower(), [worker_id], alone, alone, use_device_communicator=True
            )
            setattr(parallel_state, name, solo)
        built.append(Coordinators.build(groups))

    gpu_worker.init_distributed_environment = create
    return built


# --------------------------------------------------------------------------- start of an engine


def _register_peer_loader() -> None:
    @register_model_loader(PEER_LOAD_FORMAT)
    class PeerLoader(BaseModelLoader):
        """Loads nothing: a joiner's weights arrive from peers, in run-time layout."""

        def download_model(self, model_config: Any) -> None:
            del model_config

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Small random weights, so that warm-up and probes see ordinary numbers."""
            del model_config
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.data.copy_(noise)


def keep_dense_weights() -> None:
    """CPU only: keep ``layer.weight`` beside its prepacked copy, so that it can be sent on."""
    dispatch = linear_layers.dispatch_cpu_unquantized_gemm

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        del remove_weight
        dispatch(layer, remove_weight=False)

    if not getattr(dispatch, "keeps_weights", False):
        keep.keeps_weights = True  # type: ignore[attr-defined]
        linear_layers.dispatch_cpu_unquantized_gemm = keep


@dataclass(slots=True)
class HostedEngine:
    """vLLM's engine in this process, and the handles into it that the rest uses."""

    core: EngineCore
    config: VllmConfig
    runner: Any
    model: torch.nn.Module
    coordinators: Coordinators
    sample_seeds: dict[str, int]
    """Request id -> sample seed; the sampler reads it."""
    watch: ForwardWatch


def host_engine(
    engine_args: dict[str, Any],
    groups: GenerationGroups,
    worker_id: WorkerId,
    *,
    from_peers: bool,
) -> HostedEngine:
    """Build vLLM's engine as one rank of ``groups`` (which need no peers yet).

    Raises:
        ModelRefusedError: vLLM or we cannot serve this model; the text says which part.
    """
    check_version()
    if runs_on_cpu():
        keep_dense_weights()
        _fill_cpu_communicator()
    if from_peers:
        _register_peer_loader()
        engine_args = {**engine_args, "load_format": PEER_LOAD_FORMAT}
    built = _hook_group_creation(groups, worker_id)
    try:
        config = EngineArgs(
            **{
                **FIXED_ENGINE_ARGS,
                "kv_transfer_config": KVTransferConfig(**FIXED_ENGINE_ARGS["kv_transfer_config"]),
            },
            moe_backend="auto" if runs_on_cpu() else "triton",
            **engine_args,
        ).create_engine_config()
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        raise ModelRefusedError(f"vLLM cannot serve {engine_args['model']}: {error}") from error
    runner = core.model_executor.driver_worker.worker.model_runner
    seeds: dict[str, int] = {}
    _install_sampler(runner, seeds)
    watch = ForwardWatch(config, core.scheduler, runner, runner.get_model())
    return HostedEngine(core, config, runner, runner.get_model(), built[0], seeds, watch)


def eos_token_ids(config: VllmConfig) -> tuple[int, ...]:
    """From the checkpoint's generation config, else its model config."""
    ids = config.model_config.try_get_generation_config().get("eos_token_id")
    if ids is None:
        ids = getattr(config.model_config.hf_text_config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


# ----------------------------------------------------------------------------- requests and steps


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step made of one sample."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason | None
    detail: TokenDetail | None = None


_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def add_request(
    engine: HostedEngine, request_id: str, sample: Sample, max_tokens: int, stop_ids: list[int]
) -> None:
    """Queue a sample in the engine; what it has generated already is recomputed as prompt."""
    sampling = sample.sampling
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=True,  # stop_token_ids holds the end-of-sequence tokens
        detokenize=False,
        logprobs=sampling.top_logprobs,
    )
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[*sample.prompt_ids, *sample.generated_ids],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    engine.sample_seeds[request_id] = sample.seed
    engine.watch.begin(request_id, sample)
    engine.core.add_request(*engine.core.preprocess_add_request(request))


def drop_request(engine: HostedEngine, request_id: str) -> None:
    engine.core.abort_requests([request_id])
    _forget(engine, request_id)


def _forget(engine: HostedEngine, request_id: str) -> None:
    engine.sample_seeds.pop(request_id, None)
    engine.watch.forget(request_id)


def computed_tokens(engine: HostedEngine, request_id: str) -> int:
    """Of how many tokens of a request the engine has the KV; 0 if it does not have it."""
    request = engine.core.scheduler.requests.get(request_id)
    return int(request.num_computed_tokens) if request is not None else 0


def step_idle(engine: HostedEngine) -> None:
    """Exactly one forward, of no request, whether there are any or not."""
    engine.core.execute_dummy_batch()


def step(engine: HostedEngine) -> list[StepOutput]:
    """Exactly one forward, an empty one if there is nothing to do."""
    if not engine.core.scheduler.has_requests():
        engine.core.execute_dummy_batch()
        return []
    outputs, executed = engine.core.step_fn()
    engine.core.post_step(executed)
    if not executed:
        engine.core.execute_dummy_batch()
    made: list[StepOutput] = []
    for batch in (outputs or {}).values():
        for out in batch.outputs:
            logprobs = out.new_logprobs.logprobs if out.new_logprobs is not None else ()
            finish = _FINISH.get(str(out.finish_reason)) if out.finish_reason is not None else None
            token_ids = tuple(int(t) for t in out.new_token_ids)
            detail = engine.watch.detail(
                out.request_id, len(token_ids), partial(_alternatives, out.new_logprobs)
            )
            if finish is not None:
                _forget(engine, out.request_id)
            made.append(
                StepOutput(
                    out.request_id,
                    token_ids,
                    tuple(float(row[0]) for row in logprobs),
                    finish,
                    detail,
                )
            )
    return made


def _alternatives(new_logprobs: Any) -> list[Alternatives]:
    """Of each new token, behind the drawn one; what truncation took away is none."""
    rows = zip(new_logprobs.logprob_token_ids, new_logprobs.logprobs, strict=True)
    return [
        tuple(
            (int(token_id), float(logprob))
            for token_id, logprob in zip(ids[1:], logprobs[1:], strict=True)
            if logprob > -math.inf
        )
        for ids, logprobs in rows
    ]


# ------------------------------------------------------------------------------------- sampling


def _install_sampler(runner: Any, seeds: dict[str, int]) -> None:
    """Replace the draw and the gathering of logprobs in vLLM's sampler.

    The draw takes its noise from (seed, position) only. Logprobs are those of the drawn
    token after temperature and truncation; the ranks that vLLM would count for each token
    are nobody's wish here, and their compiled kernel would stall the first sample.
    """

    def keys(num_rows: int, device: torch.device) -> torch.Tensor:
        batch = runner.input_batch
        values = [
            noise_key(seeds.get(request_id, 0), int(batch.num_tokens_no_spec[row]))
            for row, request_id in enumerate(batch.req_ids[:num_rows])
        ]
        values += [0] * (num_rows - len(values))  # rows of a dummy batch
        return torch.tensor(values, dtype=torch.int64, device=device)

    def sample(
        logits: torch.Tensor,
        _generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        truncated = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
        if k is not None:
            truncated |= k < logits.shape[-1]
        if p is not None:
            truncated |= p < 1
        rows = torch.nonzero(truncated).flatten()
        if rows.numel():  # rows without truncation must not change beside rows with it
            logits[rows] = apply_top_k_top_p(
                logits[rows], None if k is None else k[rows], None if p is None else p[rows]
            )
        drawn = draw(logits, keys(logits.shape[0], logits.device))
        return drawn, logits.log_softmax(dim=-1, dtype=torch.float32)

    def gather(
        logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        index = token_ids.unsqueeze(-1)
        values = logprobs.gather(-1, index)
        if num_logprobs:  # somebody in the batch asked for alternatives
            top = logprobs.topk(num_logprobs, dim=-1)
            index = torch.cat([index, top.indices], dim=1)
            values = torch.cat([values, top.values], dim=1)
        return LogprobsTensors(
            index.to(torch.int32), values, torch.zeros_like(token_ids, dtype=torch.int32)
        )

    runner.sampler.topk_topp_sampler.forward = sample
    runner.sampler.gather_logprobs = gather


# -------------------------------------------------------------------------------------- experts


class MoeLayers:
    """The expert weights of all MoE layers, as slots: row i of each weight is slot i.

    Which expert lies in which slot is the caller's to know; it is the same in all layers.
    """

    def __init__(self, engine: HostedEngine, *, exact: bool) -> None:
        self._engine = engine
        self._layers = [m for m in engine.model.modules() if is_moe_layer(m)]
        if not self._layers:
            raise ModelRefusedError("the model has no MoE layer: there is nothing to move")
        for layer in self._layers:
            routed = layer.routed_experts
            if type(routed.quant_method) is not UnquantizedFusedMoEMethod:
                raise ModelRefusedError(
                    f"experts of {routed.layer_name} are quantised "
                    f"({type(routed.quant_method).__name__}); serve an unquantised checkpoint"
                )
            if getattr(layer, "shared_experts", None) is not None:
                raise ModelRefusedError(
                    f"{routed.layer_name} has shared experts, which cannot move yet"
                )
            if runs_on_cpu():
                routed.quant_method.experts_cls = _elastic_cpu_experts(
                    routed.quant_method.experts_cls, exact
                )
        first = self._layers[0].routed_experts
        self.num_layers = len(self._layers)
        self.num_experts: int = first.expert_map_manager.global_num_experts
        self.num_slots: int = first.local_num_experts
        self.initial_experts: list[int] = first.expert_map_manager.get_local_expert_ids()
        self._names = [
            name for name, p in first.named_parameters() if p.shape[0] == first.local_num_experts
        ]
        self.expert_bytes = sum(  # one expert in all layers, in run-time layout
            weight[0].numel() * weight.element_size()
            for layer in range(self.num_layers)
            for weight in self.weights(layer)
        )
        self._routed_ids = {
            id(p) for layer in self._layers for p in layer.routed_experts.parameters()
        }

    def routed_layers(self) -> list[Any]:
        """vLLM's modules that hold the weights, one per layer."""
        return [layer.routed_experts for layer in self._layers]

    def weights(self, layer: int) -> list[torch.Tensor]:
        """The weights of one layer, each [num_slots, ...]."""
        routed = self._layers[layer].routed_experts
        return [getattr(routed, name).data for name in self._names]

    def is_expert_weight(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._routed_ids

    def resize(self, num_slots: int, moved: dict[int, int]) -> None:
        """Reallocate every layer's weights with ``num_slots`` rows, one layer after another.

        Args:
            moved: old slot -> new slot of the experts to keep; all must be below ``num_slots``.
        """
        old = torch.tensor(list(moved.keys()), dtype=torch.long)
        new = torch.tensor(list(moved.values()), dtype=torch.long)
        for layer in self._layers:
            for name in self._names:
                parameter = getattr(layer.routed_experts, name)
                rows = parameter.data.new_empty((num_slots, *parameter.shape[1:]))
                rows[new] = parameter.data[old]
                parameter.data = rows
        self.num_slots = num_slots

    def place(
        self, slot_of_expert: dict[int, int], owner_rank_E: list[int], rank: int, size: int
    ) -> None:
        """Let the forward pass see this placement. Pointers and small tables only.

        Args:
            slot_of_expert: the experts that this rank owns, and their slots.
            owner_rank_E: rank that owns each expert.
        """
        config = self._engine.config
        local_index = torch.full((self.num_experts,), -1, dtype=torch.int32)
        for expert, slot in slot_of_expert.items():
            local_index[expert] = slot
        device = self.weights(0)[0].device
        local_index = local_index.to(device)
        owners = torch.tensor(owner_rank_E, dtype=torch.long, device=device)
        parallel = config.parallel_config
        parallel.data_parallel_size = size
        parallel.data_parallel_rank = rank
        with set_current_vllm_config(config):
            moe_parallel = FusedMoEParallelConfig.make(
                tp_size_=1, pcp_size_=1, dp_size_=size, sp_size_=1, vllm_parallel_config=parallel
            )
            for layer in self._layers:
                routed = layer.routed_experts
                moe_config = replace(
                    layer.moe_config,
                    num_local_experts=self.num_slots,
                    moe_parallel_config=moe_parallel,
                )
                layer._set_moe_config(moe_config)
                manager = routed.expert_map_manager
                manager.moe_parallel_config = moe_parallel
                manager._local_num_experts = self.num_slots
                manager._expert_map = local_index
                routed.update_expert_map_info()
                routed.quant_method.moe = moe_config
                routed.quant_method._init_moe_kernel(routed)
                experts = routed.quant_method.moe_kernel.fused_experts
                experts.flexfloor_local_index_E = local_index
                experts.flexfloor_owner_rank_E = owners
                experts.flexfloor_rank = rank
        group = parallel_state.get_ep_group().device_group
        for module in self._engine.model.modules():
            if hasattr(module, "n_local_physical_experts"):
                module.ep_group = group
                module.ep_size, module.ep_rank = size, rank
                module.n_local_physical_experts = self.num_slots
        if hasattr(self._engine.model, "num_local_physical_experts"):
            self._engine.model.num_local_physical_experts = self.num_slots

    def probe_rows(self, num_rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The first layer's expert kernel on random rows, as exact mode calls it."""
        routed = self._layers[0].routed_experts
        experts = routed.quant_method.moe_kernel.fused_experts
        weights = self.weights(0)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(num_rows, routed.hidden_size, generator=generator)
        hidden = hidden.to(weights[0].dtype).to(weights[0].device)
        slots = torch.randint(0, self.num_slots, (num_rows,), generator=generator)

        def rows(index: torch.Tensor) -> torch.Tensor:
            kernel = experts.flexfloor_wrap(
                lambda x, slot: experts.flexfloor_rows(
                    x, slot, weights[0], weights[1], routed.activation
                )
            )
            return kernel(hidden[index].contiguous(), slots[index])

        return rows

    def wrap_rows(self, wrap: Callable[[Kernel], Kernel]) -> None:
        """Let exact mode call the expert kernel through ``wrap``."""
        for layer in self._layers:
            layer.routed_experts.quant_method.experts_cls.flexfloor_wrap = staticmethod(wrap)


# ---------------------------------------------------------------------------------- dense weights


def dense_tensors(engine: HostedEngine, experts: MoeLayers) -> list[torch.Tensor]:
    """All weights but the experts', in run-time layout and one order on every worker.

    Plain parameters and the buffers that a checkpoint would carry. Each once.
    """
    seen: set[int] = set()
    tensors: list[torch.Tensor] = []
    state = engine.model.state_dict(keep_vars=True)
    for tensor in [*engine.model.parameters(), *(state[name] for name in sorted(state))]:
        if id(tensor) in seen or experts.is_expert_weight(tensor):
            continue
        seen.add(id(tensor))
        if tensor.numel():
            tensors.append(tensor.data)
    return tensors


def repack_dense(engine: HostedEngine) -> None:
    """CPU only: make the prepacked copies anew after ``dense_tensors`` were overwritten."""
    for module in engine.model.modules():
        if hasattr(module, "cpu_linear"):
            wrap = getattr(module, "flexfloor_wrap", None)
            linear_layers.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            if wrap is not None:
                wrap_dense(module, wrap)


def dense_layers(engine: HostedEngine) -> dict[str, torch.nn.Module]:
    """The last linear layer of each shape, by name (CPU only: those with their own kernel)."""
    found: dict[tuple[int, ...], tuple[str, torch.nn.Module]] = {}
    for name, module in engine.model.named_modules():
        if hasattr(module, "cpu_linear"):
            found[tuple(module.weight.shape)] = (name, module)
    return dict(found.values())


def dense_rows(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """``module``'s kernel over [B, K] rows."""
    return lambda x: module.cpu_linear(x, module.weight, getattr(module, "bias", None))


def wrap_dense(module: torch.nn.Module, wrap: Callable[[Kernel], Kernel]) -> None:
    """Let ``module`` call its kernel through ``wrap``, also after ``repack_dense``."""
    kernel = module.cpu_linear
    module.flexfloor_wrap = wrap
    module.cpu_linear = lambda x, weight, bias: wrap(lambda part: kernel(part, weight, bias))(x)


def layers_of_shape(engine: HostedEngine, shape: torch.Size) -> list[torch.nn.Module]:
    return [
        module
        for module in engine.model.modules()
        if hasattr(module, "cpu_linear") and module.weight.shape == shape
    ]


# ------------------------------------------------------------------------------------- KV blocks


class KvPool:
    """vLLM's KV block pool, resized while requests hold blocks.

    Block 0 is vLLM's null block. Each layer's cache is a tensor of its own, so that a resize
    needs room for one layer's cache more, not for all.
    """

    def __init__(self, engine: HostedEngine) -> None:
        self._engine = engine
        self._pool = engine.core.scheduler.kv_cache_manager.block_pool
        self._layers = engine.config.compilation_config.static_forward_context
        self._scheduler_side: SampleKvConnector = engine.core.scheduler.get_kv_connector()
        self._runner_side: SampleKvConnector = get_kv_transfer_group()
        caches = engine.runner.kv_caches
        if any(c.shape[0] != self.num_blocks or c.stride(0) != max(c.stride()) for c in caches):
            raise ModelRefusedError(
                "the attention backend does not keep KV block by block "
                f"(cache shape {tuple(caches[0].shape)}); it cannot be resized"
            )
        self.copyable = len(engine.runner.kv_cache_config.kv_cache_groups) == 1
        """One block table per request. Layers of several kinds have several: their samples are
        recomputed when they move."""
        self.block_bytes = sum(c[0].numel() * c.element_size() for c in caches)
        self.block_tokens: int = engine.config.cache_config.block_size

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - 1 - int(self._pool.get_num_free_blocks())

    @property
    def capacity_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_tokens

    def resize(self, num_blocks: int) -> None:
        """Give up or take back blocks; used blocks move down as far as needed.

        The caller has checked that ``used_blocks`` fit.
        """
        assert num_blocks - 1 >= self.used_blocks
        pool, scheduler = self._pool, self._engine.core.scheduler
        blocks = pool.blocks
        kept = min(num_blocks, len(blocks))
        high = [b for b in blocks[kept:] if b.ref_cnt > 0]
        free = (b for b in blocks[1:kept] if b.ref_cnt == 0)
        target = {b.block_id: next(free) for b in high}
        self._relocate(target)
        for block in high:
            target[block.block_id].ref_cnt = block.ref_cnt
        new_ids = {b.block_id: b.block_id for b in blocks[:kept] if b.ref_cnt > 0}
        new_ids |= {old: block.block_id for old, block in target.items()}
        self._reallocate(num_blocks, new_ids)
        pool.blocks = blocks[:kept] + [KVCacheBlock(i, pool=pool) for i in range(kept, num_blocks)]
        pool.num_gpu_blocks = num_blocks
        pool.free_block_queue = FreeKVCacheBlockQueue(
            [b for b in pool.blocks[1:] if b.ref_cnt == 0]
        )
        self._engine.config.cache_config.num_gpu_blocks = num_blocks
        self._engine.runner.kv_cache_config.num_blocks = num_blocks
        scheduler.kv_cache_config.num_blocks = num_blocks

    @property
    def layout(self) -> tuple[tuple[str, str], ...]:
        return block_layout(attention_caches(self._layers))

    def read(self, request_id: str, sample: Sample) -> SampleKv:
        """The KV of a request, copied to host memory. It must have computed tokens."""
        num_tokens = computed_tokens(self._engine, request_id)
        (held,) = self._engine.core.scheduler.kv_cache_manager.get_block_ids(request_id)
        block_ids = held[: -(-num_tokens // self.block_tokens)]
        return read_blocks(attention_caches(self._layers), block_ids, sample, num_tokens)

    def offer(self, request_id: str, kv: SampleKv) -> None:
        """A request that is about to be added begins with ``kv``, of the same ``layout``."""
        self._scheduler_side.offer(request_id, kv)

    @property
    def copied(self) -> tuple[int, float]:
        """Bytes that ``offer`` has brought into the pool, and the seconds it took."""
        return self._runner_side.copied_bytes, self._runner_side.copied_s

    def _relocate(self, target: dict[int, KVCacheBlock]) -> None:
        """Let every table that names a moved block name its new place."""
        if not target:
            return
        scheduler, runner = self._engine.core.scheduler, self._engine.runner
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            for held in manager.req_to_blocks.values():
                held[:] = [target.get(b.block_id, b) for b in held]
        for table in runner.input_batch.block_table.block_tables:
            rows = table.block_table.np
            before = rows.copy()
            for old, block in target.items():
                rows[before == old] = block.block_id
        for request in runner.requests.values():
            request.block_ids = tuple(
                [target[i].block_id if i in target else i for i in ids] for ids in request.block_ids
            )

    def _reallocate(self, num_blocks: int, new_ids: dict[int, int]) -> None:
        old = torch.tensor(list(new_ids.keys()), dtype=torch.long)
        new = torch.tensor(list(new_ids.values()), dtype=torch.long)
        caches = self._engine.runner.kv_caches
        bound = {
            cache.data_ptr(): layer
            for layer in self._layers.values()
            if isinstance(cache := getattr(layer, "kv_cache", None), torch.Tensor)
        }
        for i, cache in enumerate(caches):
            resized = cache.new_zeros((num_blocks, *cache.shape[1:]))
            resized[new] = cache[old]
            layer = bound[cache.data_ptr()]
            if hasattr(layer, "bind_kv_cache"):
                layer.bind_kv_cache(resized)
            else:
                layer.kv_cache = resized
            caches[i] = resized


def attention_probe(
    engine: HostedEngine, sequence_tokens: list[int]
) -> Callable[[list[Piece]], list[torch.Tensor]]:
    """The first layer's attention over random sequences in a small cache of its own."""
    group = engine.runner.attn_groups[0][0]
    builder = group.get_metadata_builder()
    layer = engine.config.compilation_config.static_forward_context[group.layer_names[0]]
    impl = layer.impl
    block_tokens = builder.kv_cache_spec.block_size
    template = engine.runner.kv_caches[0]
    per_sequence = -(-sequence_tokens[0] // block_tokens)
    num_sequences = len(sequence_tokens)
    cache = template.new_zeros((1 + num_sequences * per_sequence, *template.shape[1:]))
    tables = torch.arange(1, 1 + num_sequences * per_sequence, dtype=torch.int32)
    tables = tables.view(num_sequences, per_sequence)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> list[torch.Tensor]:
        return [
            torch.randn(n, heads, impl.head_size, generator=generator).to(template.dtype)
            for n in sequence_tokens
        ]

    query, key, value = random(impl.num_heads), random(impl.num_kv_heads), random(impl.num_kv_heads)

    def attend(pieces: list[Piece]) -> list[torch.Tensor]:
        lengths = [end - start for _, start, end in pieces]
        q = torch.cat([query[s][a:b] for s, a, b in pieces])
        k = torch.cat([key[s][a:b] for s, a, b in pieces])
        v = torch.cat([value[s][a:b] for s, a, b in pieces])
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        ends = torch.tensor([end for _, _, end in pieces], dtype=torch.int32)
        slots = torch.cat(
            [
                tables[s][torch.arange(a, b) // block_tokens] * block_tokens
                + torch.arange(a, b) % block_tokens
                for s, a, b in pieces
            ]
        ).to(torch.int64)
        with set_current_vllm_config(engine.config):
            metadata = builder.build(
                0,
                CommonAttentionMetadata(
                    query_start_loc=starts,
                    query_start_loc_cpu=starts,
                    seq_lens=ends,
                    num_reqs=len(pieces),
                    num_actual_tokens=q.shape[0],
                    max_query_len=max(lengths),
                    max_seq_len=int(ends.max()),
                    block_table_tensor=tables[[s for s, _, _ in pieces]].contiguous(),
                    slot_mapping=slots,
                ),
            )
            impl.do_kv_cache_update(layer, k, v, cache, slots)
            out = torch.empty_like(q)
            impl.forward(layer, q, k, v, cache, metadata, out)
        return list(out.split(lengths))

    return attend


# ------------------------------------------------------------------- gaps of the CPU platform


def _fill_cpu_communicator() -> None:
    """vLLM's CPU communicator lacks the two collectives of expert parallelism."""

    def all_gatherv(
        self: Any,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather rows of unequal numbers; several tensors travel as one buffer of bytes."""
        assert dim == 0
        tensors = [input_] if isinstance(input_, torch.Tensor) else input_
        num_rows = tensors[0].shape[0]
        sizes = sizes or [num_rows] * self.world_size
        flat = [t.contiguous().view(num_rows, -1).view(torch.uint8) for t in tensors]
        widths = [t.shape[1] for t in flat]
        mine = torch.zeros((max(sizes), sum(widths)), dtype=torch.uint8)
        mine[:num_rows] = torch.cat(flat, dim=1)
        parts = torch.empty((self.world_size * max(sizes), sum(widths)), dtype=torch.uint8)
        dist.all_gather_single(parts, mine, group=self.device_group)
        rows = torch.cat([part[:n] for part, n in zip(parts.split(max(sizes)), sizes, strict=True)])
        gathered = [
            column.contiguous().view(t.dtype).view(rows.shape[0], *t.shape[1:])
            for column, t in zip(rows.split(widths, dim=1), tensors, strict=True)
        ]
        return gathered[0] if isinstance(input_, torch.Tensor) else gathered

    def reduce_scatterv(
        self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over ranks, each keeps its rows. In exact mode the sum is done already."""
        del dim
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        first = sum(sizes[: self.rank_in_group])
        if not getattr(CpuCommunicator, "flexfloor_already_reduced", False):
            input_ = input_.clone()
            dist.all_reduce(input_, group=self.device_group)
        return input_[first : first + sizes[self.rank_in_group]]

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def _elastic_cpu_experts(kernel: type, exact: bool) -> type:
    """``kernel`` with what the CPU experts lack: expert maps, and the exact combine."""
    CpuCommunicator.flexfloor_already_reduced = exact

    class ElasticExperts(kernel):
        flexfloor_wrap: Callable[[Kernel], Kernel] = staticmethod(lambda kernel: kernel)
        flexfloor_local_index_E: torch.Tensor
        flexfloor_owner_rank_E: torch.Tensor
        flexfloor_rank: int

        def flexfloor_rows(
            self,
            hidden: torch.Tensor,
            slots: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            activation: Any,
        ) -> torch.Tensor:
            """Unweighted output of one expert per row."""
            output = torch.empty_like(hidden)
            weights = torch.ones((hidden.shape[0], 1), dtype=torch.float32)
            ids = slots.to(torch.int32).view(-1, 1).contiguous()
            unused: Any = None
            super().apply(
                output,
                hidden,
                w1,
                w2,
                topk_weights=weights,
                topk_ids=ids,
                activation=activation,
                global_num_experts=w1.shape[0],
                expert_map=None,
                a1q_scale=None,
                a2_scale=None,
                workspace13=unused,
                workspace2=unused,
                expert_tokens_meta=None,
                apply_router_weight_on_input=False,
            )
            return output

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            **rest: Any,
        ) -> None:
            if not exact:
                local = self.flexfloor_local_index_E[topk_ids.long()]
                elsewhere = local < 0
                super().apply(
                    output,
                    hidden_states,
                    w1,
                    w2,
                    topk_weights.masked_fill(elsewhere, 0.0),
                    local.masked_fill(elsewhere, 0).to(topk_ids.dtype),
                    activation,
                    **rest,
                )
                return
            ep = parallel_state.get_ep_group()
            sizes = [hidden_states.shape[0]]
            if ep.world_size > 1:
                sizes = get_forward_context().dp_metadata.get_chunk_sizes_across_dp_rank()
            first = sum(sizes[: self.flexfloor_rank])
            output[first : first + sizes[self.flexfloor_rank]] = exact_experts(
                hidden_states,
                topk_weights,
                topk_ids,
                self.flexfloor_wrap(
                    lambda rows, slots: self.flexfloor_rows(rows, slots, w1, w2, activation)
                ),
                local_index_E=self.flexfloor_local_index_E,
                owner_rank_E=self.flexfloor_owner_rank_E,
                rank=self.flexfloor_rank,
                tokens_per_rank=sizes,
                group=ep.device_group if ep.world_size > 1 else None,
            )

    ElasticExperts.__name__ = f"Elastic{kernel.__name__}"
    return ElasticExperts
