"""An application that brings its own runtime, as ``serve deploy`` and KubeRay start it."""

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from actors.ray_coordinator import shutdown_runtime
from actors.ray_teardown import COORDINATOR_NAME, find_actor
from deploy import application
from deploy.config import FlexFloorConfig, check_tree
from placement.errors import ConfigError

pytestmark = pytest.mark.timeout(240)

LIMIT_S = 120.0
POLL_S = 0.2
NAMESPACE = "test-launch"
APPLICATION = "launched"
FAKE = "tests.service.hosted_fake_coordinator:HostedFakeCoordinator"


@pytest.fixture
def launching(config: FlexFloorConfig, url: str) -> Iterator[str]:
    """The base address of an application that has launched a fake coordinator."""
    tree = config.model_dump(mode="json") | {
        "namespace": NAMESPACE,
        "lease": {"resources": {"CPU": 1}},
    }
    checked, errors = check_tree(tree)
    assert checked is not None, errors
    serve.run(
        application.compose(checked, launches=FAKE),
        name=APPLICATION,
        route_prefix=f"/{APPLICATION}",
    )
    yield f"{url}/{APPLICATION}"
    serve.delete(APPLICATION)
    shutdown_runtime(NAMESPACE)


def coordinator_id() -> str | None:
    handle = find_actor(COORDINATOR_NAME, NAMESPACE)
    return None if handle is None else handle._actor_id.hex()


def test_a_replica_launches_the_coordinator_and_another_one_when_it_has_ended_for_good(
    launching: str,
) -> None:
    assert httpx.get(f"{launching}/health", timeout=LIMIT_S).status_code == 200
    first = coordinator_id()
    assert first is not None

    shutdown_runtime(NAMESPACE)
    deadline = time.monotonic() + LIMIT_S
    while coordinator_id() in (None, first):
        assert time.monotonic() < deadline, "no new coordinator"
        time.sleep(POLL_S)
    while httpx.get(f"{launching}/health", timeout=LIMIT_S).status_code != 200:
        assert time.monotonic() < deadline, "the new coordinator is not served"
        time.sleep(POLL_S)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"group": {"max_workers": 1, "min_workers": 2}}, "group.min_workers"),
        ({"lease": {"resources": {}}}, "lease.resources"),
        ({"group": {"max_wokers": 1}}, "did you mean max_workers"),
    ],
)
def test_the_builder_refuses_a_wrong_tree(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        application.build({"model": {"path": "m"}} | tree)


def test_the_builder_pins_the_replica_where_the_coordinator_is(ray_cluster: None) -> None:
    assert ray.is_initialized()
    built = application.build(
        {"model": {"path": "m"}, "coordinator": {"resources": {"control": 0.1}}}
    )
    deployment = built._bound_deployment
    assert deployment.ray_actor_options == {"num_cpus": 0, "resources": {"control": 0.1}}
