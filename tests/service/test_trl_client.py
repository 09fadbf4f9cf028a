"""TRL's own client over real HTTP: what it asks of the service, and what it makes of the answers.

The coordinator is a fake, so every number is known beforehand; ``test_real_programs`` has the same
client in front of workers that decode.
"""

import pytest
import torch

from actors.rollout_api import RolloutRequest, RolloutStatus
from placement.errors import OverloadedError
from placement.samples import Sampling
from tests.service.trl_client import needs_trl, trl_client
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.fake_detail import prompt_logprob
from tests.unit.hosted_service import serving

# The first one imports trl, and with it vLLM's engine, pandas and pyarrow.
pytestmark = [pytest.mark.timeout(240), needs_trl]


@pytest.mark.parametrize("prompts", [["ab", "c"], [[97, 98], [99]]], ids=["texts", "ids"])
def test_it_generates_from_texts_and_from_token_ids(prompts: list[str] | list[list[int]]) -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator) as url, trl_client(url) as client:
        told = client.generate(prompts, n=2, temperature=0.9, max_tokens=8)
    assert told == {
        "prompt_ids": [[97, 98], [99]],
        "completion_ids": [[104, 105]] * 4,
        "logprobs": [[[-0.5], [-0.25]]] * 4,
        "logprob_token_ids": [[[104], [105]]] * 4,
    }
    (request,) = coordinator.requests.values()
    assert (request.num_samples, request.samplings[0]) == (2, Sampling(8, temperature=0.9))


def test_alternatives_are_told_beside_the_token_that_was_drawn() -> None:
    with serving(FakeCoordinator()) as url, trl_client(url) as client:
        told = client.generate([[97]], logprobs=2)
        assert told["logprob_token_ids"] == [[[104, 105, 106], [105, 106, 107]]]
        assert told["logprobs"] == [[[-0.5, -2.0, -3.0], [-0.25, -2.0, -3.0]]]
        told = client.generate([[97]], logprobs=None)
        assert (told["logprobs"], told["logprob_token_ids"]) == (None, None)


def test_parameters_of_vllm_reach_the_samples() -> None:
    coordinator = FakeCoordinator()
    more = {"seed": 5, "ignore_eos": True, "stop_token_ids": [7]}
    with serving(coordinator) as url, trl_client(url) as client:
        client.generate([[97]], top_p=0.5, top_k=3, max_tokens=4, generation_kwargs=more)
    (request,) = coordinator.requests.values()
    assert request.seed == 5
    assert request.samplings == (
        Sampling(4, top_p=0.5, top_k=3, ignore_eos=True, stop_token_ids=(7,)),
    )


def test_it_chats_in_batches() -> None:
    conversations = [[{"role": "user", "content": text}] for text in "ab"]
    with serving(FakeCoordinator()) as url, trl_client(url) as client:
        told = client.chat(conversations, n=2, max_tokens=8, logprobs=1)
        assert [bytes(ids) for ids in told["prompt_ids"]] == [
            b"user: a\nassistant: ",
            b"user: b\nassistant: ",
        ]
        assert told["completion_ids"] == [[104, 105]] * 4
        assert told["logprobs"] == [[[-0.5, -2.0], [-0.25, -2.0]]] * 4
        assert told["logprob_token_ids"] == [[[104, 105], [105, 106]]] * 4
        assert client.chat(conversations, logprobs=None)["logprobs"] is None


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_it_scores_sequences_behind_their_prompts(chunk_size: int) -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator) as url, trl_client(url) as client:
        told = client.get_sequence_logprobs(
            [[10, 20, 30, 40], [50, 60]],
            [2, 1],
            top_logprobs=3,
            temperature=0.7,
            chunk_size=chunk_size,
        )
    at_2, at_3, at_1 = (prompt_logprob(at) for at in (2, 3, 1))
    assert told["actual_token_ids"] == [[[30], [40]], [[60]]]
    assert told["actual_logprobs"] == [[[at_2], [at_3]], [[at_1]]]
    # In the order of the ranks that the fake tells: of an actual token, its place in the sequence.
    assert told["logprobs"] == [
        [[-3.0, at_2, -4.0], [-3.0, -4.0, at_3]],
        [[at_1, -3.0, -4.0]],
    ]
    assert told["logprob_token_ids"] == [[[31, 30, 32], [41, 42, 40]], [[60, 61, 62]]]
    assert {s.temperature for r in coordinator.requests.values() for s in r.samplings} == {0.7}
    assert len(coordinator.requests) == (2 if chunk_size else 1)


def test_what_is_wrong_reaches_its_caller_with_field_and_limit() -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator) as url, trl_client(url) as client:
        with pytest.raises(Exception, match=r"400.*max_tokens.*takes 100"):
            client.generate([[97]], max_tokens=100)
        with pytest.raises(Exception, match=r"400.*id 512 is not.*prompt\[1\]\[0\]"):
            client.generate([[97], [512]])
        with pytest.raises(Exception, match=r"400.*structured_outputs"):
            client.generate([[97]], structured_outputs_regex="a+")
        with pytest.raises(Exception, match=r"400.*tools"):
            client.chat([[{"role": "user", "content": "a"}]], tools=[{"type": "function"}])
    assert coordinator.submitted == 0


class FullAtFirst(FakeCoordinator):
    """Has no room for the first request that comes."""

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        if not self.submitted:
            self.submitted += 1
            raise OverloadedError("the queue is full")
        return await super().submit(request)


def test_it_asks_again_after_a_queue_that_was_full() -> None:
    coordinator = FullAtFirst()
    with serving(coordinator) as url, trl_client(url) as client:
        assert client.generate([[97]])["completion_ids"] == [[104, 105]]
    assert coordinator.submitted == 2


def test_it_says_before_it_waits_for_anybody_that_there_is_no_nccl_transfer() -> None:
    with serving(FakeCoordinator()) as url, trl_client(url) as client:
        assert client.get_world_size() == 1
        with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
            client.init_communicator(device="cuda:0")
        assert client.communicator is None


def test_tensors_that_come_without_a_communicator_change_nothing() -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator) as url, trl_client(url) as client:
        # Its own: it has no group, and on a machine without a GPU no device either.
        with pytest.raises((AttributeError, RuntimeError)):
            client.update_named_param("model.norm.weight", torch.zeros(2))
        client.reset_prefix_cache()
        assert client.generate([[97]])["completion_ids"] == [[104, 105]]
    assert coordinator.control == ["reset"]
    assert coordinator.weights.version == "0"
