"""The demo from its start to its end: set the stage, perform, judge, show."""

import asyncio
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from deploy.demo.acts import perform
from deploy.demo.plan import NUM_SLOTS
from deploy.demo.preparation import configure, prepare
from deploy.demo.progress import Progress
from deploy.demo.promises import judge
from deploy.demo.report import DemoReport
from deploy.demo.stage import set_stage
from deploy.demo.summary import print_summary
from deploy.demo.timeline import timelines_of
from deploy.report.picture import draw
from deploy.report.written import write_json

PICTURE_NAME, TIMELINE_NAME = "demo.png", "demo_timeline.json"
BORROWER_LOG_NAME = "borrower.log"
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
    prepared = prepare(out_dir, short)
    with Progress(console) as progress:
        progress.phase(f"starting Ray, {NUM_SLOTS} workers and the HTTP service")
        config = configure(prepared, known_lengths=known_lengths)
        with set_stage(config, progress.say) as stage:
            progress.say(f"slots: {stage.slots}; service: {stage.url}")
            borrower_log = out_dir / BORROWER_LOG_NAME
            records = asyncio.run(
                perform(stage, prepared.plan, prepared.workload, borrower_log, progress)
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
