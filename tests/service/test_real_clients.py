"""Clients as their authors wrote them, against the service with workers that host vLLM, while a
worker is released and comes back.

In exact mode the same request with the same seed has the same answer whatever the group is, so
each client's answers are compared with those of another time and another way of asking.
"""

import asyncio
import base64
import io
import time
from typing import Any

import aiohttp
import httpx
import numpy as np
import openai
import pytest
from openai.types import Completion, CompletionChoice

from tests.service.conftest import NUM_REAL_WORKERS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

LIMIT_S = 90.0
POLL_S = 0.05
NUM_OPEN = 4096

LENGTHS = (12, 20, 16, 24, 30, 18, 260)
"""One response goes on for long behind all others: a worker is released meanwhile."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def openai_client(real_url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{real_url}/v1", api_key="none", timeout=LIMIT_S)


def asked(model: str, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": f"prompt number {number}",
        "max_tokens": LENGTHS[number],
        "seed": number,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }


async def releases(client: httpx.AsyncClient, real_url: str) -> int:
    operations = (await client.get(f"{real_url}/v1/operations")).json()
    return sum(len(operation["released"]) for operation in operations)


async def whole(client: httpx.AsyncClient, real_url: str) -> None:
    """Until the group is whole again and nothing changes."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        workers = (await client.get(f"{real_url}/v1/workers")).json()
        operations = (await client.get(f"{real_url}/v1/operations")).json()
        members = sum(worker["rank"] is not None for worker in workers)
        if members == NUM_REAL_WORKERS and all(op["ended_at"] is not None for op in operations):
            return
        assert time.monotonic() < deadline_s, (workers, operations[-1:])
        await asyncio.sleep(POLL_S)


def ids_and_logprobs(choice: CompletionChoice) -> tuple[list[int], list[float]]:
    assert choice.logprobs is not None
    return choice.model_dump()["token_ids"], list(choice.logprobs.token_logprobs or [])


async def read_stream(
    client: openai.AsyncOpenAI, model: str, number: int
) -> tuple[str, list[int], list[float], int]:
    """Text, ids, logprobs and in how many portions they came."""
    text, ids, logprobs, portions = "", [], [], 0
    async for chunk in await client.completions.create(stream=True, **asked(model, number)):
        for choice in chunk.choices:
            more_ids, more_logprobs = ids_and_logprobs(choice)
            text += choice.text
            ids += more_ids
            logprobs += more_logprobs
            portions += 1
    return text, ids, logprobs, portions


async def test_openais_client_gets_the_same_whole_and_streamed_while_workers_come_and_go(
    real_url: str, model: str
) -> None:
    async with openai_client(real_url) as client, httpx.AsyncClient(timeout=LIMIT_S) as http:
        await whole(http, real_url)
        before = await releases(http, real_url)
        answers: list[Completion] = await asyncio.gather(
            *(client.completions.create(**asked(model, n)) for n in range(len(LENGTHS)))
        )
        assert await releases(http, real_url) > before, "nobody was released meanwhile"
        streams = await asyncio.gather(
            *(read_stream(client, model, n) for n in range(len(LENGTHS)))
        )
        for answer, (text, ids, logprobs, _), length in zip(answers, streams, LENGTHS, strict=True):
            (choice,) = answer.choices
            assert choice.finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(ids) == length
            assert ids_and_logprobs(choice) == (ids, logprobs)
            assert choice.text == text
        assert streams[-1][3] > 5, "a long response comes in portions"


async def test_openais_client_chats(real_url: str, model: str) -> None:
    async with openai_client(real_url) as client:
        first, again = [
            await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "What is 2 + 2?"}],
                max_completion_tokens=16,
                seed=1,
                logprobs=True,
                n=2,
            )
            for _ in range(2)
        ]
        assert [c.message.content for c in first.choices] == [
            c.message.content for c in again.choices
        ]
        assert first.choices[0].message.content != first.choices[1].message.content
        with pytest.raises(openai.BadRequestError, match="takes 512"):
            await client.completions.create(model=model, prompt="a", max_tokens=512)


async def test_a_stop_string_ends_ids_logprobs_and_text_together(real_url: str, model: str) -> None:
    async with openai_client(real_url) as client:
        free = await client.completions.create(**asked(model, 4))
        ids, logprobs = ids_and_logprobs(free.choices[0])
        letters = [i for i, token in enumerate(ids) if 33 <= token < 127]
        stop = chr(ids[letters[2]])
        end = ids.index(ord(stop))
        cut = await client.completions.create(**asked(model, 4), stop=stop)
        (choice,) = cut.choices
        assert choice.finish_reason == "stop"
        assert ids_and_logprobs(choice) == (ids[: end + 1], logprobs[: end + 1])
        assert choice.text == free.choices[0].text.partition(stop)[0]


async def test_a_client_that_leaves_its_stream_frees_the_kv(real_url: str, model: str) -> None:
    async with openai_client(real_url) as client, httpx.AsyncClient(timeout=LIMIT_S) as http:
        body = asked(model, 0) | {"max_tokens": 450}
        stream = await client.completions.create(stream=True, **body)
        async for _ in stream:
            break
        await stream.close()
        deadline_s = time.monotonic() + 10
        while any(w["running"] for w in (await http.get(f"{real_url}/v1/workers")).json()):
            assert time.monotonic() < deadline_s, "it is still decoded"
            await asyncio.sleep(POLL_S)
        loads = (await http.get(f"{real_url}/v1/loads?include=core")).json()
        assert loads["loads"][0]["num_total_reqs"] == 0


async def test_slimes_request_and_vllms_get_what_openais_gets(real_url: str, model: str) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateRequest,
        GenerateTokensResponse,
    )
    from vllm.sampling_params import SamplingParams

    prompt = list(b"prompt number 3")
    async with openai_client(real_url) as client, httpx.AsyncClient(timeout=LIMIT_S) as http:
        answer = await client.completions.create(**asked(model, 3))
        ids, logprobs = ids_and_logprobs(answer.choices[0])
        params = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": LENGTHS[3],
            "ignore_eos": True,
            "sampling_seed": 3,
        }
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        slime = (await http.post(f"{real_url}/generate", json=body)).json()
        assert slime["output_ids"] == ids
        drawn = [(token, lp) for lp, token, _ in slime["meta_info"]["output_token_logprobs"]]
        assert drawn == list(zip(ids, logprobs, strict=True))

        request = GenerateRequest(
            token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=LENGTHS[3], seed=3, ignore_eos=True, logprobs=1
            ),
        )
        asked_as_json = request.model_dump(mode="json", exclude_defaults=True)
        told = await http.post(f"{real_url}/inference/v1/generate", json=asked_as_json)
        parsed = GenerateTokensResponse.model_validate(told.json())
        (choice,) = parsed.choices
        assert choice.token_ids == ids
        assert choice.logprobs is not None
        assert [t.logprob for t in choice.logprobs.content or []] == logprobs


async def test_a_trainer_replays_routing_and_scores_what_was_decoded(
    real_url: str, model: str
) -> None:
    """By the decoding of vLLM's clients, of slime, and of TRL's ``get_sequence_logprobs``."""
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    prompt = list(b"prompt number 5")
    params = {"max_tokens": LENGTHS[5], "seed": 5, "ignore_eos": True, "logprobs": 2}
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        body = {"token_ids": prompt, "sampling_params": params, "return_routed_experts": True}
        told = await http.post(f"{real_url}/inference/v1/generate", json=body)
        (choice,) = GenerateTokensResponse.model_validate(told.json()).choices
        ids = list(choice.token_ids or [])
        rows = np.load(io.BytesIO(base64.b64decode(choice.routed_experts or "")))
        assert len(rows) == len(prompt) + len(ids) - 1

        whole = {
            "input_ids": prompt + ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
        }
        meta = (await http.post(f"{real_url}/generate", json=whole)).json()["meta_info"]
        again = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        assert np.array_equal(again.reshape(rows.shape), rows)
        assert choice.logprobs is not None
        drawn = [entry.logprob for entry in choice.logprobs.content or []]
        assert [lp for lp, _, _ in meta["input_token_logprobs"][len(prompt) :]] == drawn

        scored = {
            "model": model,
            "prompt": [prompt + ids],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 100,
        }
        (scores,) = (await http.post(f"{real_url}/v1/completions", json=scored)).json()["choices"]
        places = scores["prompt_logprobs"][len(prompt) :]
        assert [place[str(i)]["logprob"] for place, i in zip(places, ids, strict=True)] == drawn
        for place in places:
            ranked = sorted(place.values(), key=lambda entry: int(entry["rank"]))[:100]
            assert [e["logprob"] for e in ranked] == sorted(
                (e["logprob"] for e in ranked), reverse=True
            )


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
async def test_vllms_benchmark_client_measures_every_request(
    real_url: str, model: str, kind: str
) -> None:
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

    name = "openai" if kind == "completions" else "openai-chat"
    async with aiohttp.ClientSession() as session:
        outputs = await asyncio.gather(
            *(
                ASYNC_REQUEST_FUNCS[name](
                    RequestFuncInput(
                        prompt=f"request {number}",
                        api_url=f"{real_url}/v1/{kind}",
                        prompt_len=9,
                        output_len=12,
                        model=model,
                        ignore_eos=True,
                    ),
                    session,
                )
                for number in range(6)
            )
        )
    assert [output.error for output in outputs] == [""] * 6
    assert all(output.success and output.output_tokens == 12 for output in outputs)
    assert all(output.ttft > 0 for output in outputs)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_thousands_of_open_requests_are_all_answered_and_none_twice(
    real_url: str, model: str, record_property: Any
) -> None:
    started_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=500)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(number: int) -> tuple[str, list[int]]:
            body = {
                "model": model,
                "prompt": [1 + number % 200, 1 + number // 200],
                "max_tokens": 4,
                "seed": 1,
                "request_id": f"many-{number}",
                "ignore_eos": True,
                "return_token_ids": True,
            }
            async with session.post(f"{real_url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
                return answer["id"], answer["choices"][0]["token_ids"]

        answers = await asyncio.gather(*(ask(number) for number in range(NUM_OPEN)))
        assert [name for name, _ in answers] == [f"many-{number}" for number in range(NUM_OPEN)]
        assert all(len(ids) == 4 for _, ids in answers)
        again = await ask(0)
    assert again == answers[0]
    record_property("seconds", time.monotonic() - started_s)
