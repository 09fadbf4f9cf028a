"""Helm behind one fixture, tools that may not be there, and the schemas of what is rendered."""

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "flexfloor"
TOOL_LIMIT_S = 60

Objects = list[dict[str, Any]]
Render = Callable[..., Objects]
RunTool = Callable[..., str]


@pytest.fixture(scope="session")
def helm() -> Any:
    """Helm's own library; nothing else here knows that package."""
    return pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")


@pytest.fixture(scope="session")
def render_files(helm: Any) -> Callable[..., dict[str, str]]:
    """``render_files(values, name=...)``: template name -> text, as ``helm template`` gives it."""
    chart = helm.Chart.load(CHART)

    def rendered(values: dict[str, Any] | None = None, name: str = "rl") -> dict[str, str]:
        texts = chart.render(values or {}, name=name, namespace="train")
        return {Path(path).name: text for path, text in texts.items()}

    return rendered


@pytest.fixture(scope="session")
def render(render_files: Callable[..., dict[str, str]]) -> Render:
    """``render(values, name=...)``: the objects."""

    def objects(values: dict[str, Any] | None = None, name: str = "rl") -> Objects:
        found: Objects = []
        for path, text in render_files(values, name).items():
            if path.endswith(".yaml"):
                found += [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]
        return found

    return objects


@pytest.fixture(scope="session")
def everything(render: Render) -> Objects:
    """All that the chart can make, at once."""
    return render(
        {
            "queueName": "training",
            "imagePullSecrets": [{"name": "registry"}],
            "model": {"claimName": "models"},
            "journal": {"claimName": "journal"},
            "config": {"coordinator": {"journal_dir": "/journal/rollouts"}},
            "image": {"digest": "sha256:" + "0" * 64},
            "head": {"env": [{"name": "A", "value": "b"}], "priorityClassName": "high"},
            "gcsFaultTolerance": {
                "enabled": True,
                "redisAddress": "redis://redis:6380",
                "passwordSecret": {"name": "redis"},
            },
            "workerGroups": {
                "gpu": {"nodeSelector": {"gpu": "h200"}, "runtimeClassName": "nvidia"},
                "spot": {"maxReplicas": 2, "gpusPerPod": 4, "cpu": "16", "memory": "128Gi"},
            },
            "networkPolicy": {
                "clients": [{"podSelector": {"matchLabels": {"app": "trainer"}}}],
                "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
            },
            "monitoring": {
                "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}},
                "rules": {"enabled": True, "labels": {"release": "prometheus"}},
                "dashboard": {"enabled": True, "annotations": {"folder": "Rollouts"}},
                "rayDashboard": {
                    "prometheusHost": "http://prometheus:9090",
                    "grafanaHost": "http://grafana:3000",
                    "grafanaIframeHost": "https://grafana.example.com",
                },
            },
        }
    )


@pytest.fixture(scope="session")
def custom_schemas() -> dict[str, dict[str, Any]]:
    """Kind -> schema, in which an unknown field is an error as it is for the API server."""
    schemas = {}
    for path in (Path(__file__).parent / "crds").glob("*.yaml.gz"):
        crd = yaml.load(gzip.decompress(path.read_bytes()), yaml.CSafeLoader)["spec"]
        (version,) = (v for v in crd["versions"] if v["name"] == "v1")
        schemas[crd["names"]["kind"]] = refuse_unknown_fields(version["schema"]["openAPIV3Schema"])
    return schemas


def refuse_unknown_fields(schema: Any) -> Any:
    """A copy that closes every object whose fields are listed."""
    if isinstance(schema, list):
        return [refuse_unknown_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: refuse_unknown_fields(value) for key, value in schema.items()}
    lists_fields = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if lists_fields and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if isinstance(pattern := closed.get("pattern"), str) and "(?i)" in pattern:
        closed["pattern"] = "(?i)" + pattern.replace("(?i)", "")  # Python wants flags in front
    return closed


def find_tool(name: str) -> str:
    """Its path; skips the test if it is not there."""
    beside_python = Path(sys.executable).parent
    path = shutil.which(name, path=f"{beside_python}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture(scope="session")
def run_tool() -> RunTool:
    """``run_tool(name, *arguments)``: its output; fails if it does, skips if it is not there."""

    def run(name: str, *arguments: object) -> str:
        ended = subprocess.run(
            [find_tool(name), *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TOOL_LIMIT_S,
            check=False,
        )
        output = ended.stdout + ended.stderr
        assert ended.returncode == 0, output
        return output

    return run
