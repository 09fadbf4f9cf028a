"""A member without an engine, for tests of what carries it."""

import os
import threading
import time

from actors.protocol import (
    BuildReport,
    FinalizeReport,
    ModelFacts,
    PrepareReport,
    StepStats,
    WorkerReport,
    WorkerSpec,
)
from placement.errors import ConfigError, ExpertChecksumError
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange
from placement.samples import Sample

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
    """Answers at once, except ``collect``, which waits as it is told.

    What it is asked to do follows from the spec's model: "refused" fails its build with an
    error of ours, "bug" with one that is not; ``prepare`` of generation 13 finds a damaged
    expert.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._submitted: list[Sample] = []
        self._arrived = threading.Condition()

    def build(self) -> BuildReport:
        if self._spec.model == "refused":
            raise ConfigError("512 is more than 128; lower it", field="model.max_model_len")
        if self._spec.model == "bug":
            raise ZeroDivisionError("a bug in the engine")
        names = ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "CUDA_VISIBLE_DEVICES")
        environment = {name: os.environ.get(name, "") for name in names}
        return BuildReport(self._spec.worker_id, FACTS, 1024, {"engine": 0.0}, environment)

    def start(self) -> None:
        pass

    def submit(self, samples: list[Sample]) -> None:
        with self._arrived:
            self._submitted += samples
            self._arrived.notify_all()

    def cancel(self, sample_ids: list[SampleId]) -> None:
        with self._arrived:
            self._submitted = [s for s in self._submitted if s.sample_id not in sample_ids]

    def collect(self, acknowledged: int, wait_s: float) -> WorkerReport:
        deadline_s = time.monotonic() + wait_s
        with self._arrived:
            while len(self._submitted) <= acknowledged:
                if not self._arrived.wait(deadline_s - time.monotonic()):
                    break
            stats = StepStats(0, 0.0, 0.0, len(self._submitted), 0, 1024, 0.0, ())
            return WorkerReport(self._spec.worker_id, len(self._submitted), (), stats)

    def prepare(self, change: GroupChange) -> PrepareReport:
        if change.generation == 13:
            raise ExpertChecksumError("expert 3 of layer 1 arrived damaged; try again")
        return PrepareReport(self._spec.worker_id, (0, 1), 2048, {"experts": 0.0}, 512)

    def discard(self, generation: Generation) -> None:
        pass

    def switch(self, generation: Generation) -> None:
        pass

    def finalize(self, generation: Generation) -> FinalizeReport:
        return FinalizeReport(self._spec.worker_id, {}, 512)

    def rollback(self, generation: Generation) -> None:
        pass

    def leave(self) -> None:
        pass


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
