"""The whole configuration: one tree, from one YAML file and ``--set a.b=c``.

The sections belong to the parts that they configure (``actors.settings``,
``service.settings``); this module composes them, reads them and explains what is wrong, all of
it at once. Nothing is changed on the way: the tree is what was written plus defaults.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from actors.settings import RuntimeSettings
from placement.errors import ConfigError
from service.settings import ServiceSettings

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class FlexFloorConfig(RuntimeSettings):
    """The sections ``model``, ``group``, ``lease``, ``coordinator``, ``planning``, ``service``."""

    service: ServiceSettings = ServiceSettings()

    @property
    def runtime(self) -> RuntimeSettings:
        """What the coordinator is made from: everything but the HTTP service."""
        names = RuntimeSettings.model_fields
        return RuntimeSettings(**{name: getattr(self, name) for name in names})


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> FlexFloorConfig:
    """Read the tree (see ``read_tree``) and check it.

    Raises:
        ConfigError: if several settings are wrong, its message lists them all.
    """
    config, errors = check_tree(read_tree(path, overrides, values))
    if config is not None and not errors:
        return config
    if len(errors) == 1:
        raise errors[0]
    listed = "".join(f"\n  {error}" for error in errors)
    raise ConfigError(f"{len(errors)} settings are wrong:{listed}")


def read_tree(
    path: Path | None,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The tree as written, before it is checked: the file, then each ``--set``, then ``values``
    (dotted names; what the command line has options for).

    Raises: ConfigError.
    """
    tree = {} if path is None else _read_yaml(path)
    for override in overrides:
        name, value = _read_override(override)
        _put(tree, name, value)
    for name, value in values.items():
        _put(tree, name, value)
    return tree


def check_tree(tree: dict[str, Any]) -> tuple[FlexFloorConfig | None, list[ConfigError]]:
    """The configuration (None if a value is wrong), and all that is wrong with it."""
    try:
        config = FlexFloorConfig.model_validate(tree)
    except ValidationError as error:
        return None, [_explain(details) for details in error.errors()]
    return config, _contradictions(config)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key that is written twice is an error, not the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(
                problem=f"the key {twice!r} is written twice", problem_mark=node.start_mark
            )
        return mapping


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            tree = yaml.load(file, _UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; it must hold sections")
    return tree


def _read_override(override: str) -> tuple[str, Any]:
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        raise ConfigError(f"cannot read --set {override!r}; write it as section.name=value")
    try:
        return name, yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not a YAML value: {error}", field=name) from error


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    section = tree
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"cannot be set: {parent} is {section!r}, which has no names in it", field=name
            )
    section[last] = value


def _explain(details: ErrorDetails) -> ConfigError:
    """One wrong setting in our words: field, value and what to change."""
    location = details["loc"]
    field = ".".join(str(part) for part in location)
    kind, value = details["type"], details.get("input")
    if kind == "missing":
        message = f"is required; write it in the file or pass --set {field}=VALUE"
    elif kind == "extra_forbidden":
        known = _known_names(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        message = f"is no setting (value {value!r}); {hint}"
    else:
        wanted = details["msg"].replace("Input should", "it should")
        message = f"is {value!r}; {wanted}"
    return ConfigError(message, field=field or None)


def _known_names(section: Sequence[str | int]) -> list[str]:
    model: type[BaseModel] = FlexFloorConfig
    for part in section:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)


def _contradictions(config: FlexFloorConfig) -> list[ConfigError]:
    """Settings that are fine alone and wrong together."""
    errors: list[ConfigError] = []

    def refuse(field: str, message: str) -> None:
        errors.append(ConfigError(message, field=field))

    group, service = config.group, config.service
    if group.min_workers > group.max_workers:
        refuse(
            "group.min_workers",
            f"is {group.min_workers}, above group.max_workers = {group.max_workers}; "
            "lower it or raise group.max_workers",
        )
    planning = config.planning
    if planning.rebalance and (planning.policy != "planner" or planning.unit == "steps"):
        refuse(
            "planning.rebalance",
            f"is true with planning.policy = {planning.policy} and planning.unit = "
            f"{planning.unit}: only the planner moves running samples, and no move pays where "
            "every step costs the same; leave it out, or set policy: planner and unit: auto",
        )
    if planning.known_lengths and planning.policy != "planner":
        refuse(
            "planning.known_lengths",
            f"is true with planning.policy = {planning.policy}, which knows no lengths; leave it "
            "out, or set policy: planner",
        )
    if service.max_samples_per_rollout > config.coordinator.max_open_samples:
        refuse(
            "service.max_samples_per_rollout",
            f"is {service.max_samples_per_rollout}, above coordinator.max_open_samples = "
            f"{config.coordinator.max_open_samples}, so such a rollout could never be accepted; "
            "lower it or raise coordinator.max_open_samples",
        )
    if not (service.host in LOOPBACK or service.token_file or service.allow_anonymous):
        refuse(
            "service.token_file",
            f"is not set, and service.host = {service.host} lets other machines ask; name a file "
            "of tokens, listen on 127.0.0.1, or set service.allow_anonymous=true where a network "
            "policy or a proxy decides who reaches the port",
        )
    if not config.lease.resources:
        refuse("lease.resources", "is empty; name what one worker needs, such as GPU: 1")
    for name, amount in config.lease.resources.items():
        if not amount > 0:
            refuse(f"lease.resources.{name}", f"is {amount:g}; it must be above 0, or left out")
    return errors
