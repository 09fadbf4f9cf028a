from pathlib import Path

import pytest

from actors.settings import RuntimeSettings
from deploy.config import check_tree, load_config, read_tree
from placement.errors import ConfigError

MODEL = "model.path=tiny"


def refused(*overrides: str) -> ConfigError:
    tree = read_tree(None, (MODEL, *overrides))
    config, errors = check_tree(tree)
    assert len(errors) == 1, (config, errors)
    return errors[0]


def test_overrides_win_over_the_file_and_defaults_fill_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "flexfloor.yaml"
    file.write_text("model: {path: a, exact: false}\ngroup: {max_workers: 2}\n")
    config = load_config(file, ["group.max_workers=3", "lease.resources={CPU: 2}"])
    assert (config.model.path, config.model.exact) == ("a", False)
    assert config.group.max_workers == 3
    assert config.lease.resources == {"CPU": 2.0}
    assert config.service.port == 8000


def test_values_of_the_command_line_are_not_read_as_yaml() -> None:
    config = load_config(None, values={"model.path": "1: 2", "group.max_workers": 2})
    assert (config.model.path, config.group.max_workers) == ("1: 2", 2)


def test_the_runtime_gets_everything_but_the_service() -> None:
    config = load_config(None, [MODEL, "group.max_workers=7", "namespace=mine"])
    assert type(config.runtime) is RuntimeSettings
    assert config.runtime.group == config.group
    assert config.runtime.namespace == "mine"


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("group.max_worker=3", "group.max_worker", "did you mean max_workers"),
        ("speed=9", "speed", "known here: model, group"),
        ("group.max_workers=0", "group.max_workers", "is 0; it should be greater"),
        ("group.idle_workers=some", "group.idle_workers", "'none', 'floor' or 'all'"),
        ("service.port=70000", "service.port", "less than or equal to 65535"),
        ("group.min_workers=9", "group.min_workers", "above group.max_workers = 4"),
        ("lease.resources={}", "lease.resources", "is empty"),
        ("lease.resources={GPU: 0}", "lease.resources.GPU", "must be above 0"),
        ("coordinator.max_open_samples=1", "service.max_samples_per_rollout", "never be accepted"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(override: str, field: str, words: str) -> None:
    error = refused(override)
    assert error.field == field
    assert words in error.message


@pytest.mark.parametrize("other", ["planning.policy=first_rule", "planning.unit=steps"])
def test_moves_that_could_never_be_made_are_refused(other: str) -> None:
    error = refused("planning.rebalance=true", other)
    assert error.field == "planning.rebalance"
    assert "set policy: planner and unit: auto" in error.message


def test_lengths_cannot_be_known_to_a_policy_that_knows_none() -> None:
    error = refused("planning.known_lengths=true", "planning.policy=first_rule")
    assert error.field == "planning.known_lengths"
    assert "set policy: planner" in error.message


def test_a_required_setting_that_is_missing_is_named() -> None:
    _, errors = check_tree({"model": {}})
    assert [error.field for error in errors] == ["model.path"]
    assert "--set model.path=VALUE" in errors[0].message


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ["group.max_workers=0", "service.port=0", "nothing=1"])
    message = str(error.value)
    assert "4 settings are wrong" in message
    for field in ("model", "group.max_workers", "service.port", "nothing"):
        assert f"\n  {field}: " in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "holds a list"),
        ("model: {path: a}\nmodel: {path: b}", "'model' is written twice"),
    ],
)
def test_a_file_that_is_no_tree_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "flexfloor.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("override", ["group", "=3", "group..x=1", "model.path.x=1", "a={"])
def test_an_override_that_cannot_be_applied_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        read_tree(None, (MODEL, override))
