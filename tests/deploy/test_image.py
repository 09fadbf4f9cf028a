"""Versions that image, chart and project must share, and the Dockerfile's form."""

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import CHART, ROOT, RunTool

DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tree: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return tree


@pytest.fixture(scope="module")
def chart() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return tree


def test_chart_image_and_project_have_one_version(
    project: dict[str, Any], chart: dict[str, Any]
) -> None:
    version = project["version"]
    assert chart["appVersion"] == version
    text = DOCKERFILE.read_text()
    assert f"flexfloor-{version}-py3" in text
    assert f"-t flexfloor:{version}" in text


def test_chart_image_and_project_have_one_ray(project: dict[str, Any]) -> None:
    (ray,) = (r.split("==")[1] for r in project["dependencies"] if r.startswith("ray["))
    assert yaml.safe_load((CHART / "values.yaml").read_text())["rayVersion"] == ray
    assert re.search(
        rf"^ARG RAY_IMAGE=\S+:{re.escape(ray)}-py311", DOCKERFILE.read_text(), re.MULTILINE
    )


def test_the_image_installs_the_torch_that_the_project_pins(project: dict[str, Any]) -> None:
    pinned = next(r for r in project["optional-dependencies"]["gpu"] if r.startswith("torch"))
    assert f'"{pinned}"' in DOCKERFILE.read_text()


def test_the_image_has_every_package_and_ends_without_root() -> None:
    text = DOCKERFILE.read_text()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE)) == packages
    last_user = re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1]
    uid, gid = map(int, last_user.split(":"))
    security = (CHART / "templates" / "_pods.tpl").read_text()
    assert uid > 0
    assert f"runAsUser: {uid}\nrunAsGroup: {gid}" in security


def test_the_dockerfile_passes_its_linter(run_tool: RunTool) -> None:
    run_tool("hadolint", "--failure-threshold", "warning", DOCKERFILE)
