"""The trainer's side of a weights group, as a process of its own: broadcasts what lies in a file.

``python -m tests.unit.trainer <port> <file> [die-after]``: rank 0 of a group of two; ``die-after``
tensors it ends without a farewell.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file

from actors.control_api import WeightsGroup
from actors.weights_group import TRAINER_RANK, JoinedGroup

ROOT = Path(__file__).parents[2]


def group_at(port: int, name: str = "weights") -> WeightsGroup:
    return WeightsGroup(name, "127.0.0.1", port, rank_offset=1, world_size=2, backend="gloo")


@contextmanager
def broadcasting(port: int, file: Path, die_after: int | None = None) -> Iterator[None]:
    """The process, from its start to its end; it must end well unless it is to die."""
    words = [str(port), str(file), *([str(die_after)] if die_after is not None else [])]
    process = subprocess.Popen([sys.executable, "-m", "tests.unit.trainer", *words], cwd=ROOT)
    try:
        yield
        assert process.wait(30) == (0 if die_after is None else 3)
    finally:
        process.kill()
        process.wait(10)


def main() -> None:
    port, file = int(sys.argv[1]), sys.argv[2]
    die_after = int(sys.argv[3]) if len(sys.argv) > 3 else None
    group = JoinedGroup(group_at(port), TRAINER_RANK, timeout_s=30)
    for sent, (_, tensor) in enumerate(sorted(load_file(file).items())):
        if sent == die_after:
            os._exit(3)
        group.broadcast(tensor)
    group.close()


if __name__ == "__main__":
    main()
