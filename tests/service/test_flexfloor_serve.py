"""``flexfloor serve`` as a process: one line when it is ready, nothing left when it has ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.config import FlexFloorConfig
from deploy.make_model import make_model
from tests.service.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 240.0
END_LIMIT_S = 60.0
POLL_S = 0.1

pytestmark = pytest.mark.timeout(400)


class ServerProcess:
    """A server that was started, with everything that it has started itself."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self._stdout, self._stderr = directory / "stdout", directory / "stderr"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *command],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
                stdout=stdout,
                stderr=stderr,
            )
        self.descendants: list[psutil.Process] = []

    @property
    def lines(self) -> list[str]:
        return self._stdout.read_text().splitlines()

    @property
    def told(self) -> str:
        return self._stderr.read_text()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self.lines:
            assert self.process.poll() is None, self.told
            assert time.monotonic() < deadline, self.told
            time.sleep(POLL_S)
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: signal.Signals) -> int:
        """Send one signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=END_LIMIT_S)

    def kill_all(self) -> None:
        """For a test that failed halfway."""
        if self.process.poll() is None:
            self.descendants = psutil.Process(self.process.pid).children(recursive=True)
        for process in self.descendants:
            if process.is_running():  # false also if its pid belongs to another one now
                process.kill()
        self.process.kill()
        self.process.wait(timeout=END_LIMIT_S)


def nobody_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_leaves_nothing_running_or_listening(
    number: signal.Signals, config: FlexFloorConfig, tmp_path: Path
) -> None:
    port = free_port()
    program = ["-m", "tests.service.hosted_fake_coordinator"]
    server = ServerProcess(
        [*program, config.model.path, str(port), f"test-{number.name.lower()}"], tmp_path
    )
    try:
        server.wait_until_ready()
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=END_LIMIT_S)
        assert answer.status_code == 200
        assert server.stop(number) == 0, server.told
        assert len(server.lines) == 1
        assert f"http://127.0.0.1:{port}" in server.lines[0]
        assert "failed" not in server.told, server.told
        assert "INFO" not in server.told, server.told
        _, alive = psutil.wait_procs(server.descendants, timeout=END_LIMIT_S)
        assert alive == []
        assert nobody_listens(port)
    finally:
        server.kill_all()


@pytest.mark.long
def test_the_command_decodes_and_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    model = make_model(tmp_path / "model")
    command = ["-c", "from deploy.cli import main; main()", "serve", "--model", str(model)]
    server = ServerProcess([*command, "--workers", "1", "--port", str(port)], tmp_path)
    try:
        server.wait_until_ready()
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/rollouts",
            json={"prompts": ["hello"], "n": 2, "sampling": {"max_tokens": 8, "ignore_eos": True}},
            timeout=END_LIMIT_S,
        )
        assert [len(sample["token_ids"]) for sample in answer.json()["samples"]] == [8, 8]
        assert server.stop(signal.SIGTERM) == 0, server.told
        _, alive = psutil.wait_procs(server.descendants, timeout=END_LIMIT_S)
        assert alive == []
        assert nobody_listens(port)
    finally:
        server.kill_all()
