"""The OpenAI dialect, as its own client and as bare HTTP see it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import httpx2
import openai
import pytest

from placement.errors import OverloadedError
from placement.ids import RolloutId
from placement.samples import FinishReason, Sampling
from service.app import create_app
from tests.unit.fake_coordinator import MODEL, FakeCoordinator
from tests.unit.service_client import (
    LIMIT_S,
    SETTINGS,
    FakeTokenizer,
    LeavingClient,
    run_bounded,
    with_service,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def with_openai(
    test: Callable[[openai.AsyncOpenAI, FakeCoordinator], Awaitable[None]], response: str = "hi"
) -> None:
    """Run ``test`` with OpenAI's client; every response is ``response``."""

    async def run() -> None:
        coordinator = FakeCoordinator()
        coordinator.response = tuple(response.encode())
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        async with (
            asyncio.timeout(LIMIT_S),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)) as http,
            openai.AsyncOpenAI(
                base_url="http://service/v1", api_key="none", http_client=http, max_retries=0
            ) as client,
        ):
            await test(client, coordinator)

    asyncio.run(run())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion_has_text_logprobs_and_usage() -> None:
    async def test(client: openai.AsyncOpenAI, coordinator: FakeCoordinator) -> None:
        answer = await client.completions.create(
            model=MODEL.path, prompt="hey", max_tokens=8, logprobs=0, seed=3, n=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == ("hi", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["h", "i"]
        assert choice.logprobs.token_logprobs == [-0.5, -0.25]
        assert choice.logprobs.top_logprobs == [{"h": -0.5}, {"i": -0.25}]
        assert choice.logprobs.text_offset == [0, 1]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
        (request,) = coordinator.requests.values()
        assert (request.prompts, request.num_samples, request.seed) == (((104, 101, 121),), 2, 3)
        assert request.samplings == (Sampling(max_tokens=8),)

    with_openai(test)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ([1, 2], ((1, 2),)),
        (["a", "b"], ((97,), (98,))),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_are_texts_or_ids_one_or_many(
    prompt: Any, prompts: tuple[tuple[int, ...], ...]
) -> None:
    async def test(client: openai.AsyncOpenAI, coordinator: FakeCoordinator) -> None:
        answer = await client.completions.create(model=MODEL.path, prompt=prompt, n=2)
        (request,) = coordinator.requests.values()
        assert request.prompts == prompts
        assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))

    with_openai(test)


def test_a_chat_is_a_prompt_made_by_the_template_and_may_fill_the_context() -> None:
    async def test(client: openai.AsyncOpenAI, coordinator: FakeCoordinator) -> None:
        parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        for messages in (HI, parts):
            answer = await client.chat.completions.create(
                model=MODEL.path, messages=messages, logprobs=True
            )
            assert answer.choices[0].message.content == "hi"
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].logprobs.content
            assert content is not None
            assert [(t.token, t.logprob, t.bytes) for t in content] == [
                ("h", -0.5, [104]),
                ("i", -0.25, [105]),
            ]
        for request in coordinator.requests.values():
            text = b"user: hi\nassistant: "
            assert bytes(request.prompts[0]) == text
            assert request.samplings[0].max_tokens == MODEL.max_model_len - len(text)

    with_openai(test)


def test_streams_bring_the_same_text_and_the_usage_if_asked_for() -> None:
    async def test(client: openai.AsyncOpenAI, coordinator: FakeCoordinator) -> None:
        usage = {"include_usage": True}
        stream = await client.completions.create(
            model=MODEL.path, prompt="a", stream=True, n=2, stream_options=usage
        )
        chunks = [chunk async for chunk in stream]
        assert [(c.index, c.text, c.finish_reason) for k in chunks for c in k.choices] == [
            (0, "hi", "length"),
            (1, "hi", "length"),
        ]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 5
        chat = await client.chat.completions.create(
            model=MODEL.path, messages=HI, stream=True, stream_options=usage
        )
        deltas = [chunk async for chunk in chat]
        assert deltas[0].choices[0].delta.role == "assistant"
        assert "".join(d.choices[0].delta.content or "" for d in deltas[:-1]) == "hi"
        assert deltas[-2].choices[0].finish_reason == "length"
        assert deltas[-1].choices == []

    with_openai(test)


def test_a_stream_brings_tokens_before_the_sample_has_ended() -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        coordinator.response = tuple("one € two".encode())
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        body = {
            "prompt": "a",
            "stream": True,
            "logprobs": 0,
            "request_id": "a",
            "return_tokens_as_token_ids": True,
        }
        client = LeavingClient(app, body, COMPLETIONS)
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await coordinator.grow(RolloutId("a"), 5)
        first = (await client.next_event())["choices"][0]
        assert (first["text"], first["finish_reason"]) == ("one ", None)
        assert first["logprobs"]["tokens"] == [f"token_id:{t}" for t in coordinator.response[:5]]
        await coordinator.finish(RolloutId("a"), 1)
        last = (await client.next_event())["choices"][0]
        assert (last["text"], last["finish_reason"]) == ("€ two", "length")
        assert len(last["logprobs"]["token_logprobs"]) == 6

    run_bounded(test())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_client_that_goes_frees_its_samples(path: str, stream: bool) -> None:
    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        prompt: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
        client = LeavingClient(app, prompt | {"stream": stream, "request_id": "a"}, path)
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await client.leave()
        while coordinator.aborted != ["a"]:
            await asyncio.sleep(0.01)

    run_bounded(test())


@pytest.mark.parametrize("stream", [True, False])
def test_ids_logprobs_and_text_end_with_the_stop_string_and_so_does_the_sample(
    stream: bool,
) -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.response = tuple(b"well END and more")
        body = {
            "prompt": "a",
            "stop": ["END"],
            "stream": stream,
            "logprobs": 0,
            "return_token_ids": True,
            "request_id": "a",
        }
        task = asyncio.create_task(client.post(COMPLETIONS, json=body))
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        for tokens in (3, 7, 12):
            await coordinator.grow(RolloutId("a"), tokens)
            await asyncio.sleep(0.02)
        response = await task
        choices = (
            [choice for told in events(response) for choice in told["choices"]]
            if stream
            else response.json()["choices"]
        )
        assert "".join(choice["text"] for choice in choices) == "well "
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == "END"
        ids = [token for choice in choices for token in choice["token_ids"]]
        logprobs = [lp for choice in choices for lp in choice["logprobs"]["token_logprobs"]]
        assert bytes(ids) == b"well END"
        assert len(logprobs) == 8
        assert coordinator.cut_samples == ["a/0/0"]
        assert coordinator.aborted == []

    with_service(test, auto_finish=False)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.ending = FinishReason.STOP
        body = {"prompt": "a", "stop_token_ids": [105], "return_token_ids": True}
        (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        assert (choice["text"], choice["token_ids"]) == ("h", [104, 105])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 105)
        shown = body | {"include_stop_str_in_output": True}
        assert (await client.post(COMPLETIONS, json=shown)).json()["choices"][0]["text"] == "hi"

    with_service(test)


def test_an_aborted_sample_comes_with_what_it_has() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        body = {"prompt": "a", "request_id": "a", "return_token_ids": True, "logprobs": 0}
        task = asyncio.create_task(client.post(COMPLETIONS, json=body))
        while "a" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await coordinator.grow(RolloutId("a"), 1)
        await client.delete("/v1/rollouts/a")
        (choice,) = (await task).json()["choices"]
        assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [104])
        assert choice["logprobs"]["token_logprobs"] == [-0.5]

    with_service(test, auto_finish=False)


def test_a_failed_sample_is_an_error_with_its_reason() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.ending = FinishReason.FAILED
        answer = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert answer.status_code == 503
        streamed = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        assert "failed" in events(streamed)[-1]["error"]["message"]

    with_service(test)


def test_echo_puts_the_prompt_first() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        body = {"prompt": ["a", "b"], "echo": True}
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["ahi", "bhi"]
        streamed = await client.post(COMPLETIONS, json=body | {"stream": True})
        assert [e["choices"][0]["text"] for e in events(streamed)] == ["ahi", "bhi"]

    with_service(test)


def test_a_repeated_id_joins_and_decodes_nothing_twice() -> None:
    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        headers = {"X-Request-Id": "once"}
        answers = [
            (await client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)).json()
            for _ in range(2)
        ]
        assert answers[0] == answers[1]
        assert list(coordinator.requests) == ["once"]
        other = {"prompt": "a", "request_id": "once", "stop": "x"}
        refused = await client.post(COMPLETIONS, json=other)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "request_id"

    with_service(test)


def test_the_model_is_listed_with_its_context() -> None:
    async def test(client: openai.AsyncOpenAI, coordinator: FakeCoordinator) -> None:
        (model,) = [model async for model in client.models.list()]
        assert model.id == MODEL.path
        assert model.model_dump()["max_model_len"] == MODEL.max_model_len

    with_openai(test)


BAD: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no prompt": (COMPLETIONS, {}, "prompt", "required"),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}, "prompt", "no tokens"),
    "an empty prompt of several": (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1]", "no tokens"),
    "no prompts": (COMPLETIONS, {"prompt": []}, "prompt", "no tokens"),
    "an id out of vocabulary": (COMPLETIONS, {"prompt": [512]}, "prompt[0]", "0 to 511"),
    "one of several": (COMPLETIONS, {"prompt": [[1], [1, 512]]}, "prompt[1][1]", "0 to 511"),
    "a mixed prompt": (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]", "integer"),
    "a stop id out of vocabulary": (
        COMPLETIONS,
        {"prompt": "a", "stop_token_ids": [600]},
        "stop_token_ids[0]",
        "0 to 511",
    ),
    "a prompt that is too long": (
        COMPLETIONS,
        {"prompt": [1] * 90, "max_tokens": 11},
        "prompt",
        "takes 100",
    ),
    "alternatives": (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "got 21"),
    "prompt logprobs": (
        COMPLETIONS,
        {"prompt": "a", "prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
        "without stream",
    ),
    "a penalty": (
        COMPLETIONS,
        {"prompt": "a", "presence_penalty": 0.5},
        "presence_penalty",
        "is 0.5; only 0 or null is served",
    ),
    "an unknown field": (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "no field"),
    "an empty stop string": (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "0 characters"),
    "too many samples": (COMPLETIONS, {"prompt": "a", "n": 17}, "n", "takes 16"),
    "stream options alone": (
        COMPLETIONS,
        {"prompt": "a", "stream_options": {}},
        "stream_options",
        "needs stream",
    ),
    "a strange id": (COMPLETIONS, {"prompt": "a", "request_id": "a/b"}, "request_id", "'a/b'"),
    "no messages": (CHAT, {"messages": []}, "messages", "at least 1"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content.list[TextPart][0].type",
        "",
    ),
    "a role that the template refuses": (
        CHAT,
        {"messages": [{"role": "nobody", "content": "x"}]},
        "messages",
        "no such role",
    ),
    "tools": (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools", "is served"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_in_openais_shape(name: str) -> None:
    path, body, param, words = BAD[name]

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        response = await client.post(path, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        if name != "an image":  # pydantic names both kinds of content
            assert error["param"] == param
        assert words in error["message"]
        assert coordinator.submitted == 0

    with_service(test)


def test_another_model_is_not_found_and_a_full_queue_says_when_to_come_back() -> None:
    async def test(client: openai.AsyncOpenAI, coordinator: FakeCoordinator) -> None:
        with pytest.raises(openai.NotFoundError, match="is not served"):
            await client.completions.create(model="other", prompt="a")
        coordinator.submit_error = OverloadedError("9 samples are open; wait")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model=MODEL.path, prompt="a")
        assert refused.value.response.headers["retry-after"] == "2"

    with_openai(test)
