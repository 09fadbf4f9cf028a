import socket
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from deploy.cli import app, main
from deploy.serving import check_port
from placement.errors import ConfigError

pytestmark = pytest.mark.timeout(120)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    made = run("make-model", str(directory), "--layers", "1", "--experts", "4")
    assert made.exit_code == 0
    assert made.stdout == f"{directory}\n"
    return directory


@pytest.fixture
def file(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "flexfloor.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(model)}, "group": {"max_workers": 4}}))
    return path


def test_check_config_prints_the_whole_tree_and_it_reads_back(file: Path) -> None:
    checked = run("check-config", str(file), "--set", "service.port=9001")
    assert checked.exit_code == 0
    assert checked.stderr == ""
    tree = yaml.safe_load(checked.stdout)
    assert tree["service"]["port"] == 9001
    again = file.with_name("again.yaml")
    again.write_text(checked.stdout)
    assert run("check-config", str(again)).stdout == checked.stdout


def test_check_config_tells_all_mistakes_of_settings_and_model(file: Path) -> None:
    checked = run(
        "check-config",
        str(file),
        *("--set", "group.max_workers=5"),
        *("--set", "group.min_workers=6"),
        *("--set", "model.max_model_len=5000"),
        *("--set", "model.engine={tensor_parallel_size: 2}"),
    )
    assert checked.exit_code == 1
    fields = [line.split(":")[0] for line in checked.stderr.splitlines()]
    assert fields == [
        "group.min_workers",
        "group.max_workers",
        "model.max_model_len",
        "model.engine.tensor_parallel_size",
    ]


def test_check_config_can_leave_the_model_alone(file: Path) -> None:
    arguments = ("check-config", str(file), "--set", "model.path=elsewhere")
    assert run(*arguments).exit_code == 1
    assert run(*arguments, "--without-model").exit_code == 0


def test_serve_refuses_before_anything_is_started(file: Path) -> None:
    refused = run("serve", "--config", str(file), "--workers", "5")
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.field == "group.max_workers"
    assert "has 4 experts" in refused.exception.message


def test_an_error_is_one_line_and_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ConfigError("is wrong", field="a.b")

    with pytest.raises(SystemExit) as ended:
        main(fail)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "flexfloor: a.b: is wrong\n"


def test_a_port_that_is_taken_is_refused_by_name() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another port") as refused:
            check_port("127.0.0.1", port)
        assert refused.value.field == "service.port"
    check_port("127.0.0.1", port)


def test_every_command_is_there() -> None:
    listed = run("--help").stdout
    for command in ("serve", "check-config", "make-model", "demo"):
        assert command in listed
