from typing import Any

import httpx
import pytest

from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import with_service


def test_a_text_and_a_conversation_become_ids_and_text_again() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        told = (await client.post("/tokenize", json={"prompt": "hi"})).json()
        assert told == {
            "count": 2,
            "max_model_len": 100,
            "tokens": [104, 105],
            "token_strs": None,
        }
        messages = [{"role": "user", "content": "hi"}]
        ids = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        assert text == "user: hi\nassistant: "

    with_service(test)


@pytest.mark.parametrize(
    ("path", "payload", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "b"}]}, "messages"),
        ("/detokenize", {"tokens": [512]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_what_has_no_text_or_ids_is_refused_with_its_field(
    path: str, payload: dict[str, Any], field: str
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        refused = await client.post(path, json=payload)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field

    with_service(test)
