"""``flexfloor demo``: the command line of the demo."""

import os
from pathlib import Path
from typing import Annotated

import typer

RAY_ENVIRONMENT = {
    # A cluster of this machine that lives for minutes; its second driver finds no token.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Read by Ray when it is imported; what the caller has set stays."""


def demo(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON to this file.")
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="A few short samples, about two minutes.")
    ] = False,
    known_lengths: Annotated[
        bool,
        typer.Option(
            "--known-lengths", help="Show the planner the replayed lengths: an oracle to compare."
        ),
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Where picture, model and logs go.")] = Path(
        "out"
    ),
) -> None:
    """Replay a recorded batch with a fixed group and with one that gives workers back.

    Ends by itself; exits with 1 when a promise does not hold, and names it.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from deploy.demo.run import run_demo  # noqa: PLC0415 - Ray reads its environment at import

    if run_demo(json_path, out, short, known_lengths=known_lengths).broken_promises:
        raise typer.Exit(1)
