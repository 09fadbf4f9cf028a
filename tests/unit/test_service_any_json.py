"""Whatever JSON is sent to whatever route: an answer, and never an error of ours."""

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from service.control_schemas import PauseBody, SleepBody, WakeBody
from service.openai_schemas import ChatBody, CompletionBody
from service.schemas import RolloutBody
from service.sglang_control_schemas import (
    DestroyGroupBody,
    FromDiskBody,
    FromDistributedBody,
    FromTensorBody,
    InitGroupBody,
    MemoryBody,
    PauseGenerationBody,
)
from service.sglang_schemas import AbortBody, GenerateBody, SglangParams
from service.trl_schemas import SequenceLogprobsBody, TrlChatBody, TrlGenerateBody
from service.vllm_control_schemas import (
    FinishUpdateBody,
    NoBody,
    TransferInitBody,
    UpdateWeightsBody,
)
from service.vllm_schemas import AbortRequestsBody, TokensBody, VllmParams
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import with_service

ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/rollouts": (RolloutBody, {"prompts": ["a"], "sampling": {"max_tokens": 4}}),
    "/v1/completions": (CompletionBody, {"prompt": "a"}),
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
    "/generate": (GenerateBody, {"text": "a"}),
    "/abort_request": (AbortBody, {}),
    "/inference/v1/generate": (TokensBody, {"token_ids": [1]}),
    "/abort_requests": (AbortRequestsBody, {}),
    "/v1/pause": (PauseBody, {}),
    "/v1/sleep": (SleepBody, {}),
    "/v1/wake": (WakeBody, {}),
    "/pause_generation": (PauseGenerationBody, {}),
    "/release_memory_occupation": (MemoryBody, {}),
    "/resume_memory_occupation": (MemoryBody, {}),
    "/update_weights_from_disk": (FromDiskBody, {"model_path": "/w"}),
    "/update_weights_from_tensor": (
        FromTensorBody,
        {"serialized_named_tensors": ["AAAA"], "load_format": "safetensors"},
    ),
    "/update_weights_from_distributed": (
        FromDistributedBody,
        {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]]},
    ),
    "/init_weights_update_group": (
        InitGroupBody,
        {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2},
    ),
    "/destroy_weights_update_group": (DestroyGroupBody, {}),
    "/init_weight_transfer_engine": (
        TransferInitBody,
        {"init_info": {"rank_offset": 1, "world_size": 2, "backend": "gloo"}},
    ),
    "/start_weight_update": (NoBody, {}),
    "/update_weights": (UpdateWeightsBody, {"weight_dir": "/w"}),
    "/finish_weight_update": (FinishUpdateBody, {}),
    "/generate/": (TrlGenerateBody, {"prompts": ["a"], "max_tokens": 4}),
    "/chat/": (TrlChatBody, {"messages": [[{"role": "user", "content": "a"}]]}),
    "/get_sequence_logprobs/": (
        SequenceLogprobsBody,
        {"sequences": [[1, 2]], "prompt_lengths": [1]},
    ),
}
NESTED = sorted({*SglangParams.model_fields, *VllmParams.model_fields, "type", "text", "role"})

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.integers(-2, 20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
ANY_JSON = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NESTED) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def changes_of(schema: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted({*schema.model_fields, *getattr(schema, "neutral", {}), "unknown"})
    return st.dictionaries(st.sampled_from(names), ANY_JSON, max_size=3)


@pytest.mark.parametrize("path", ROUTES)
def test_any_json_is_served_or_refused_with_a_reason(path: str) -> None:
    schema, good = ROUTES[path]

    @settings(max_examples=15, deadline=None)
    @given(changes=changes_of(schema))
    def check(changes: dict[str, Any]) -> None:
        async def test(client: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
            response = await client.post(path, json=good | changes)
            assert response.status_code in (200, 400, 404, 501), response.text
            if response.status_code != 200:
                assert response.json()["error"]["message"]

        with_service(test)

    check()
