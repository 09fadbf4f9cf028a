"""``other_job.py`` as a process that a test starts and ends."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class StartedJob:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def next_line(self) -> dict[str, Any]:
        """Blocks until the job says something; the test's own timeout is the bound."""
        assert self._process.stdout is not None
        line: dict[str, Any] = json.loads(self._process.stdout.readline())
        return line


@contextmanager
def other_job(address: str, num_slots: int = 1) -> Iterator[StartedJob]:
    script = str(Path(__file__).with_name("other_job.py"))
    command = [sys.executable, script, address, str(num_slots)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield StartedJob(process)
        finally:
            process.kill()
