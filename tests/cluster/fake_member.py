"""A member without an engine, for tests of what carries it."""

import os
import threading
import time

import numpy as np

from actors.protocol import (
    BuildReport,
    Evicted,
    FinalizeReport,
    ModelFacts,
    PrepareReport,
    StepStats,
    Switched,
    Tokens,
    WorkerEvent,
    WorkerReport,
    WorkerSpec,
)
from actors.sample_kv import KvBySample, SampleKv
from placement.errors import ConfigError, ExpertChecksumError
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import FinishReason, Sample

STEP_S = 0.01

FACTS = ModelFacts(
    num_layers=2,
    num_experts=4,
    vocab_size=512,
    max_model_len=128,
    eos_token_ids=(0,),
    expert_bytes=1024,
    kv_block_bytes=1024,
    kv_block_tokens=16,
    dense_bytes=4096,
)


class FakeMember:
    """Decodes without a model: one token of every sample each ``STEP_S``, from its start on.

    What goes wrong follows from the spec's model: "refused" fails its build with an error of
    ours, "bug" with one that is not; ``prepare`` of generation 13 finds a damaged expert.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._me = spec.worker_id
        self._model = spec.model
        self._running: dict[SampleId, Sample] = {}
        self._events: list[WorkerEvent] = []
        self._change: GroupChange | None = None
        self._steps = 0
        self._held = False
        self._copied_bytes = 0
        """Ones in the KV that came with samples."""
        self._changed = threading.Condition()
        self._decoding = threading.Thread(target=self._decode, daemon=True)

    def build(self) -> BuildReport:
        if self._model == "refused":
            raise ConfigError("512 is more than 128; lower it", field="model.max_model_len")
        if self._model == "bug":
            raise ZeroDivisionError("a bug in the engine")
        names = ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "CUDA_VISIBLE_DEVICES")
        environment = {name: os.environ.get(name, "") for name in names}
        return BuildReport(self._me, FACTS, 1024, {"engine": 0.0}, environment)

    def start(self) -> None:
        self._decoding.start()

    def submit(self, samples: list[Sample], kv: KvBySample | None = None) -> None:
        with self._changed:
            self._copied_bytes += sum(int(one.layers[0].sum()) for one in (kv or {}).values())
            self._running |= {sample.sample_id: sample for sample in samples}

    def hold(self) -> None:
        with self._changed:
            self._held = True

    def unhold(self) -> None:
        with self._changed:
            self._held = False

    def cancel(self, sample_ids: list[SampleId], keep_kv: bool = False) -> None:
        with self._changed:
            self._evict([sample_id for sample_id in sample_ids if sample_id in self._running])

    def fetch_kv(self, sample_ids: list[SampleId]) -> dict[SampleId, SampleKv]:
        """A megabyte of ones for each sample that does not run here."""
        there = [sample_id for sample_id in sample_ids if sample_id not in self._running]
        layer = np.ones((4, 1 << 18), dtype=np.uint8)
        return {sample_id: SampleKv(3, b"", (("layer", "u8"),), (layer,)) for sample_id in there}

    def collect(self, acknowledged: int, wait_s: float) -> WorkerReport:
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > acknowledged, wait_s)
            events = tuple(self._events[acknowledged:])
            stats = StepStats(
                *(self._steps, 0.0, 0.0, len(self._running), 0, 1024, 0.0, ()),
                copied_kv_bytes=self._copied_bytes,
            )
            return WorkerReport(self._me, len(self._events), events, stats)

    def prepare(self, change: GroupChange) -> PrepareReport:
        if change.generation == 13:
            raise ExpertChecksumError("expert 3 of layer 1 arrived damaged; try again")
        self._change = change
        return PrepareReport(self._me, change.experts_of(self._me), 2048, {"experts": 0.0}, 512)

    def discard(self, generation: Generation) -> None:
        self._change = None

    def switch(self, generation: Generation) -> None:
        assert self._change is not None
        with self._changed:
            if self._me in self._change.leavers:
                self._evict(list(self._running))
            self._events.append(Switched(generation, 0.001, 0.001, {}))
            self._changed.notify_all()
        if self._me in self._change.joiners:
            self._decoding.start()

    def finalize(self, generation: Generation) -> FinalizeReport:
        return FinalizeReport(self._me, {}, 512)

    def rollback(self, generation: Generation) -> None:
        self._change = None

    def leave(self) -> None:
        pass

    def _evict(self, sample_ids: list[SampleId]) -> None:
        for sample_id in sample_ids:
            del self._running[sample_id]
            self._events.append(Evicted(sample_id))
        self._changed.notify_all()

    def _decode(self) -> None:
        while True:
            time.sleep(STEP_S)
            with self._changed:
                decoding = [] if self._held else list(self._running.values())
                self._steps += bool(decoding)
                for sample in decoding:
                    self._step(sample)
                self._changed.notify_all()

    def _step(self, sample: Sample) -> None:
        """The token is its own position in the response."""
        position = len(sample.generated_ids)
        ended = position + 1 >= sample.sampling.max_tokens
        reason = FinishReason.LENGTH if ended else None
        self._events.append(Tokens(sample.sample_id, position, (position,), (-0.5,), reason))
        if ended:
            del self._running[sample.sample_id]
        else:
            grown = sample.continued((*sample.generated_ids, position))
            self._running[sample.sample_id] = grown


def make_spec(worker_id: int, model: str = "fake") -> WorkerSpec:
    return WorkerSpec(
        worker_id=WorkerId(worker_id),
        members=(WorkerId(worker_id),),
        generation=Generation(0),
        joiner=False,
        store_address=("192.0.2.1", 1),
        model=model,
        engine_args={},
        kv_memory_bytes=1 << 20,
        exact=True,
        max_samples=4,
    )
