"""Whether a request can be served at all, and the samples that it becomes.

Pure: a request and the served model in, samples or a ``RequestError`` that names the field
out. Capacity is not its concern.
"""

import math

from actors.rollout_api import RolloutRequest, SampleStart, ServedModel
from actors.token_detail import MAX_PROMPT_TOP_LOGPROBS, MAX_TOP_LOGPROBS
from placement.errors import RequestError
from placement.ids import make_sample_id
from placement.samples import Sample, Sampling, derive_sample_seed


def make_samples(request: RolloutRequest, model: ServedModel) -> tuple[Sample, ...]:
    """All samples of ``request``, prompt by prompt.

    Raises:
        RequestError: something in it cannot be served by ``model``.
    """
    _check_shape(request)
    samples: list[Sample] = []
    for prompt_index, prompt_ids in enumerate(request.prompts):
        _check_prompt(prompt_ids, model, f"prompts[{prompt_index}]")
        for sample_index in range(request.num_samples):
            sampling, field = _sampling_of(request, prompt_index, sample_index)
            _check_sampling(sampling, model, field)
            if len(prompt_ids) + sampling.max_tokens > model.max_model_len:
                raise RequestError(
                    f"the prompt has {len(prompt_ids)} tokens and max_tokens is "
                    f"{sampling.max_tokens}: {len(prompt_ids) + sampling.max_tokens} together, "
                    f"but the model takes at most {model.max_model_len}; shorten the prompt or "
                    f"lower max_tokens to {max(0, model.max_model_len - len(prompt_ids))}",
                    field=f"prompts[{prompt_index}]",
                )
            start_field = f"starts[{len(samples)}]"
            start = request.starts[len(samples)] if request.starts else SampleStart()
            check_start(start, sampling, model, start_field)
            replay = request.replay_stop_tokens
            stop = replay[prompt_index][sample_index] if replay is not None else None
            least = 1 + len(start.generated_ids)
            if stop is not None and not least <= stop <= sampling.max_tokens:
                raise RequestError(
                    f"a replay length must be between {least} and max_tokens = "
                    f"{sampling.max_tokens}, not {stop}",
                    field=f"replay_stop_tokens[{prompt_index}][{sample_index}]",
                )
            samples.append(
                Sample(
                    sample_id=make_sample_id(request.rollout_id, prompt_index, sample_index),
                    prompt_ids=prompt_ids,
                    sampling=sampling,
                    seed=(
                        derive_sample_seed(request.seed, prompt_index, sample_index)
                        if start.seed is None
                        else start.seed
                    ),
                    generated_ids=start.generated_ids,
                    num_given=len(start.generated_ids),
                    replay_stop_tokens=stop,
                )
            )
    return tuple(samples)


def _check_shape(request: RolloutRequest) -> None:
    if not request.rollout_id:
        raise RequestError("a rollout needs an id that is not empty", field="rollout_id")
    if not request.prompts:
        raise RequestError("there is no prompt; send at least one", field="prompts")
    if request.num_samples < 1:
        raise RequestError(f"must be at least 1, not {request.num_samples}", field="num_samples")
    num_prompts = len(request.prompts)
    if len(request.samplings) not in (1, num_prompts):
        raise RequestError(
            f"{len(request.samplings)} samplings for {num_prompts} prompts; send one for all "
            "or one per prompt",
            field="samplings",
        )
    _check_terms(request, num_prompts * request.num_samples)
    for field, rows in (
        ("replay_stop_tokens", request.replay_stop_tokens),
        ("sample_samplings", request.sample_samplings),
    ):
        if rows is None:
            continue
        if len(rows) != num_prompts:
            raise RequestError(
                f"{len(rows)} rows for {num_prompts} prompts; send one row per prompt",
                field=field,
            )
        for index, row in enumerate(rows):
            if len(row) != request.num_samples:
                raise RequestError(
                    f"{len(row)} entries for {request.num_samples} samples of this prompt",
                    field=f"{field}[{index}]",
                )


def _check_terms(request: RolloutRequest, num_samples: int) -> None:
    deadline_s, wanted = request.deadline_s, request.num_wanted
    if deadline_s is not None and not 0 < deadline_s < math.inf:
        raise RequestError(f"must be a time above 0, not {deadline_s}", field="deadline_s")
    if wanted is not None and not 1 <= wanted <= request.num_samples:
        raise RequestError(
            f"must be 1 to num_samples = {request.num_samples}, not {wanted}", field="num_wanted"
        )
    if request.starts is not None and len(request.starts) != num_samples:
        raise RequestError(
            f"{len(request.starts)} entries for {num_samples} samples; send one per sample, "
            "prompt by prompt",
            field="starts",
        )


def check_start(start: SampleStart, sampling: Sampling, model: ServedModel, field: str) -> None:
    """Raises: RequestError, where nothing is left to decode or a token is none."""
    given = start.generated_ids
    if given and len(given) >= sampling.max_tokens:
        raise RequestError(
            f"{len(given)} tokens were generated and max_tokens is {sampling.max_tokens} for the "
            "whole response: nothing is left to decode; raise max_tokens or leave the sample out",
            field=f"{field}.generated_ids",
        )
    for position, token_id in enumerate(given):
        if not 0 <= token_id < model.vocab_size:
            raise RequestError(
                f"token id {token_id} at position {position} is not in the vocabulary "
                f"(0 to {model.vocab_size - 1})",
                field=f"{field}.generated_ids",
            )
    ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids))
    if given and given[-1] in ends:
        raise RequestError(
            f"the last token, {given[-1]}, ends the response; leave the sample out",
            field=f"{field}.generated_ids",
        )


def _check_prompt(prompt_ids: tuple[int, ...], model: ServedModel, field: str) -> None:
    if not prompt_ids:
        raise RequestError("the prompt is empty; send at least one token id", field=field)
    for position, token_id in enumerate(prompt_ids):
        if not 0 <= token_id < model.vocab_size:
            raise RequestError(
                f"token id {token_id} at position {position} is not in the vocabulary "
                f"(0 to {model.vocab_size - 1})",
                field=field,
            )


def _sampling_of(
    request: RolloutRequest, prompt_index: int, sample_index: int
) -> tuple[Sampling, str]:
    if request.sample_samplings is not None:
        field = f"sample_samplings[{prompt_index}][{sample_index}]"
        return request.sample_samplings[prompt_index][sample_index], field
    index = prompt_index if len(request.samplings) > 1 else 0
    return request.samplings[index], f"samplings[{index}]"


def _check_detail(sampling: Sampling, model: ServedModel, field: str) -> None:
    for name, asked, most in (
        ("top_logprobs", sampling.top_logprobs, MAX_TOP_LOGPROBS),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, MAX_PROMPT_TOP_LOGPROBS),
    ):
        if not 0 <= asked <= most:
            raise RequestError(f"must be 0 to {most}, not {asked}", field=f"{field}.{name}")
    if sampling.routed_experts and model.routing is None:
        raise RequestError(
            f"{model.path} has routers that do not tell where they route to; leave it out",
            field=f"{field}.routed_experts",
        )


def _check_sampling(sampling: Sampling, model: ServedModel, field: str) -> None:
    if sampling.max_tokens < 1:
        raise RequestError(
            f"must be at least 1, not {sampling.max_tokens}", field=f"{field}.max_tokens"
        )
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise RequestError(
            f"must be a number of at least 0 (0 is greedy), not {sampling.temperature}",
            field=f"{field}.temperature",
        )
    if not 0 < sampling.top_p <= 1:
        raise RequestError(
            f"must be above 0 and at most 1, not {sampling.top_p}", field=f"{field}.top_p"
        )
    if sampling.top_k < 0:
        raise RequestError(
            f"must be at least 0 (0 keeps every token), not {sampling.top_k}",
            field=f"{field}.top_k",
        )
    _check_detail(sampling, model, field)
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise RequestError(
                f"token id {token_id} is not in the vocabulary (0 to {model.vocab_size - 1})",
                field=f"{field}.stop_token_ids",
            )
