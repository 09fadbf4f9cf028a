"""Whole programs against the service with real workers: ours, killed and started again, vLLM's
benchmark, and TRL's client."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from actors.rollout_api import CancelledBy
from placement.samples import FinishReason
from service.schemas import SampleStartBody, SamplingBody
from service.sync_client import FlexFloorClient
from tests.service.trl_client import needs_trl, trl_client

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 120.0
POLL_S = 0.05

KILLED = """
import sys
from service.schemas import SamplingBody
from service.sync_client import FlexFloorClient

url, name = sys.argv[1:]
sampling = SamplingBody(max_tokens=300, ignore_eos=True)
with FlexFloorClient(url) as client:
    for sample in client.stream([f"prompt {n}" for n in range(6)], sampling, id=name):
        print(sample.sample_id, len(sample.token_ids), sum(sample.token_ids), flush=True)
"""


BENCHMARK = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``. The command itself looks for a distribution named vllm and does not start
from the CPU build, whose name is another."""


def start(url: str, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, url, name], stdout=subprocess.PIPE, text=True
    )


def test_a_client_that_is_killed_and_started_again_joins_its_rollout(real_url: str) -> None:
    first = start(real_url, "killed")
    with httpx.Client(timeout=LIMIT_S) as http:
        deadline_s = time.monotonic() + LIMIT_S
        while not (
            (got := http.get(f"{real_url}/v1/rollouts/killed")).is_success
            and got.json()["rollout"]["response_tokens"] > 50
        ):
            assert time.monotonic() < deadline_s, got.text
            time.sleep(POLL_S)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=LIMIT_S)
        accepted_at = got.json()["rollout"]["accepted_at"]
        again, _ = start(real_url, "killed").communicate(timeout=LIMIT_S)
        lines = [line.split() for line in again.splitlines()]
        assert sorted(line[0] for line in lines) == [f"killed/{n}/0" for n in range(6)]
        assert all(line[1] == "300" for line in lines)
        status = http.get(f"{real_url}/v1/rollouts/killed").json()["rollout"]
        assert status["accepted_at"] == accepted_at, "it was not started a second time"
        assert status["response_tokens"] == 6 * 300, "nothing was decoded twice"


def test_a_partial_goes_on_bit_for_bit_as_if_nothing_had_happened(real_url: str) -> None:
    sampling = SamplingBody(max_tokens=200, ignore_eos=True)
    with FlexFloorClient(real_url) as client:
        whole = client.rollout(["the same prompt"], sampling, n=3, seed=11)
        cut = client.rollout(["the same prompt"], sampling, n=3, seed=11, deadline_s=0.5)
        partials = cut.samples
        assert {p.finish_reason for p in partials} == {FinishReason.ABORT}
        assert {p.cancelled_by for p in partials} == {CancelledBy.DEADLINE}
        starts = [SampleStartBody(generated_ids=list(p.token_ids), seed=p.seed) for p in partials]
        rest = client.rollout(["the same prompt"], sampling, n=3, seed=99, samples=starts)
    for undisturbed, partial, remaining in zip(whole.samples, partials, rest.samples, strict=True):
        assert partial.token_ids + remaining.token_ids == undisturbed.token_ids
        assert partial.logprobs + remaining.logprobs == undisturbed.logprobs
        assert remaining.start == len(partial.token_ids)


def test_oversampling_returns_as_many_as_are_wanted_and_frees_the_rest(real_url: str) -> None:
    sampling = SamplingBody(max_tokens=400, ignore_eos=True)
    lengths = [[20, 380, 30, 390, 25]]
    with FlexFloorClient(real_url) as client:
        result = client.rollout(
            ["a prompt"], sampling, n=3, num_started=5, replay_stop_tokens=lengths
        )
        assert [len(sample.token_ids) for sample in result.finished] == [20, 30, 25]
        others = [sample for sample in result.samples if sample not in result.finished]
        assert {sample.cancelled_by for sample in others} == {CancelledBy.OVERSAMPLING}
        assert all(len(sample.token_ids) < 380 for sample in others)
        deadline_s = time.monotonic() + LIMIT_S
        while any(worker.running for worker in client.workers()):
            assert time.monotonic() < deadline_s, "they are still decoded"
            time.sleep(POLL_S)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_vllms_benchmark_runs_as_it_is(
    real_url: str, model: str, endpoint: str, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-c", BENCHMARK),
        *("--backend", "openai" if endpoint == "/v1/completions" else "openai-chat"),
        *("--base-url", real_url, "--endpoint", endpoint, "--model", model),
        *("--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "12"),
        *("--num-prompts", "8", "--seed", "3", "--ignore-eos", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (8, 8 * 12)
    assert result["mean_ttft_ms"] > 0


@needs_trl
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trls_client_gets_what_the_native_route_gives(real_url: str, temperature: float) -> None:
    prompts = ["the first prompt", "the second one"]
    ids = [list(prompt.encode()) for prompt in prompts]
    sampling = SamplingBody(max_tokens=40, temperature=temperature, ignore_eos=True)
    with FlexFloorClient(real_url) as native, trl_client(real_url) as client:
        result = native.rollout(prompts, sampling, n=3, seed=17, top_logprobs=2)
        samples = sorted(result.samples, key=lambda s: (s.prompt_index, s.sample_index))
        asked = {
            "n": 3,
            "temperature": temperature,
            "max_tokens": 40,
            "generation_kwargs": {"seed": 17, "ignore_eos": True},
        }
        told = client.generate(prompts, **asked)
        assert told["prompt_ids"] == ids
        assert told["completion_ids"] == [list(sample.token_ids) for sample in samples]
        assert told["logprobs"] == [[[p] for p in sample.logprobs] for sample in samples]
        assert client.generate(ids, **asked) == told, "texts and ids are the same prompts"

        wide = client.generate(ids, logprobs=2, **asked)
        for sample, rows, row_ids in zip(
            samples, wide["logprobs"], wide["logprob_token_ids"], strict=True
        ):
            for at, alternatives in enumerate(sample.top_logprobs or ()):
                known = dict(alternatives) | {sample.token_ids[at]: sample.logprobs[at]}
                assert dict(zip(row_ids[at], rows[at], strict=True)) == known
                assert rows[at] == sorted(rows[at], reverse=True)


@needs_trl
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trls_client_scores_as_the_native_route_and_as_it_was_decoded(
    real_url: str, temperature: float
) -> None:
    prompts = [list(b"a long prompt, to be scored"), list(b"short")]
    sampling = SamplingBody(max_tokens=30, temperature=temperature, ignore_eos=True)
    with FlexFloorClient(real_url) as native, trl_client(real_url) as client:
        decoded = sorted(
            native.rollout(prompts, sampling, seed=5).samples, key=lambda s: s.prompt_index
        )
        sequences = [
            prompt + list(sample.token_ids) for prompt, sample in zip(prompts, decoded, strict=True)
        ]
        told = client.get_sequence_logprobs(
            sequences, [len(p) for p in prompts], top_logprobs=100, temperature=temperature
        )
        one = SamplingBody(max_tokens=1, temperature=temperature)
        scored = sorted(
            native.rollout(sequences, one, prompt_logprobs=100).samples,
            key=lambda s: s.prompt_index,
        )
    for number, (prompt, sample) in enumerate(zip(prompts, decoded, strict=True)):
        actual = [row[0] for row in told["actual_logprobs"][number]]
        assert actual == list(sample.logprobs), "as they were when they were decoded"
        assert [row[0] for row in told["actual_token_ids"][number]] == list(sample.token_ids)
        answer = scored[number].prompt_logprobs
        assert answer is not None
        behind = len(prompt) - 1  # nothing precedes the first token, which has no score
        assert actual == list(answer.logprobs[behind:])
        rows = zip(
            told["logprob_token_ids"][number],
            told["logprobs"][number],
            answer.top[behind:],
            strict=True,
        )
        for row_ids, row, alternatives in rows:
            assert row == [logprob for _, logprob in alternatives], "the best hundred, best first"
            assert dict(zip(row_ids, row, strict=True)) == dict(alternatives)


@needs_trl
def test_trls_client_chats_and_tries_its_communicator_and_the_service_goes_on(
    real_url: str,
) -> None:
    conversations = [[{"role": "user", "content": f"question {n}"}] for n in range(3)]
    kwargs = {"seed": 3, "ignore_eos": True}
    with trl_client(real_url) as client:
        told = client.chat(conversations, n=2, max_tokens=12, generation_kwargs=kwargs)
        assert [len(ids) for ids in told["completion_ids"]] == [12] * 6
        rendered = [bytes(token for token in ids if token < 256) for ids in told["prompt_ids"]]
        assert all(f"question {n}".encode() in text for n, text in enumerate(rendered))
        with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
            client.init_communicator(device="cuda:0")
        # Its own: it has no group, and on a machine without a GPU no device either.
        with pytest.raises((AttributeError, RuntimeError)):
            client.update_named_param("model.norm.weight", torch.zeros(2))
        client.reset_prefix_cache()
        client.close_communicator()
        again = client.chat(conversations, n=2, max_tokens=12, generation_kwargs=kwargs)
        assert again == told, "the weights are those of before"
        sampling = SamplingBody(max_tokens=12, ignore_eos=True)
        with FlexFloorClient(real_url) as native:
            result = native.rollout([told["prompt_ids"][0]], sampling, n=2, seed=3)
        samples = sorted(result.samples, key=lambda s: s.sample_index)
        assert told["completion_ids"][:2] == [list(sample.token_ids) for sample in samples]
        assert told["logprobs"][:2] == [[[p] for p in sample.logprobs] for sample in samples]
