"""What has gone wrong on other servers, in every dialect: each test is one kind of report.

Of an engine that dies of what a client sends, of ids that clash, of limits that are named wrongly,
of clients that go, of aborts that tell nothing, of texts that do not agree with ids.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from actors.rollout_api import RolloutRequest, SampleStart
from placement.ids import RolloutId
from placement.samples import FinishReason, Sampling
from service.app import create_app
from tests.unit.coordinator_harness import World, all_results, make_request, started
from tests.unit.fake_cluster import STEP_S, expected_response
from tests.unit.fake_coordinator import MODEL, FakeCoordinator
from tests.unit.service_client import (
    SETTINGS,
    FakeTokenizer,
    LeavingClient,
    run_bounded,
    with_service,
)
from tests.unit.virtual_time import run


@dataclass(frozen=True)
class Dialect:
    """``ask(prompt, max_tokens, more)``: a request; ``more`` may have "stop_ids", "stop" and "id".

    ``read``: of an answer, the finish reason, the ids, the logprobs and the text (if it tells it).
    """

    path: str
    ask: Callable[[list[int], int, dict[str, Any]], dict[str, Any]]
    read: Callable[[dict[str, Any]], tuple[str, list[int], list[float], str | None]]
    wrong: Callable[[dict[str, Any]], tuple[str | None, str]]
    has_ids: bool = True


def _native(prompt: list[int], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "stop_token_ids": more.get("stop_ids", [])}
    named = {"id": more["id"], "seed": 1} if "id" in more else {}
    return {"prompts": [prompt], "sampling": sampling, **named}


def _read_native(answer: dict[str, Any]) -> tuple[str, list[int], list[float], str | None]:
    (sample,) = answer["samples"]
    return sample["finish_reason"], sample["token_ids"], sample["logprobs"], sample["text"]


def _completion(prompt: list[int], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    asked = {"prompt": [prompt], "max_tokens": max_tokens, "logprobs": 0, "return_token_ids": True}
    return asked | _openai(more)


def _openai(more: dict[str, Any]) -> dict[str, Any]:
    names = {"stop_ids": "stop_token_ids", "stop": "stop", "id": "request_id"}
    return {names[name]: value for name, value in more.items()}


def _read_completion(answer: dict[str, Any]) -> tuple[str, list[int], list[float], str | None]:
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]
    return choice["finish_reason"], choice["token_ids"], logprobs, choice["text"]


def _tokens(prompt: list[int], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    params = {"max_tokens": max_tokens, "logprobs": 0}
    params |= {"stop_token_ids": more["stop_ids"]} if "stop_ids" in more else {}
    params |= {"stop": more["stop"]} if "stop" in more else {}
    named = {"request_id": more["id"]} if "id" in more else {}
    mode = {"output_mode": "text"} if "stop" in more else {}
    return {"token_ids": prompt, "sampling_params": params, **named, **mode}


def _read_tokens(answer: dict[str, Any]) -> tuple[str, list[int], list[float], str | None]:
    (choice,) = answer["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["finish_reason"], choice["token_ids"], logprobs, choice.get("text")


def _generate(prompt: list[int], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": max_tokens}
    params |= {"stop_token_ids": more["stop_ids"]} if "stop_ids" in more else {}
    params |= {"stop": more["stop"]} if "stop" in more else {}
    named = {"rid": more["id"]} if "id" in more else {}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **named}


def _read_generate(answer: dict[str, Any]) -> tuple[str, list[int], list[float], str | None]:
    meta = answer["meta_info"]
    logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    return meta["finish_reason"]["type"], answer["output_ids"], logprobs, answer["text"]


def _trl(prompt: list[int], max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    names = {"stop_ids": "stop_token_ids", "stop": "stop"}
    kwargs = {names[name]: value for name, value in more.items()}
    return {"prompts": [prompt], "max_tokens": max_tokens, "generation_kwargs": kwargs}


def _field_and_message(answer: dict[str, Any]) -> tuple[str | None, str]:
    error = answer["error"]
    return error.get("field", error.get("param")), error["message"]


DIALECTS = {
    "native": Dialect("/v1/rollouts", _native, _read_native, _field_and_message),
    "OpenAI": Dialect("/v1/completions", _completion, _read_completion, _field_and_message),
    "vLLM": Dialect("/inference/v1/generate", _tokens, _read_tokens, _field_and_message),
    "SGLang": Dialect("/generate", _generate, _read_generate, _field_and_message),
}
WITHOUT_IDS = {"TRL": Dialect("/generate/", _trl, _read_native, _field_and_message, has_ids=False)}
every_dialect = pytest.mark.parametrize("name", [*DIALECTS, *WITHOUT_IDS])
with_ids = pytest.mark.parametrize("name", DIALECTS)


def dialect_of(name: str) -> Dialect:
    return (DIALECTS | WITHOUT_IDS)[name]


@every_dialect
@pytest.mark.parametrize(
    ("prompt", "stop_ids", "says"),
    [
        ([], [], "at least one"),
        ([1, MODEL.vocab_size], [], f"0 to {MODEL.vocab_size - 1}"),
        ([1], [2, MODEL.vocab_size], f"0 to {MODEL.vocab_size - 1}"),
    ],
)
def test_ids_that_would_kill_an_engine_are_refused_with_the_limit_and_it_serves_on(
    name: str, prompt: list[int], stop_ids: list[int], says: str
) -> None:
    dialect = dialect_of(name)

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        more = {"stop_ids": stop_ids} if stop_ids else {}
        refused = await client.post(dialect.path, json=dialect.ask(prompt, 4, more))
        assert refused.status_code == 400
        field, message = dialect.wrong(refused.json())
        assert field
        assert says in message
        assert coordinator.submitted == 0
        served = await client.post(dialect.path, json=dialect.ask([1], 4, {}))
        assert served.status_code == 200

    with_service(test)


@every_dialect
def test_a_prompt_that_is_too_long_is_refused_with_the_true_limit_and_both_counts(
    name: str,
) -> None:
    dialect = dialect_of(name)

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        refused = await client.post(dialect.path, json=dialect.ask([1] * 90, 11, {}))
        assert refused.status_code == 400
        _, message = dialect.wrong(refused.json())
        for count in (90, 11, MODEL.max_model_len):
            assert str(count) in message
        fits = await client.post(dialect.path, json=dialect.ask([1] * 90, 10, {}))
        assert fits.status_code == 200

    with_service(test)


@with_ids
def test_two_live_requests_with_one_id_are_one_and_both_are_answered(name: str) -> None:
    dialect = dialect_of(name)

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = dialect.ask([1], 4, {"id": "same"})
        first = asyncio.create_task(client.post(dialect.path, json=asked))
        while "same" not in coordinator.requests:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(client.post(dialect.path, json=asked))
        while coordinator.submitted < 2:
            await asyncio.sleep(0.01)
        other = await client.post(dialect.path, json=dialect.ask([2], 4, {"id": "same"}))
        assert other.status_code in (400, 409)
        await coordinator.finish(RolloutId("same"), 1)
        answers = [dialect.read((await task).json()) for task in (first, second)]
        assert answers[0] == answers[1]
        assert answers[0][1] == [104, 105]
        assert len(coordinator.requests) == 1

    with_service(test, auto_finish=False)


@every_dialect
def test_a_client_that_closes_a_request_without_stream_ends_its_samples(name: str) -> None:
    dialect = dialect_of(name)

    async def test() -> None:
        coordinator = FakeCoordinator(auto_finish=False)
        app = create_app(coordinator, SETTINGS, FakeTokenizer())
        client = LeavingClient(app, dialect.ask([1], 4, {}), path=dialect.path)
        while not coordinator.requests:
            await asyncio.sleep(0.01)
        await client.leave()
        while coordinator.aborted != list(coordinator.requests):
            await asyncio.sleep(0.01)

    run_bounded(test())


@with_ids
@pytest.mark.parametrize("tokens", [0, 1])
def test_an_abort_tells_what_there_is_also_if_that_is_nothing(name: str, tokens: int) -> None:
    dialect = dialect_of(name)

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        asked = dialect.ask([1], 4, {"id": "cut"})
        asking = asyncio.create_task(client.post(dialect.path, json=asked))
        while "cut" not in coordinator.requests:
            await asyncio.sleep(0.01)
        await coordinator.grow(RolloutId("cut"), tokens)
        for _ in range(2):
            assert (await client.post("/pause?mode=abort")).status_code == 200
        reason, ids, logprobs, text = dialect.read((await asking).json())
        assert reason == "abort"
        assert ids == [104, 105][:tokens]
        assert logprobs == [-0.5, -0.25][:tokens]
        assert text in (None, "hi"[:tokens])

    with_service(test, auto_finish=False)


@pytest.mark.parametrize("name", ["OpenAI", "vLLM", "SGLang"])
def test_ids_logprobs_and_text_end_together_at_a_stop_string(name: str) -> None:
    dialect = dialect_of(name)

    async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
        coordinator.response = tuple(b"one. two")
        coordinator.ending = FinishReason.LENGTH
        asked = dialect.ask([1], 8, {"stop": [". "]})
        reason, ids, logprobs, text = dialect.read(
            (await client.post(dialect.path, json=asked)).json()
        )
        assert reason == "stop"
        assert bytes(ids) == b"one. "
        assert len(logprobs) == len(ids)
        assert text == "one"

    with_service(test)


def test_over_all_resumes_a_response_stays_within_its_budget_and_is_what_it_would_have_been() -> (
    None
):
    budget_tokens = 60

    async def test() -> None:
        async with started(World()) as coordinator:
            seed = 1234
            given: tuple[int, ...] = ()
            for attempt in range(4):
                request = RolloutRequest(
                    RolloutId(f"r{attempt}"),
                    ((1, 2, 3),),
                    1,
                    (Sampling(max_tokens=budget_tokens, ignore_eos=True),),
                    seed=1,
                    starts=(SampleStart(given, seed),),
                )
                await coordinator.submit(request)
                if attempt < 3:
                    await asyncio.sleep(15 * STEP_S)
                    await coordinator.abort(request.rollout_id)
                (result,) = await all_results(coordinator, request.rollout_id)
                given += result.token_ids
                assert len(given) <= budget_tokens
            assert len(given) == budget_tokens
            assert given == expected_response(seed, 3, budget_tokens)

    run(test())


def test_requests_that_come_one_by_one_do_not_pile_up_on_a_worker() -> None:
    async def test() -> None:
        async with started(World()) as coordinator:
            for number in range(13):
                await coordinator.submit(make_request(f"r{number}", [100]))
            await asyncio.sleep(STEP_S)
            running = [worker.running for worker in await coordinator.workers()]
            assert sum(running) == 13
            assert max(running) - min(running) <= 1

    run(test())
