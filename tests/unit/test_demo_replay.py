import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest

from actors.rollout_api import (
    FinishedBatch,
    Health,
    OperationStatus,
    RolloutRequest,
    RolloutStatus,
    SampleResult,
    ServedModel,
    Strategy,
    WorkerStatus,
)
from deploy.demo.borrowing import borrowed_slots
from deploy.demo.replay import Observation, RolloutClient
from deploy.demo.trace import load_trace
from deploy.demo.workload import PROMPT_TOKENS, Workload, kv_memory_bytes
from placement.errors import OverloadedError, UnavailableError, UnknownIdError
from placement.ids import RolloutId, SampleId
from placement.samples import FinishReason
from service.app import create_app
from service.settings import ServiceSettings
from tests.unit.demo_records import change, good_records, worker

WORKLOAD = Workload(load_trace().first(2, 2).scaled(8), 8, vocab_size=512)
AT = 1000.0


@dataclass
class FakeCoordinator:
    """Answers every sample at once, in two batches; ``refuses`` makes it full."""

    refuses: bool = False
    ends: bool = True
    requests: list[RolloutRequest] = field(default_factory=list)
    changes: tuple[OperationStatus, ...] = (
        change(AT - 5, (0,), (0, 1), (8, 8)),
        change(AT + 1, (0, 1), (0,), (16,)),
    )

    async def served_model(self) -> ServedModel:
        return ServedModel("model", 512, 4096, exact=True, eos_token_ids=(2,))

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        if self.refuses:
            raise OverloadedError("64 samples are open, at most 64; try again later")
        self.requests.append(request)
        return await self.status(request.rollout_id)

    async def status(self, rollout_id: RolloutId) -> RolloutStatus:
        if not self.requests:
            raise UnknownIdError(f"no rollout {rollout_id}")
        request = self.requests[-1]
        return replace(
            good_records().elastic.status,
            rollout_id=rollout_id,
            accepted_at=AT,
            num_samples=len(request.prompts) * request.num_samples,
        )

    async def results(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> FinishedBatch:
        if not self.ends:
            await asyncio.sleep(wait_s)
            return FinishedBatch((), cursor, done=False)
        rows = self.requests[-1].replay_stop_tokens
        assert rows is not None
        ended = [
            SampleResult(
                SampleId(f"{rollout_id}/{p}/{s}"), p, s, 1, (5,) * n, (-0.1,) * n, FinishReason.STOP
            )
            for p, row in enumerate(rows)
            for s, n in enumerate(row)
        ][cursor : cursor + 3]
        return FinishedBatch(tuple(ended), cursor + len(ended), done=len(ended) < 3)

    async def abort(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> FinishedBatch:
        return FinishedBatch((), 0, done=True)

    async def workers(self) -> list[WorkerStatus]:
        return [worker(0, 1), worker(1, 0)]

    async def operations(self) -> list[OperationStatus]:
        return list(self.changes)

    async def health(self) -> Health:
        return Health(True, "", 0.0, 2, 2)

    async def metrics_text(self) -> bytes:
        return b""

    async def shutdown(self) -> None:
        return


@asynccontextmanager
async def client_of(coordinator: FakeCoordinator) -> AsyncIterator[RolloutClient]:
    settings = ServiceSettings(poll_wait_s=0.05)
    transport = httpx.ASGITransport(app=create_app(coordinator, settings, tokenizer=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        yield RolloutClient(http)


def unseen(_: Observation) -> None:
    """A watcher that looks away."""


async def replay_with(coordinator: FakeCoordinator, timeout_s: float = 10):
    async with client_of(coordinator) as client:
        body = WORKLOAD.body("demo-static", Strategy.STATIC)
        return await client.replay(body, timeout_s, unseen)


def test_a_replay_brings_back_every_sample_and_only_the_changes_of_its_own_time() -> None:
    coordinator = FakeCoordinator()
    replay = asyncio.run(replay_with(coordinator))
    assert len(replay.samples) == WORKLOAD.num_samples
    assert [op.started_at for op in replay.operations] == [AT + 1]
    assert coordinator.requests[0].strategy is Strategy.STATIC


def test_the_service_accepts_the_workload_as_it_is_meant() -> None:
    coordinator = FakeCoordinator()
    asyncio.run(replay_with(coordinator))
    request = coordinator.requests[0]
    assert request.replay_stop_tokens == WORKLOAD.trace.lengths_tokens
    assert {len(prompt) for prompt in request.prompts} == {PROMPT_TOKENS}
    samplings = [s for row in request.sample_samplings or () for s in row]
    assert all(s.ignore_eos and s.max_tokens == 8 for s in samplings)


def test_one_sample_in_four_is_drawn_and_both_strategies_ask_for_the_same() -> None:
    full = Workload(load_trace().scaled(512), 512, vocab_size=512)
    static = full.body("a", Strategy.STATIC)
    elastic = full.body("b", Strategy.ELASTIC)
    temperatures = [s["temperature"] for row in static["sample_samplings"] for s in row]
    assert (temperatures.count(1.0), temperatures.count(0.0)) == (16, 48)
    different = {key for key in static if static[key] != elastic[key]}
    assert different == {"id", "strategy"}


def test_a_service_that_refuses_is_quoted() -> None:
    with pytest.raises(UnavailableError, match=r"429.*at most 64"):
        asyncio.run(replay_with(FakeCoordinator(refuses=True)))


def test_a_rollout_that_does_not_end_is_given_up_at_its_bound() -> None:
    with pytest.raises(UnavailableError, match="0 ended samples after"):
        asyncio.run(replay_with(FakeCoordinator(ends=False), timeout_s=0.3))


def test_waiting_for_more_workers_than_come_names_those_that_are_there() -> None:
    async def wait() -> None:
        async with client_of(FakeCoordinator()) as client:
            await client.wait_for_workers(2, 1, unseen)
            await client.wait_for_workers(3, 0, unseen)

    with pytest.raises(UnavailableError, match=r"2 of 3 workers .*GPU:1 idle"):
        asyncio.run(wait())


def test_a_worker_that_will_hold_all_experts_keeps_kv_for_its_samples() -> None:
    config = {
        "num_hidden_layers": 2,
        "num_experts": 16,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
    }
    expert_bytes = 3 * 256 * 128 * 2 * 2
    left_bytes = kv_memory_bytes(config, 4, 16, 576) - 12 * expert_bytes
    token_bytes = 2 * 4 * 32 * 2 * 2
    assert left_bytes // token_bytes >= 16 * 576 + 128


def test_a_borrowed_slot_becomes_a_record_only_when_it_was_returned() -> None:
    held = {"node_id": "n", "pid": 1, "started_at": 1.0}
    events = [
        {"event": "waiting", "slots": 2},
        {"event": "borrowed", "slot": "GPU:1", **held},
        {"event": "borrowed", "slot": "GPU:2", **held},
        {"event": "worked", "slot": "GPU:1", "first_chunk_at": 2.0},
        {"event": "returned", "slot": "GPU:1", "returned_at": 3.0, "chunks": 4},
    ]
    (record,) = borrowed_slots(events)
    assert (record.slot, record.first_chunk_at, record.chunks) == ("GPU:1", 2.0, 4)
