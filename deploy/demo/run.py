"""The demo from its start to its end: set the stage, perform, judge, show."""

import asyncio
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from actors.length_history import write_length_history
from actors.settings import GroupSettings, ModelSettings, PlanningSettings
from deploy.config import FlexFloorConfig
from deploy.demo.acts import perform
from deploy.demo.machine import gpu_names
from deploy.demo.plan import NUM_SLOTS, DemoPlan, plan_demo
from deploy.demo.progress import Progress
from deploy.demo.promises import judge
from deploy.demo.report import DemoReport
from deploy.demo.stage import free_port, set_stage
from deploy.demo.summary import print_summary
from deploy.demo.timeline import timelines_of
from deploy.demo.trace import PAST_PATH, PAST_SHA256, load_trace
from deploy.demo.workload import Workload, kv_memory_bytes, read_model_config
from deploy.make_model import make_model
from deploy.report.picture import draw
from deploy.report.written import write_json
from service.settings import ServiceSettings

PICTURE_NAME, TIMELINE_NAME = "demo.png", "demo_timeline.json"
MODEL_NAME, BORROWER_LOG_NAME = "model", "borrower.log"
HISTORY_NAME = "length_history.json"
REPLAN_STEPS = 8
"""The demo's responses are a hundred times shorter than what they stand for."""
PLAIN_WIDTH = 110


def run_demo(
    json_path: Path | None,
    out_dir: Path,
    short: bool,
    console: Console | None = None,
    *,
    known_lengths: bool = False,
) -> DemoReport:
    """Run it, write picture and JSON, print the summary. Everything that it started has ended
    when it returns or raises, Ctrl-C included.

    Args:
        known_lengths: the planner is shown the replayed lengths.

    Raises:
        ConfigError: the checkout lacks the trace, or has another one.
        UnavailableError: a part did not start, or did not answer within its bound.
    """
    console = console or make_console()
    plan = plan_demo(load_trace(), load_trace(PAST_PATH, PAST_SHA256), short)
    out_dir.mkdir(parents=True, exist_ok=True)
    model_dir = out_dir / MODEL_NAME
    if not (model_dir / "config.json").is_file():
        make_model(model_dir)
    workload = _workload(plan, model_dir)
    history_path = out_dir / HISTORY_NAME
    write_length_history(history_path, workload.length_history(plan.past))
    with Progress(console) as progress:
        progress.phase(f"starting Ray, {NUM_SLOTS} workers and the HTTP service")
        config = _config(plan, workload, model_dir, history_path, known_lengths)
        with set_stage(config, progress.say) as stage:
            progress.say(f"slots: {stage.slots}; service: {stage.url}")
            records = asyncio.run(
                perform(stage, plan, workload, out_dir / BORROWER_LOG_NAME, progress)
            )
            progress.phase("shutting everything down")
    report = judge(replace(records, known_lengths=known_lengths))
    timelines = timelines_of(records)
    draw(timelines, out_dir / PICTURE_NAME)
    write_json(timelines.to_json(), out_dir / TIMELINE_NAME)
    if json_path is not None:
        write_json(report.to_json(), json_path)
    print_summary(report, console)
    console.print(f"picture: {out_dir / PICTURE_NAME}, its numbers: {out_dir / TIMELINE_NAME}")
    return report


def make_console() -> Console:
    """As wide as the terminal; in a file, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def _workload(plan: DemoPlan, model_dir: Path) -> Workload:
    vocab_size = int(read_model_config(model_dir)["vocab_size"])
    return Workload(plan.trace, plan.max_tokens, vocab_size)


def _config(
    plan: DemoPlan, workload: Workload, model_dir: Path, history_path: Path, known_lengths: bool
) -> FlexFloorConfig:
    gpus = gpu_names()
    kv_bytes = kv_memory_bytes(
        read_model_config(model_dir),
        NUM_SLOTS,
        plan.max_samples_per_worker,
        workload.max_sample_tokens,
    )
    return FlexFloorConfig(
        model=ModelSettings(
            path=str(model_dir.resolve()),
            max_model_len=workload.max_sample_tokens,
            exact=not gpus,  # no CUDA kernels are proven to keep its promise
        ),
        group=GroupSettings(
            max_workers=NUM_SLOTS,
            max_samples_per_worker=plan.max_samples_per_worker,
            kv_memory_bytes=kv_bytes,
            # After the last sample the group wants its slots back, as soon as they are free.
            idle_workers="all",
        ),
        planning=PlanningSettings(
            policy="planner",
            replan_steps=REPLAN_STEPS,
            length_history=str(history_path.resolve()),
            known_lengths=known_lengths,
        ),
        service=ServiceSettings(port=free_port()),
        namespace="flexfloor-demo",
    )
