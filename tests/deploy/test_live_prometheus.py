"""A real Prometheus scrapes a coordinator's metrics and answers every query of the dashboard."""

import itertools
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from actors.accounting import SlotTotals
from actors.protocol import StepStats
from actors.telemetry import CHANGE_PHASES, WEIGHT_SOURCES, WORKER_STATES, Telemetry
from placement.ids import WorkerId
from placement.samples import FinishReason
from placement.views import WidthReason
from service.metrics import NATIVE, ServiceMetrics
from tests.deploy.conftest import find_tool
from tests.deploy.test_monitoring import RULES, queries_of, read_dashboard, rules

pytestmark = pytest.mark.timeout(120)

SCRAPES = 6  # a rate needs two
LIMIT_S = 60.0
POLL_S = 0.2
DECODING = StepStats(
    steps=1,
    step_s_sum=0.1,
    last_step_age_s=0.0,
    running=1,
    kv_used_tokens=1,
    kv_capacity_tokens=4,
    max_token_gap_s=0.0,
    recent_step_s=(),
)


class FakeCoordinatorMetrics(BaseHTTPRequestHandler):
    """Real telemetry of a coordinator to which everything happens again before each scrape."""

    telemetry = Telemetry(lambda: SlotTotals(*[time.monotonic()] * 3, *[int(time.monotonic())] * 3))
    service = ServiceMetrics()
    scrapes = itertools.count(1)
    num_scrapes = 0

    def do_GET(self) -> None:
        told = self.telemetry
        for reason in FinishReason:
            told.ended.labels(reason).inc()
        told.releases.labels(WidthReason.CONSOLIDATE).inc()
        told.changes.labels(WidthReason.CONSOLIDATE).inc()
        for phase in CHANGE_PHASES:
            told.phase_s.labels(phase).observe(0.2)
            told.rollbacks.labels(phase).inc()
        for counter in (told.accepted, told.restarts, told.lease_timeouts, told.prompt_tokens):
            counter.inc()
        for histogram in (told.queue_s, told.sample_s):
            histogram.observe(0.5)
        told.grew(1, 0.5, None)
        told.grew(1, None, 0.02)
        for source in WEIGHT_SOURCES:
            told.weight_update_s.labels(source).observe(1.0)
            told.weight_bytes.labels(source).inc(8)
        told.weight_hold_s.observe(0.1)
        for seconds in (self.service.request_s, self.service.first_event_s):
            seconds.labels(NATIVE).observe(0.5)
        told.lease_wait_s.observe(1.0)
        told.report(WorkerId("w0"), DECODING)
        body = told.text(list(WORKER_STATES)) + self.service.text()
        type(self).num_scrapes = next(self.scrapes)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has scraped several times."""
    program = find_tool("prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeCoordinatorMetrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "flexfloor",
                "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}],
            }
        ],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while FakeCoordinatorMetrics.num_scrapes < SCRAPES:
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(POLL_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=LIMIT_S)
        server.shutdown()
        server.server_close()
        thread.join(timeout=LIMIT_S)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ask(address: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{address}/api/v1/query", params={"query": expression}, timeout=LIMIT_S)
    assert answer.json()["status"] == "success", answer.text
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def test_every_panel_shows_something(prometheus: str) -> None:
    empty = [query for query, _ in queries_of(read_dashboard()) if not ask(prometheus, query)]
    assert empty == []


def test_every_recorded_ratio_is_there_and_no_alert_fails_to_evaluate(prometheus: str) -> None:
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    deadline = time.monotonic() + LIMIT_S
    while missing := [name for name in recorded if not ask(prometheus, name)]:
        assert time.monotonic() < deadline, missing
        time.sleep(POLL_S)
    assert ask(prometheus, "flexfloor:kv_used_tokens:ratio")[0]["value"][1] == "0.25"
    state = httpx.get(f"{prometheus}/api/v1/rules", timeout=LIMIT_S).json()["data"]["groups"]
    health = {rule["name"]: rule["health"] for group in state for rule in group["rules"]}
    assert {name for name, is_ok in health.items() if is_ok not in ("ok", "unknown")} == set()
    assert Path(state[0]["file"]).name == RULES.name
