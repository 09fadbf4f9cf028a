"""The ``flexfloor`` command. Commands parse, call and print; heavy imports wait for their turn."""

import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from actors.model_check import check_model, find_problems, read_model_config
from deploy.config import FlexFloorConfig, check_tree, load_config, read_tree
from deploy.demo.command import demo
from deploy.make_model import ModelShape, make_model
from deploy.simulation.command import simulate_command
from placement.errors import FlexFloorError

RAY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody is told that this runs
    "RAY_SERVE_LOG_TO_STDERR": "0",  # stdout and stderr are ours
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coordinator may look at GPUs
}
"""Read by Ray when it is imported; what the caller has set stays."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Elastic rollouts for RL post-training of mixture-of-experts models.",
)
app.command("demo")(demo)
app.command("simulate")(simulate_command)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="A.B=C", help="Override one setting.")
]


class Slots(StrEnum):
    """What a worker leases: a GPU (logical where the machine has none) or a CPU."""

    GPU = "gpu"
    CPU = "cpu"


@app.command()
def serve(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    model: Annotated[
        Path | None, typer.Option(help="Directory of the checkpoint (model.path).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Most workers, and those at the start (group.max_workers).")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (service.port).")] = None,
    slots: Annotated[
        Slots | None,
        typer.Option(
            help="Lease a GPU or a CPU per worker instead of lease.resources. Without a GPU in "
            "a local cluster, GPU slots are logical: they share the cores."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join; without it a local one starts and ends."),
    ] = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM; then nothing of it is left."""
    values: dict[str, Any] = {
        "model.path": None if model is None else str(model),
        "group.max_workers": workers,
        "service.port": port,
        "lease.resources": None if slots is None else {slots.upper(): 1.0},
    }
    given = {name: value for name, value in values.items() if value is not None}
    settings = load_config(config, overrides, given)
    check_model(settings)
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from deploy.serving import serve_until_signal  # noqa: PLC0415 - imports Ray

    serve_until_signal(settings, address, out=sys.stdout, say=_say)


@app.command("check-config")
def check_config(
    file: Annotated[Path, typer.Argument(help="YAML file of settings.")],
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    without_model: Annotated[
        bool, typer.Option("--without-model", help="Do not look into the model's directory.")
    ] = False,
) -> None:
    """Print the resolved tree, and everything that is wrong with it."""
    config, errors = check_tree(read_tree(file, overrides))
    found: list[FlexFloorError] = list(errors)
    if config is not None:
        tree = config.model_dump(mode="json")
        typer.echo(yaml.safe_dump(tree, sort_keys=False).rstrip())
        if not without_model:
            found += _model_problems(config)
    for error in found:
        _say(str(error))
    if found:
        raise typer.Exit(1)


def _model_problems(config: FlexFloorConfig) -> list[FlexFloorError]:
    try:
        return find_problems(read_model_config(Path(config.model.path)), config)
    except FlexFloorError as error:
        return [error]


@app.command("make-model")
def make_model_command(
    directory: Annotated[Path, typer.Argument(help="Where the checkpoint goes.")],
    layers: int = ModelShape.layers,
    hidden: int = ModelShape.hidden,
    experts: int = ModelShape.experts,
    top_k: int = ModelShape.top_k,
    expert_hidden: int = ModelShape.expert_hidden,
    heads: int = ModelShape.heads,
    kv_heads: int = ModelShape.kv_heads,
    head_dim: int = ModelShape.head_dim,
    vocab: int = ModelShape.vocab,
    max_positions: int = ModelShape.max_positions,
    seed: int = 0,
) -> None:
    """Write a tiny random mixture-of-experts checkpoint with a byte-level tokenizer."""
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        expert_hidden=expert_hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_positions=max_positions,
    )
    typer.echo(make_model(directory, seed=seed, shape=shape))


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(version("flexfloor"))
        raise typer.Exit


def _say(line: str) -> None:
    typer.echo(line, err=True)


def main(run: Callable[[], object] = app) -> None:
    """Entry point: an error of ours is one line, not a traceback."""
    try:
        run()
    except FlexFloorError as error:
        _say(f"flexfloor: {error}")
        sys.exit(1)
