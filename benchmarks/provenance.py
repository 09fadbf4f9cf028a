"""What a result was made of and on. A tree with changes is refused: no commit would name it."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
GIT_LIMIT_S = 30


def provenance() -> dict[str, Any]:
    """Raises:
    SystemExit: tracked files have changes other than results.
    """
    status = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS}")
    if status:
        raise SystemExit(f"the tree has changes; commit them first:\n{status}")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "load_average_1min": os.getloadavg()[0],
        },
    }


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True, timeout=GIT_LIMIT_S
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
