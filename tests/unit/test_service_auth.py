from pathlib import Path

import httpx
import pytest

from deploy.config import check_tree
from placement.errors import ConfigError
from service.app import create_app
from service.settings import ServiceSettings
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import body, with_service


@pytest.fixture
def guarded(tmp_path: Path) -> ServiceSettings:
    tokens = tmp_path / "tokens"
    tokens.write_text("old-token\nnew-token\n")
    return ServiceSettings(token_file=str(tokens), poll_wait_s=0.2)


@pytest.mark.parametrize("token", ["old-token", "new-token"])
def test_a_client_with_a_token_is_served(guarded: ServiceSettings, token: str) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        client.headers["Authorization"] = f"Bearer {token}"
        assert (await client.post("/v1/rollouts", json=body())).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200

    with_service(test, settings=guarded)


@pytest.mark.parametrize(
    "header", [None, "old-token", "Bearer", "Bearer other", "Bearer old-token2", "Basic old-token"]
)
@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/completions", "/generate", "/nowhere"])
def test_a_client_without_a_token_is_told_so_and_starts_nothing(
    guarded: ServiceSettings, header: str | None, path: str
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        headers = {} if header is None else {"Authorization": header}
        refused = await client.post(path, json=body(), headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["type"] == "AuthenticationError"
        assert coordinator.submitted == 0

    with_service(test, settings=guarded)


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/metrics"])
def test_probes_and_scrapers_need_no_token(guarded: ServiceSettings, path: str) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        assert (await client.get(path)).status_code == 200

    with_service(test, settings=guarded)


@pytest.mark.parametrize("content", [None, "", "\n", "töken"])
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, content: str | None) -> None:
    tokens = tmp_path / "tokens"
    if content is not None:
        tokens.write_text(content)
    with pytest.raises(ConfigError) as refused:
        create_app(FakeCoordinator(), ServiceSettings(token_file=str(tokens)), None)
    assert refused.value.field == "service.token_file"


@pytest.mark.parametrize(
    ("service", "refused"),
    [
        ({"host": "127.0.0.1"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "node-3"}, True),
        ({"host": "0.0.0.0", "token_file": "tokens"}, False),
        ({"host": "0.0.0.0", "allow_anonymous": True}, False),
    ],
)
def test_others_than_this_machine_are_served_without_a_token_only_by_choice(
    service: dict[str, object], refused: bool
) -> None:
    _, errors = check_tree({"model": {"path": "m"}, "service": service})
    assert [error.field for error in errors] == (["service.token_file"] if refused else [])
