"""Removes optional companions of torch that do not import, and says what it did.

A CPU build of torch beside torchvision, torchaudio or torchcodec built for CUDA makes
``import vllm`` fail. Text-only models need none of the three, so one that is broken goes;
where they import (a CUDA machine) they stay. Runs with nothing but the standard library.
"""

import importlib.metadata
import subprocess
import sys

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
IMPORT_TIMEOUT_S = 300  # a cold import of torch on a small machine takes tens of seconds


def import_error(module: str) -> str:
    """Why ``module`` does not import ("" when it does), tried in a process of its own."""
    tried = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
        check=False,
    )
    if tried.returncode == 0:
        return ""
    lines = tried.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {tried.returncode}"


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    for companion in COMPANIONS:
        if not installed(companion):
            continue
        error = import_error(companion)
        if error:
            print(f"removing {companion}, which does not import here: {error}")
            subprocess.run(
                [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", companion],
                check=True,
                timeout=IMPORT_TIMEOUT_S,
            )
    error = import_error("vllm")
    if error:
        print(f"vllm does not import: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
