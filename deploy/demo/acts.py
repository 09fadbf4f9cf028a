"""The demo's acts in their order, between the start of the stage and its end.

static rollout -> another job asks for slots -> elastic rollout -> the slots come back -> the
group grows again, and decodes the same samples once more, cut short.
"""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import httpx

from actors.rollout_api import Strategy
from deploy.demo.borrowing import Borrowing
from deploy.demo.machine import describe_machine
from deploy.demo.plan import NUM_SLOTS, DemoPlan
from deploy.demo.progress import Progress
from deploy.demo.records import DemoRecords
from deploy.demo.replay import RolloutClient
from deploy.demo.stage import Stage
from deploy.demo.workload import Workload
from placement.errors import UnavailableError

BORROWER_TIMEOUT_S = 60.0
"""For the other job's driver to connect and ask for its slots."""

HTTP_TIMEOUT_S = 30.0
"""Of a poll; a rollout's own request has what is left of the plan's limit."""


async def perform(
    stage: Stage, plan: DemoPlan, workload: Workload, borrower_log: Path, progress: Progress
) -> DemoRecords:
    """All acts.

    Raises:
        UnavailableError: one did not end within the plan's limit, or the service failed.
    """
    try:
        async with (
            asyncio.timeout(plan.limit_s),
            httpx.AsyncClient(base_url=stage.url, timeout=HTTP_TIMEOUT_S, trust_env=False) as http,
        ):
            acts = _Acts(RolloutClient(http), plan, workload, progress)
            records = await acts.static_then_elastic(stage, borrower_log)
            if plan.regrown_max_tokens is None:
                return records
            return await acts.regrown(records, plan.regrown_max_tokens)
    except TimeoutError as error:
        raise UnavailableError(
            f"the demo did not end within {plan.limit_s:.0f} s, in: {progress.current_phase}"
        ) from error


class _Acts:
    def __init__(
        self, client: RolloutClient, plan: DemoPlan, workload: Workload, progress: Progress
    ) -> None:
        self._client = client
        self._workload = workload
        self._progress = progress
        self._deadline_s = time.monotonic() + plan.limit_s

    async def static_then_elastic(self, stage: Stage, borrower_log: Path) -> DemoRecords:
        """Both begin with all workers warm; the other job asks for slots after the first."""
        client, progress = self._client, self._progress
        progress.phase(f"waiting for {NUM_SLOTS} workers")
        await client.wait_for_workers(NUM_SLOTS, self._left_s(), progress.observe)
        progress.phase("static rollout")
        static = await client.replay(
            self._workload.body("demo-static", Strategy.STATIC), self._left_s(), progress.observe
        )
        await client.wait_for_workers(NUM_SLOTS, self._left_s(), progress.observe)
        with Borrowing(stage.address, NUM_SLOTS - 1, borrower_log, self._left_s()) as borrowing:
            await asyncio.to_thread(borrowing.wait_until_waiting, BORROWER_TIMEOUT_S)
            progress.phase("elastic rollout, another job waits for slots")
            elastic = await client.replay(
                self._workload.body("demo-elastic", Strategy.ELASTIC),
                self._left_s(),
                progress.observe,
            )
            progress.phase("the other job returns its slots")
            borrowed = await asyncio.to_thread(borrowing.stop)
        return DemoRecords(
            machine=describe_machine(stage.slots),
            trace_sha256=self._workload.trace.sha256,
            num_slots=NUM_SLOTS,
            short=True,
            exact=stage.exact,
            static=static,
            elastic=elastic,
            borrowed=borrowed,
        )

    async def regrown(self, records: DemoRecords, max_tokens: int) -> DemoRecords:
        """The full demo's last act: the group grows back and gives the same answers."""
        client, progress = self._client, self._progress
        progress.phase(f"the group grows back to {NUM_SLOTS} workers")
        await client.wait_for_workers(NUM_SLOTS, self._left_s(), progress.observe)
        shorter = replace(
            self._workload, trace=self._workload.trace.capped(max_tokens), max_tokens=max_tokens
        )
        progress.phase(f"elastic rollout of the same samples, at most {max_tokens} tokens each")
        regrown = await client.replay(
            shorter.body("demo-regrown", Strategy.ELASTIC), self._left_s(), progress.observe
        )
        seen = {operation.generation for operation in records.elastic.operations}
        return replace(
            records,
            short=False,
            regrown=regrown,
            regrown_max_tokens=max_tokens,
            regrow_operations=tuple(
                operation
                for operation in await client.operations()
                if operation.started_at > records.elastic.started_at
                and operation.started_at < regrown.started_at
                and operation.generation not in seen
            ),
        )

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()
