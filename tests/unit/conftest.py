"""Unit tests start no cluster, and draw the same examples everywhere."""

from typing import NoReturn

import hypothesis
import pytest
import ray

# No deadline per example: a busy machine is no failure (pytest-timeout bounds the whole test).
hypothesis.settings.register_profile(
    "unit", deadline=None, derandomize=True, database=None, max_examples=100
)
hypothesis.settings.load_profile("unit")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(
            "a unit test must not start or join a Ray cluster; it belongs in tests/cluster"
        )

    monkeypatch.setattr(ray, "init", refuse)
