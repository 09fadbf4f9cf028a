"""What a journal on disk costs the coordinator, beside one in memory.

    python -m benchmarks.journal_cost OUT.json [DIRECTORY]

The same reports of workers are applied to the coordinator's records with a journal in memory and
with one in DIRECTORY (default: a temporary one), in turns, each report written and synced before
the next, as it is before a worker may forget it. So the wait of a report is what acknowledging
waits for; while it does, the group decodes on. CPU seconds are of the whole process, kernel and
writing thread included. Then a restart: how long it takes until the records are there again.

Seconds of a sync are those of this disk, and of whatever else writes to it.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from actors.accounting import LeaseLedger
from actors.admission import make_samples
from actors.backlog import Backlog
from actors.durable_journal import open_journal
from actors.journal import Journal, MemoryJournal
from actors.protocol import Tokens
from actors.rollout_api import RolloutRequest, ServedModel
from actors.settings import CoordinatorSettings
from actors.telemetry import Telemetry
from benchmarks.provenance import provenance
from benchmarks.spread import spread
from placement.ids import RolloutId, SampleId, WorkerId
from placement.samples import FinishReason, Sampling

NUM_SAMPLES = 1024
RUNNING = 64
PROMPT_TOKENS = 128
RESPONSE_TOKENS = 256
TOKENS_PER_REPORT = 8
"""Of each sample: a worker tells ten times a second what it has, and makes 80 steps in it."""
ROUNDS = 5
MAX_BYTES = 4 << 30
MODEL = ServedModel("model", 1 << 62, 1 << 62, False, ())
REQUEST = RolloutRequest(
    RolloutId("r"),
    tuple(tuple(range(n, n + PROMPT_TOKENS)) for n in range(NUM_SAMPLES)),
    1,
    (Sampling(RESPONSE_TOKENS),),
    seed=1,
)
NUM_TOKENS = NUM_SAMPLES * RESPONSE_TOKENS


def records_over(journal: Journal) -> Backlog:
    ledger = LeaseLedger(time.time())
    telemetry = Telemetry(lambda: ledger.totals(time.time()), journal.figures)
    return Backlog(CoordinatorSettings(), journal, ledger, telemetry, time.time)


async def decode(journal: Journal) -> dict[str, float]:
    """The whole rollout, ``RUNNING`` samples at a time."""
    records = records_over(journal)
    began_cpu_s, began_s = time.process_time(), time.perf_counter()
    rollout = records.accept(REQUEST, make_samples(REQUEST, MODEL))
    await records.written()
    waited_s: list[float] = []
    samples = list(rollout.records)
    for first in range(0, NUM_SAMPLES, RUNNING):
        running = samples[first : first + RUNNING]
        for sample_id in running:
            records.bind(records.record(sample_id), WorkerId(0))
        await records.until_written()
        for start in range(0, RESPONSE_TOKENS, TOKENS_PER_REPORT):
            for sample_id in running:
                records.add_tokens(report(sample_id, start))
            asked_s = time.perf_counter()
            await records.until_written()
            waited_s.append(time.perf_counter() - asked_s)
    cpu_s, took_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    assert not rollout.open
    figures = journal.figures()
    await journal.close()
    return {
        "cpu_s_per_1000_tokens": cpu_s / NUM_TOKENS * 1000,
        "tokens_per_s": NUM_TOKENS / took_s,
        "reports_per_s": len(waited_s) / took_s,
        "entries_per_s": NUM_TOKENS / TOKENS_PER_REPORT / took_s,
        "wait_of_a_report_s": sum(waited_s) / len(waited_s),
        "longest_wait_of_a_report_s": max(waited_s),
        "written_bytes_per_token": figures.written_bytes / NUM_TOKENS,
        "writes": figures.writes,
        "write_s": figures.write_s / figures.writes if figures.writes else 0.0,
    }


def report(sample_id: SampleId, start: int) -> Tokens:
    stop = start + TOKENS_PER_REPORT
    ids = tuple(100_000 + position for position in range(start, stop))
    logprobs = tuple(-position / 7 for position in range(start, stop))
    last = stop == RESPONSE_TOKENS
    return Tokens(sample_id, start, ids, logprobs, FinishReason.LENGTH if last else None)


def restart(directory: str) -> dict[str, float]:
    began_cpu_s, began_s = time.process_time(), time.perf_counter()
    journal = open_journal(directory, MODEL.path, MAX_BYTES)
    records_over(journal).replay(lambda request: make_samples(request, MODEL))
    cpu_s, took_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    figures = journal.figures()
    asyncio.run(journal.close())
    return {
        "cpu_s_per_1000_tokens": cpu_s / NUM_TOKENS * 1000,
        "tokens_per_s": NUM_TOKENS / took_s,
        "entries_per_s": figures.replayed / took_s,
    }


def spreads(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {name: spread([run[name] for run in runs]) for name in runs[0]}


def main(out: Path, place: str | None) -> None:
    made = provenance()
    in_memory, on_disk, restarts = [], [], []
    for _ in range(ROUNDS):
        in_memory.append(asyncio.run(decode(MemoryJournal())))
        with tempfile.TemporaryDirectory(dir=place) as directory:
            journal = open_journal(directory, MODEL.path, MAX_BYTES)
            on_disk.append(asyncio.run(decode(journal)))
            restarts.append(restart(directory))
    result = {
        **made,
        "samples": NUM_SAMPLES,
        "running_samples": RUNNING,
        "response_tokens": RESPONSE_TOKENS,
        "tokens_per_report_of_a_sample": TOKENS_PER_REPORT,
        "rounds": ROUNDS,
        "in_memory": spreads(in_memory),
        "on_disk": spreads(on_disk),
        "restart": spreads(restarts),
    }
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
