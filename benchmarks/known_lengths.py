"""How far the steps that releases are predicted to leave are from those that came, when lengths are
known: the demo on real workers with an oracle in the place of the predictor.

    python -m benchmarks.known_lengths OUT.json

What is left is the planner's own error: what it makes of samples that wait, pause and move. With
predicted lengths the same releases are held to a quarter (``deploy.demo.promises``).
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from deploy.demo.command import RAY_ENVIRONMENT
from deploy.report.written import write_json

COMMANDS = {
    "short": "flexfloor demo --short --known-lengths",
    "full": "flexfloor demo --known-lengths",
}


def _releases(report: Any) -> list[dict[str, Any]]:
    return [
        {
            "workers_from": change.workers_from,
            "workers_to": change.workers_to,
            "ended_before_ratio": change.finished_ratio_at_start,
            "moved_samples": change.moved_samples,
            "predicted_steps": change.predicted_steps,
            "measured_steps": change.measured_steps,
            "error_ratio": change.steps_error_ratio,
        }
        for change in report.reconfigurations
        if change.predicted_steps is not None
    ]


def measure(out_dir: Path) -> dict[str, Any]:
    """Both demos, one after the other."""
    from deploy.demo.run import run_demo  # noqa: PLC0415 - Ray reads its environment at import

    made_of = provenance()  # refuses before anything is measured
    runs = {}
    for name, command in COMMANDS.items():
        report = run_demo(None, out_dir, name == "short", known_lengths=True)
        releases = _releases(report)
        runs[name] = {
            "command": command,
            "oracle": report.oracle,
            "slots": report.machine.accelerators,
            "versions": report.machine.versions,
            "broken_promises": report.broken_promises,
            "static_steps": report.static.steps,
            "elastic_steps": report.elastic.steps,
            "worker_step_ratio": report.worker_step_ratio,
            "releases": releases,
            "largest_error_ratio": max(abs(r["error_ratio"]) for r in releases),
        }
    return {**made_of, "runs": runs}


def main() -> None:
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        write_json(measure(Path(folder)), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
