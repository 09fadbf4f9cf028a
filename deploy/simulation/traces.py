"""The recorded lengths that scenarios replay. Source and licences: ``benchmarks/traces``.

The files are part of a checkout, not of a wheel, and are checked against their sha256.
"""

import csv
import gzip
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from placement.errors import ConfigError
from placement.simulate.workload import RecordedPrompt

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
GROUPS = "epoch_gpqa_groups.csv.gz"
PRODUCTION = "servegen_deepseek_r1.csv.gz"
SHA256: Mapping[str, str] = {
    GROUPS: "45ce573cb24a9eee0e3404be9c420ee535f95957aa18cec8eeb2cd70404f9417",
    PRODUCTION: "27e3845e068dc69a08b06465889ef7b9ce389ea847b3254e36963ec68d1fbef7",
}


def read_groups(run: int, history_run: int | None) -> tuple[RecordedPrompt, ...]:
    """The prompts of a run with all its responses, and those of another run to each of them.

    Raises:
        ConfigError: there is no such run.
    """
    runs = _read_runs()
    for wanted in (run, history_run):
        if wanted is not None and wanted not in runs:
            raise ConfigError(f"is {wanted}; {GROUPS} has {sorted(runs)}", field="trace.run")
    past = runs[history_run] if history_run is not None else {}
    return tuple(
        RecordedPrompt(tokens, tuple(lengths), tuple(past[prompt][1]) if prompt in past else ())
        for prompt, (tokens, lengths) in runs[run].items()
    )


@lru_cache(maxsize=1)
def _read_runs() -> Mapping[int, Mapping[int, tuple[int, list[int]]]]:
    """Per run and prompt: the prompt's tokens (as its first response says) and all lengths."""
    runs: dict[int, dict[int, tuple[int, list[int]]]] = defaultdict(dict)
    for row in _read(GROUPS):
        run, prompt = int(row["run"]), int(row["prompt_id"])
        group = runs[run].setdefault(prompt, (int(row["prompt_tokens"]), []))
        group[1].append(max(1, int(row["response_tokens"])))
    return runs


def read_production() -> tuple[RecordedPrompt, ...]:
    """Requests of a production service: one response to each prompt, no history."""
    return tuple(
        RecordedPrompt(int(row["prompt_tokens"]), (max(1, int(row["response_tokens"])),), ())
        for row in _read(PRODUCTION)
    )


def _read(name: str) -> list[dict[str, str]]:
    path = TRACES / name
    if not path.is_file():
        raise ConfigError(
            f"no trace at {path}; simulate from a checkout, which has benchmarks/traces",
            field="trace",
        )
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ConfigError(
            f"{name} has sha256 {found}, expected {SHA256[name]}; restore the file", field="trace"
        )
    return list(csv.DictReader(gzip.decompress(content).decode().splitlines()))
