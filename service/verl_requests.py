"""What verl asks of a rollout server, as our request, and our answer as it expects one.

verl calls with a prompt's token ids and sampling parameters that are nearly vLLM's. Its own rules
are kept: a response is bounded by what is left of its budget and of the context, and a partial
comes back as "aborted" with what it has, to be sent again as a longer prompt.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from actors.rollout_api import RolloutRequest, SampleResult, ServedModel
from actors.token_detail import routed_rows
from placement.errors import RequestError, UnavailableError
from placement.samples import FinishReason
from service.checks import prompt_ids
from service.errors import request_error
from service.generation import make_generation, seed_of
from service.vllm_schemas import TokensBody

_STOP_REASONS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "completed",
    FinishReason.ABORT: "aborted",
}


def to_rollout(
    prompt: Sequence[int],
    sampling_params: Mapping[str, Any],
    request_id: str,
    model: ServedModel,
    *,
    default_tokens: int,
    priority: int = 0,
    routed_experts: bool = False,
) -> RolloutRequest:
    """Args:
        default_tokens: bound of a response where the parameters name none.
        priority: as verl and vLLM count: less goes first.

    Raises: RequestError.
    """
    params = dict(sampling_params)
    max_tokens = params.pop("max_tokens", None) or params.pop("max_new_tokens", None)
    params.pop("logprobs", None)  # those of the drawn tokens are always told
    try:
        body = TokensBody.model_validate(
            {
                "token_ids": list(prompt),
                "sampling_params": params,
                "return_routed_experts": routed_experts,
            }
        )
    except ValidationError as error:
        raise request_error(error) from error
    if body.sampling_params.n != 1:
        raise RequestError("must be 1; ask once per response", field="sampling_params.n")
    wanted = replace(
        body.wanted(),
        max_tokens=None,  # the default goes as far as there is room, which is verl's rule for all
        default_tokens=max_tokens or default_tokens,
    )
    if wanted.stop:
        raise RequestError(
            f"is {wanted.stop!r}; send token ids in stop_token_ids", field="sampling_params.stop"
        )
    ids = prompt_ids(body.token_ids, "prompt_ids", model, None)
    # verl may keep one id over the turns of a conversation, and over the resumes of a response.
    content = json.dumps([ids, sorted(params.items()), wanted.default_tokens], default=str)
    suffix = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    generation = make_generation(
        [(ids, "prompt_ids")],
        [wanted],
        model,
        None,
        n=1,
        seed=seed_of(body.sampling_params.seed, request_id),
        request_id=f"{request_id}-{suffix}",
        id_field="request_id",
    )
    return replace(generation.rollout, priority=-priority)


def to_output(sample: SampleResult, global_steps: int | None) -> dict[str, Any]:
    """The fields of verl's ``TokenOutput``.

    Raises: UnavailableError, if the sample has failed.
    """
    if sample.finish_reason is None or sample.finish_reason is FinishReason.FAILED:
        raise UnavailableError(f"sample {sample.sample_id} failed: {sample.error}")
    return {
        "token_ids": list(sample.token_ids),
        "log_probs": list(sample.logprobs),
        "routed_experts": routed_rows(sample.detail, sample.prompt_tokens + len(sample.token_ids)),
        "stop_reason": _STOP_REASONS[sample.finish_reason],
        # Nothing is preempted; what it would have cost is that of a move.
        "num_preempted": max(0, len(sample.worker_ids) - 1),
        "extra_fields": {
            "global_steps": global_steps,
            "weight_version": sample.weight_version,
            "num_cached_tokens": 0,
        },
    }
