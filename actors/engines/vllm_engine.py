"""One worker's engine: samples in, tokens out, experts and KV memory that can change.

Owns the expert slots and the memory budget; leaves to ``actors.member`` when things happen
and with whom. Not thread-safe: every call but the read of expert rows belongs on the decode
thread, between two steps.

Invariant: expert slots and KV blocks together never exceed the budget.
"""

import math
import time
from dataclasses import dataclass, replace

import torch

from actors.engines import vllm_private as private
from actors.engines.exactness import ensure_exact
from actors.engines.vllm_weights import load_tensors
from actors.groups import GenerationGroups
from actors.protocol import ModelFacts, Tokens, WorkerSpec
from actors.sample_kv import SampleKv
from actors.weight_chunks import WeightChunk
from actors.weights_keeper import CHECKPOINT_VERSION
from placement.errors import (
    ConfigError,
    MembershipError,
    ModelRefusedError,
    RequestError,
    WeightUpdateError,
)
from placement.experts import initial_owners
from placement.ids import SampleId, WorkerId
from placement.membership import Placement
from placement.samples import FinishReason, Sample, Sampling

WARM_UP_SAMPLE = SampleId("warm-up")


@dataclass(slots=True)
class _Running:
    sample: Sample
    token_ids: list[int]
    """All tokens of the response so far."""


class Engine:
    """vLLM as one rank of an elastic group.

    Args:
        spec: what to build.
        groups: groups of the right size without peers; ``enter`` brings real ones.

    Attributes:
        prefilled_tokens: tokens whose KV the last step computed before samples' next tokens.
        refused_kv: samples so far whose KV came with them and did not fit; it was recomputed.
        weight_version: of all of this worker's weights; None while they are of several.

    Raises:
        ModelRefusedError, ConfigError: the model, the mode or the memory does not work.
    """

    def __init__(self, spec: WorkerSpec, groups: GenerationGroups) -> None:
        self.worker_id = spec.worker_id
        self.phases_s: dict[str, float] = {}
        clock = _Clock(self.phases_s)
        self._hosted = private.host_engine(
            {
                **spec.engine_args,
                "model": spec.model,
                "max_num_seqs": spec.max_samples,
                "kv_cache_memory_bytes": spec.kv_memory_bytes,
            },
            groups,
            spec.worker_id,
            from_peers=spec.joiner,
        )
        clock.lap("engine")
        self._experts = private.MoeLayers(self._hosted, exact=spec.exact)
        self._kv = private.KvPool(self._hosted)
        num_experts = self._experts.num_experts
        if num_experts < len(spec.members):
            raise ModelRefusedError(
                f"{num_experts} experts cannot be shared by {len(spec.members)} workers",
                field="group.max_workers",
            )
        share = math.ceil(num_experts / (spec.max_workers or len(spec.members)))
        self._budget_bytes = spec.kv_memory_bytes + share * self._experts.expert_bytes
        self._slot_of = {e: i for i, e in enumerate(self._experts.initial_experts)}
        self._running: dict[str, _Running] = {}
        self._held: dict[str, _Running] = {}
        self._prefilling: dict[str, int] = {}
        """Sample -> tokens of its context whose KV is there, until its next token is made."""
        self.prefilled_tokens = 0
        self.refused_kv = 0
        self.weight_version: str | None = CHECKPOINT_VERSION
        self._eos = private.eos_token_ids(self._hosted.config)
        self.coordinators = self._hosted.coordinators
        self.placement = _linear_placement(num_experts, spec.members)
        self._place(self.placement)
        self._fit_kv()
        self.exact_report = ensure_exact(self._hosted, self._experts) if spec.exact else {}
        clock.lap("checks")
        self._warm_up()
        clock.lap("warm_up")

    # ------------------------------------------------------------------------------- facts

    @property
    def facts(self) -> ModelFacts:
        config = self._hosted.config.model_config
        return ModelFacts(
            num_layers=self._experts.num_layers,
            num_experts=self._experts.num_experts,
            vocab_size=config.get_vocab_size(),
            max_model_len=config.max_model_len,
            eos_token_ids=self._eos,
            expert_bytes=self._experts.expert_bytes,
            kv_block_bytes=self._kv.block_bytes,
            kv_block_tokens=self._kv.block_tokens,
            dense_bytes=sum(t.numel() * t.element_size() for t in self.dense_tensors()),
            experts_per_token=getattr(config.hf_text_config, "num_experts_per_tok", 0),
            on_cpu=private.runs_on_cpu(),
            routing=self._hosted.watch.layout,
        )

    @property
    def device_backend(self) -> str:
        """torch's name for the collectives of the memory that the model runs in."""
        return "gloo" if private.runs_on_cpu() else "nccl"

    @property
    def kv_capacity_tokens(self) -> int:
        return self._kv.capacity_tokens

    @property
    def kv_used_tokens(self) -> int:
        return self._kv.used_blocks * self._kv.block_tokens

    @property
    def copied_kv(self) -> tuple[int, float]:
        """Bytes of KV that came with samples, and the seconds that filling them in took."""
        return self._kv.copied

    @property
    def preempted(self) -> int:
        """Times that a sample was put back for want of KV."""
        return self._hosted.watch.preempted

    @property
    def held_experts(self) -> tuple[int, ...]:
        return tuple(sorted(self._slot_of))

    @property
    def num_running(self) -> int:
        return len(self._running)

    # ----------------------------------------------------------------------------- samples

    def add(self, sample: Sample, kv: SampleKv | None = None) -> None:
        """Take a sample; it decodes from the next step on.

        ``kv`` is what another worker has computed for it: only the tokens beyond are computed
        here. KV that is not this sample's, has other blocks or comes from other weights is not
        used.

        Raises:
            RequestError: the engine cannot decode this sample.
        """
        model = self._hosted.config.model_config
        if not sample.prompt_ids:
            raise RequestError(f"prompt of {sample.sample_id} is empty")
        if sample.sample_id in self._running:
            raise RequestError(f"sample {sample.sample_id} is running already")
        if sample.max_context_tokens > model.max_model_len:
            raise RequestError(
                f"{len(sample.prompt_ids)} prompt tokens and max_tokens "
                f"{sample.sampling.max_tokens} exceed the model's {model.max_model_len}"
            )
        vocab_size = model.get_vocab_size()
        if not 0 <= min(sample.prompt_ids) <= max(sample.prompt_ids) < vocab_size:
            raise RequestError(
                f"prompt of {sample.sample_id} holds token ids from {min(sample.prompt_ids)} to "
                f"{max(sample.prompt_ids)}; the vocabulary ends at {vocab_size - 1}"
            )
        done = len(sample.generated_ids)
        limit = min(sample.sampling.max_tokens, sample.replay_stop_tokens or 1 << 62)
        if done >= limit:
            raise RequestError(f"sample {sample.sample_id} has all of its {limit} tokens")
        stop_ids = list(sample.sampling.stop_token_ids)
        if not sample.sampling.ignore_eos:
            stop_ids += self._eos
        if kv is not None and not (
            kv.is_of(sample)
            and kv.block_layout == self._kv.layout
            and kv.weight_version == self.weight_version
        ):
            self.refused_kv += 1
            kv = None
        if kv is not None and kv.num_tokens > sample.untold_from:
            kv = None  # what these tokens' forward shows was asked for, and got lost
        if kv is not None:
            self._kv.offer(sample.sample_id, kv)
        private.add_request(self._hosted, sample.sample_id, sample, limit - done, stop_ids)
        self._running[sample.sample_id] = _Running(sample, list(sample.generated_ids))
        self._prefilling[sample.sample_id] = kv.num_tokens if kv is not None else 0

    def evict(self, sample_id: SampleId) -> bool:
        """Let go of a sample and its KV. False if it is not running (any more)."""
        if self._running.pop(sample_id, None) is None:
            return False
        self._drop(sample_id)
        return True

    def _drop(self, sample_id: str) -> None:
        self._prefilling.pop(sample_id, None)
        private.drop_request(self._hosted, sample_id)

    def hold(self, sample_id: SampleId) -> int:
        """Let go of a running sample but keep its KV where it is, for ``export_kv``; returns of
        how many tokens. Until it is exported or dropped the engine must make no step."""
        self._held[sample_id] = self._running.pop(sample_id)
        return self._exportable_tokens(sample_id)

    def _exportable_tokens(self, sample_id: SampleId) -> int:
        return private.computed_tokens(self._hosted, sample_id) if self._kv.copyable else 0

    def export_kv(self, sample_id: SampleId) -> SampleKv | None:
        """The KV of a held sample, which is dropped with that. None: it is not held, or there is
        nothing that could be copied."""
        held = self._held.pop(sample_id, None)
        if held is None:
            return None
        kv = None
        if self._exportable_tokens(sample_id):
            kv = self._kv.read(sample_id, held.sample.continued(tuple(held.token_ids)))
            kv = replace(kv, weight_version=self.weight_version or "")
        self._drop(sample_id)
        return kv

    def drop_held(self) -> None:
        """Whoever wanted held KV has it, or never will."""
        while self._held:
            self._drop(self._held.popitem()[0])

    def running_ids(self) -> list[SampleId]:
        return [SampleId(i) for i in self._running]

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Tokens]:
        """One forward with the group; the new tokens of each sample.

        Raises:
            MembershipError: the weights are of several versions.
        """
        if self.weight_version is None:
            raise MembershipError(
                f"worker {self.worker_id} was to decode with weights of several versions"
            )
        made = []
        outputs = private.step(self._hosted)
        self._count_prefilled({out.request_id for out in outputs})
        for out in outputs:
            running = self._running.get(out.request_id)
            if running is None:  # evicted between schedule and output
                continue
            start = len(running.token_ids)
            running.token_ids.extend(out.token_ids)
            finish = out.finish
            if finish is not None:
                del self._running[out.request_id]
                sample = running.sample
                if (
                    finish is FinishReason.LENGTH
                    and len(running.token_ids) < sample.sampling.max_tokens
                ):
                    finish = FinishReason.STOP  # the replayed length
            made.append(
                Tokens(
                    SampleId(out.request_id),
                    start,
                    out.token_ids,
                    out.logprobs,
                    finish,
                    detail=out.detail,
                    weight_version=self.weight_version,
                )
            )
        return made

    def step_idle(self) -> list[Tokens]:
        """One forward with the group that advances none of this worker's samples."""
        private.step_idle(self._hosted)
        self.prefilled_tokens = 0
        return []

    def _count_prefilled(self, made_tokens: set[str]) -> None:
        self.prefilled_tokens = 0
        for sample_id, known in list(self._prefilling.items()):
            if sample_id in made_tokens:
                del self._prefilling[sample_id]
                # The last token of a context is a step of decoding, with or without the rest.
                now = self._running[sample_id].sample.context_tokens - 1
            else:
                now = self._prefilling[sample_id] = private.computed_tokens(self._hosted, sample_id)
            self.prefilled_tokens += max(0, now - known)

    def resubmit_all(self) -> int:
        """Recompute every unfinished sample: a step broke half-way and left no sound state."""
        broken = list(self._running.values())
        for running in broken:
            self.evict(running.sample.sample_id)
        for running in broken:
            self.add(running.sample.continued(tuple(running.token_ids)))
        return len(broken)

    # ----------------------------------------------------------------------------- weights

    def load_chunk(self, chunk: WeightChunk) -> None:
        """Take part of the new weights: dense ones, and of the experts those that this worker
        holds. Until ``finish_load`` it must make no step but idle ones.

        Raises:
            WeightUpdateError: the tensors are not this model's.
        """
        self.weight_version = None
        try:
            load_tensors(self._hosted, self._experts, chunk.tensors())
        except (ValueError, RuntimeError, KeyError, AttributeError) as error:  # vLLM's loaders
            raise WeightUpdateError(
                f"worker {self.worker_id} cannot load {chunk.specs[0].name} to "
                f"{chunk.specs[-1].name}: {error}"
            ) from error

    def finish_load(self, version: str) -> int:
        """All chunks of ``version`` are here. What was computed with other weights goes: every
        unfinished sample is computed anew from its tokens; returns how many."""
        self.repack_dense()
        self.weight_version = version
        self.drop_held()
        return self.resubmit_all()

    # ---------------------------------------------------------------------- experts and memory

    def dense_tensors(self) -> list[torch.Tensor]:
        return private.dense_tensors(self._hosted, self._experts)

    def repack_dense(self) -> None:
        if private.runs_on_cpu():
            private.repack_dense(self._hosted)

    @property
    def num_layers(self) -> int:
        return self._experts.num_layers

    def expert_weights(self, layer: int, expert: int) -> list[torch.Tensor]:
        """The weights of one held expert, as views; each of the shape of one slot."""
        slot = self._slot_of[expert]
        return [w[slot] for w in self._experts.weights(layer)]

    def make_room(self, experts: tuple[int, ...]) -> None:
        """Get slots for ``experts`` that will arrive; KV blocks are given up for them.

        Raises:
            MembershipError: the KV in use leaves no room.
        """
        missing = [e for e in experts if e not in self._slot_of]
        if not missing:
            return
        num_slots = len(self._slot_of) + len(missing)
        blocks = self._blocks_beside(num_slots)
        if blocks - 1 < self._kv.used_blocks:
            raise MembershipError(
                f"worker {self.worker_id} would hold {num_slots} experts, which leaves "
                f"{max(blocks - 1, 0)} KV blocks, and {self._kv.used_blocks} are in use"
            )
        self._kv.resize(blocks)
        self._compact(num_slots)
        for expert in missing:
            self._slot_of[expert] = len(self._slot_of)
        self._place(self.placement)

    def forget_experts(self, keep: tuple[int, ...]) -> None:
        """Drop all experts but ``keep``; their memory becomes KV."""
        if set(keep) == set(self._slot_of) and len(keep) == self._experts.num_slots:
            return
        self._slot_of = {e: s for e, s in self._slot_of.items() if e in keep}
        self._compact(len(self._slot_of))
        self._place(self.placement)
        self._fit_kv()

    def _compact(self, num_slots: int) -> None:
        """Reallocate with ``num_slots``, held experts first, in their order."""
        ordered = sorted(self._slot_of.items(), key=lambda item: item[1])
        moved = {old: new for new, (_, old) in enumerate(ordered)}
        self._experts.resize(num_slots, moved)
        self._slot_of = {e: new for new, (e, _) in enumerate(ordered)}

    def _blocks_beside(self, num_slots: int) -> int:
        free = self._budget_bytes - num_slots * self._experts.expert_bytes
        return int(free // self._kv.block_bytes)

    def _fit_kv(self) -> None:
        blocks = self._blocks_beside(self._experts.num_slots)
        if blocks < 2:
            raise ConfigError(
                f"{self._budget_bytes} bytes hold {self._experts.num_slots} experts of "
                f"{self._experts.expert_bytes} bytes and no KV block of {self._kv.block_bytes}",
                field="group.kv_memory_bytes",
            )
        if blocks != self._kv.num_blocks:
            self._kv.resize(blocks)

    # ---------------------------------------------------------------------------- membership

    def enter(self, groups: GenerationGroups, placement: Placement) -> private.Coordinators:
        """Cross into another membership. Pointers only. Returns the coordinators before."""
        before = self.coordinators
        self.coordinators = private.enter_groups(self._hosted, groups)
        self.placement = placement
        self._place(placement)
        return before

    def go_back(self, coordinators: private.Coordinators, placement: Placement) -> None:
        """Undo ``enter``."""
        failed = self.coordinators
        self.coordinators = coordinators
        coordinators.activate()
        self.placement = placement
        self._place(placement)
        failed.dismantle()

    def _place(self, placement: Placement) -> None:
        rank_of = {member: rank for rank, member in enumerate(placement.members)}
        owners = [rank_of[owner] for owner in placement.owner_E]
        rank = rank_of[self.worker_id]
        owned = {e: s for e, s in self._slot_of.items() if owners[e] == rank}
        self._experts.place(owned, owners, rank, len(placement.members))

    def _warm_up(self) -> None:
        """Prefill and decode once: first use of a kernel is slow, and nobody waits for us now."""
        sampling = Sampling(max_tokens=3, temperature=1.0, ignore_eos=True)
        self.add(Sample(WARM_UP_SAMPLE, (1, 2, 3, 4), sampling, seed=0))
        while self.has_unfinished():
            self.step()
        self.step()


def _linear_placement(num_experts: int, members: tuple[WorkerId, ...]) -> Placement:
    return Placement(members, initial_owners(num_experts, members))


class _Clock:
    def __init__(self, phases_s: dict[str, float]) -> None:
        self._phases_s = phases_s
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._phases_s[phase] = now - self._last
        self._last = now
