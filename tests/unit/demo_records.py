"""Records of an invented demo, for the tests of its report: four slots, six samples."""

from dataclasses import replace

from actors.rollout_api import (
    OperationStatus,
    ReleasedSlot,
    RolloutState,
    RolloutStatus,
    RolloutUsage,
    SampleResult,
    Strategy,
    WorkerStatus,
)
from deploy.demo.records import (
    ArrivedSample,
    BorrowedSlot,
    DemoRecords,
    Machine,
    Replay,
    Snapshot,
)
from placement.ids import Generation, RolloutId, SampleId, WorkerId
from placement.membership import Phase
from placement.samples import FinishReason
from placement.views import Prediction

LENGTHS = (4, 5, 6, 8, 20, 40)
STATIC_AT, ELASTIC_AT, REGROWN_AT = 1000.0, 2000.0, 3000.0
NODE = "node-a"


def worker(worker_id: int, running: int) -> WorkerStatus:
    return WorkerStatus(
        worker_id=WorkerId(worker_id),
        state="decoding" if running else "idle",
        rank=worker_id,
        experts=(0, 1, 2, 3),
        node_id=NODE,
        slot=f"GPU:{worker_id}",
        running=running,
        kv_used_tokens=0,
        kv_capacity_tokens=1000,
        steps=0,
        leased_at=0.0,
        pid=100 + worker_id,
    )


def sample(prompt_index: int, length: int, moved: bool = False) -> SampleResult:
    return SampleResult(
        sample_id=SampleId(f"r/{prompt_index}/0"),
        prompt_index=prompt_index,
        sample_index=0,
        seed=prompt_index,
        token_ids=tuple(range(prompt_index, prompt_index + length)),
        logprobs=tuple(-0.5 / (i + 1) for i in range(length)),
        finish_reason=FinishReason.STOP,
        worker_ids=(WorkerId(0), WorkerId(1)) if moved else (WorkerId(0),),
    )


def replay(
    strategy: Strategy,
    at: float,
    usage: RolloutUsage,
    lengths: tuple[int, ...],
    operations: tuple[OperationStatus, ...] = (),
    moved: bool = False,
) -> Replay:
    samples = tuple(
        ArrivedSample(at + n, sample(i, n, moved=moved and i == len(lengths) - 1))
        for i, n in enumerate(lengths)
    )
    return Replay(
        status=RolloutStatus(
            rollout_id=RolloutId(strategy),
            state=RolloutState.FINISHED,
            strategy=strategy,
            seed=7,
            num_samples=len(lengths),
            num_ended=len(lengths),
            num_queued=0,
            num_running=0,
            response_tokens=sum(lengths),
            num_moved=int(moved),
            accepted_at=at,
            ended_at=at + usage.span_s,
            waiting_for="",
            usage=usage,
        ),
        samples=samples,
        operations=operations,
        snapshots=(
            Snapshot(at, tuple(worker(w, 1) for w in range(4))),
            Snapshot(at + 10, tuple(worker(w, int(w < 2)) for w in range(4))),
            Snapshot(at + 20, (worker(0, 1), worker(1, 1))),
        ),
    )


def change(
    at: float,
    old: tuple[int, ...],
    new: tuple[int, ...],
    experts: tuple[int, ...],
    finished_ratio: float = 0.5,
) -> OperationStatus:
    released = tuple(
        ReleasedSlot(WorkerId(w), NODE, f"GPU:{w}", decided_at=at, removed_at=at + 1.5)
        for w in old
        if w not in new
    )
    return OperationStatus(
        generation=Generation(2),
        old_members=tuple(map(WorkerId, old)),
        new_members=tuple(map(WorkerId, new)),
        reason="consolidate",
        explanation="all running samples fit",
        phase=Phase.DONE,
        error="",
        started_at=at,
        ended_at=at + 2,
        finished_ratio_at_start=finished_ratio,
        pause_s=0.05,
        first_step_s=0.1,
        gap_s=0.2,
        phases_s={"prepare": 0.4, "pause.agree": 0.01},
        moved_samples=(SampleId("r/5/0"),),
        experts_per_worker=experts,
        received_bytes=1024,
        steps_before_s=(0.1, 0.1, 0.4),
        steps_during_s=(0.2,),
        released=released,
        predicted=Prediction(45.0, 45.0, 45.0, 45.0, 60.0) if released else None,
        measured_steps=50,
        steps_error_ratio=-0.1 if released else None,
    )


def usage(span_s: float, occupied: float, freed: float, steps: int, worker_steps: int):
    return RolloutUsage(
        span_s=span_s,
        occupied_worker_s=occupied,
        freed_worker_s=freed,
        used_worker_s=freed / 2,
        not_yet_leased_worker_s=0.0,
        peak_slots=4,
        occupied_worker_steps=worker_steps,
        steps=steps,
    )


def good_records() -> DemoRecords:
    """A demo in which every promise holds."""
    operations = (
        change(ELASTIC_AT + 10, (0, 1, 2, 3), (0, 1, 2), (6, 5, 5)),
        change(ELASTIC_AT + 20, (0, 1, 2), (0,), (16,)),
    )
    return DemoRecords(
        machine=Machine("abc", 2, 8 << 30, "a CPU", "4 logical slots", {"ray": "2.60.0"}),
        trace_sha256="f00d",
        num_slots=4,
        short=False,
        static=replay(Strategy.STATIC, STATIC_AT, usage(40, 160, 0, 40, 160), LENGTHS),
        elastic=replay(
            Strategy.ELASTIC, ELASTIC_AT, usage(42, 80, 88, 40, 78), LENGTHS, operations, True
        ),
        borrowed=(
            BorrowedSlot(NODE, "GPU:3", 7, ELASTIC_AT + 13, ELASTIC_AT + 14, ELASTIC_AT + 60, 9),
            BorrowedSlot(NODE, "GPU:1", 8, ELASTIC_AT + 24, ELASTIC_AT + 25, ELASTIC_AT + 60, 5),
        ),
        regrown=replay(
            Strategy.ELASTIC, REGROWN_AT, usage(6, 24, 0, 6, 24), tuple(min(n, 6) for n in LENGTHS)
        ),
        regrown_max_tokens=6,
        regrow_operations=(change(ELASTIC_AT + 62, (0,), (0, 4, 5, 6), (4, 4, 4, 4)),),
    )


def with_sample(records: DemoRecords, index: int, result: SampleResult) -> DemoRecords:
    """The same demo, in which one sample of the elastic rollout came out differently."""
    samples = list(records.elastic.samples)
    samples[index] = replace(samples[index], result=result)
    return replace(records, elastic=replace(records.elastic, samples=tuple(samples)))
