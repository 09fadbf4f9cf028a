"""The client for code that does not await, against a server on a real port in this process."""

import socket

import pytest

from placement.errors import RequestError, UnavailableError
from service.client_calls import Patience
from service.schemas import SamplingBody
from service.sync_client import FlexFloorClient
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.hosted_service import serving

pytestmark = pytest.mark.timeout(60)

SAMPLING = SamplingBody(max_tokens=8)
QUICK = Patience(attempts=3, first_pause_s=0.01, longest_pause_s=0.05)


def test_rollouts_streams_and_errors_are_as_those_of_the_client_that_awaits() -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator) as url, FlexFloorClient(url, patience=QUICK) as client:
        result = client.rollout(["hi", [1, 2]], SAMPLING, n=2)
        assert len(result.finished) == 4
        assert client.status(result.rollout.rollout_id) == result.rollout
        assert [s.sample_index for s in client.stream(["hi"], SAMPLING, n=3)] == [0, 1, 2]
        news = list(client.stream_tokens(["hi"], SAMPLING))
        assert [item.token_ids for item in news] == [(104, 105)]
        with pytest.raises(RequestError) as refused:
            client.rollout(["hi"], SAMPLING, n=17)
        assert refused.value.field == "n"
        assert client.health().healthy


def test_a_stream_that_is_left_ends_the_rollout() -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator) as url, FlexFloorClient(url, patience=QUICK) as client:
        for _ in client.stream(["hi"], SAMPLING, n=3, id="a"):
            break
        assert coordinator.aborted == ["a"]


def test_a_service_that_is_not_there_is_named_after_bounded_attempts() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with (
            FlexFloorClient(url, patience=QUICK) as client,
            pytest.raises(UnavailableError, match="see whether the service runs"),
        ):
            client.rollout(["hi"], SAMPLING)
