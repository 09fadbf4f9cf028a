"""From the native dialect to the coordinator's request, and back.

All that can be known to be wrong with a request is found here, before anything is accepted:
counts against the settings, token ids and lengths against the model that is served.
"""

import secrets
from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

from actors.rollout_api import RolloutRequest, SampleResult, ServedModel, Strategy
from placement.errors import RequestError
from placement.ids import RolloutId
from placement.samples import Sampling
from service.schemas import RolloutBody, SampleAnswer, SamplingBody
from service.settings import ServiceSettings


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the service uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


def to_request(
    body: RolloutBody,
    model: ServedModel,
    settings: ServiceSettings,
    tokenizer: Tokenizer | None,
) -> RolloutRequest:
    """Raises: RequestError naming the field, the value and the limit."""
    _check_counts(body, settings)
    prompts = tuple(
        _prompt_ids(prompt, f"prompts[{index}]", model, tokenizer)
        for index, prompt in enumerate(body.prompts)
    )
    sampling = _sampling(body.sampling, "sampling", model)
    overrides = _sample_samplings(body, model)
    for index, prompt_ids in enumerate(prompts):
        row = overrides[index] if overrides else (sampling,)
        _check_length(index, len(prompt_ids), max(s.max_tokens for s in row), model)
    return RolloutRequest(
        rollout_id=RolloutId(body.id if body.id is not None else f"r-{secrets.token_hex(8)}"),
        prompts=prompts,
        num_samples=body.n,
        samplings=(sampling,),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        strategy=Strategy(body.strategy),
        replay_stop_tokens=_replay_stop_tokens(body),
        sample_samplings=overrides,
    )


def to_answer(sample: SampleResult, tokenizer: Tokenizer | None) -> SampleAnswer:
    values = {field.name: getattr(sample, field.name) for field in fields(SampleResult)}
    text = None if tokenizer is None else tokenizer.decode(list(sample.token_ids))
    return SampleAnswer(**values, text=text)


def _check_counts(body: RolloutBody, settings: ServiceSettings) -> None:
    num_prompts = len(body.prompts)
    if num_prompts > settings.max_prompts:
        raise RequestError(
            f"{num_prompts} prompts, but one rollout takes {settings.max_prompts}; "
            "send several rollouts or raise service.max_prompts",
            field="prompts",
        )
    num_samples = num_prompts * body.n
    if num_samples > settings.max_samples_per_rollout:
        raise RequestError(
            f"{num_prompts} prompts times n={body.n} are {num_samples} samples, but one rollout "
            f"takes {settings.max_samples_per_rollout}; send several rollouts or raise "
            "service.max_samples_per_rollout",
            field="n",
        )


def _prompt_ids(
    prompt: str | list[int], field: str, model: ServedModel, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                f"is a text, but {model.path} has no tokenizer; send token ids", field=field
            )
        prompt = tokenizer.encode(prompt)
    if not prompt:
        raise RequestError("has no tokens; a prompt needs at least one", field=field)
    _check_vocabulary(prompt, field, model)
    return tuple(prompt)


def _check_vocabulary(token_ids: Sequence[int], field: str, model: ServedModel) -> None:
    for position, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise RequestError(
                f"token id {token_id} is not in the vocabulary, whose ids are "
                f"0 to {model.vocab_size - 1}",
                field=f"{field}[{position}]",
            )


def _check_length(index: int, prompt_tokens: int, max_tokens: int, model: ServedModel) -> None:
    if prompt_tokens + max_tokens > model.max_model_len:
        raise RequestError(
            f"has {prompt_tokens} tokens, and with max_tokens {max_tokens} needs "
            f"{prompt_tokens + max_tokens}, but this service takes {model.max_model_len}; "
            "shorten the prompt, lower max_tokens or raise model.max_model_len",
            field=f"prompts[{index}]",
        )


def _sampling(body: SamplingBody, field: str, model: ServedModel) -> Sampling:
    _check_vocabulary(body.stop_token_ids, f"{field}.stop_token_ids", model)
    return Sampling(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def _check_table(rows: Sequence[Sequence[object]], body: RolloutBody, field: str) -> None:
    if len(rows) != len(body.prompts):
        raise RequestError(
            f"has {len(rows)} rows for {len(body.prompts)} prompts; give one per prompt",
            field=field,
        )
    for index, row in enumerate(rows):
        if len(row) != body.n:
            raise RequestError(
                f"has {len(row)} entries for n={body.n} samples; give one per sample",
                field=f"{field}[{index}]",
            )


def _sample_samplings(
    body: RolloutBody, model: ServedModel
) -> tuple[tuple[Sampling, ...], ...] | None:
    rows = body.sample_samplings
    if rows is None:
        return None
    _check_table(rows, body, "sample_samplings")
    return tuple(
        tuple(_sampling(entry, f"sample_samplings[{i}][{j}]", model) for j, entry in enumerate(row))
        for i, row in enumerate(rows)
    )


def _replay_stop_tokens(body: RolloutBody) -> tuple[tuple[int, ...], ...] | None:
    rows = body.replay_stop_tokens
    if rows is None:
        return None
    _check_table(rows, body, "replay_stop_tokens")
    for i, row in enumerate(rows):
        for j, length in enumerate(row):
            of_sample = body.sample_samplings[i][j] if body.sample_samplings else body.sampling
            if not 1 <= length <= of_sample.max_tokens:
                raise RequestError(
                    f"is {length}; a recorded length is 1 to max_tokens, {of_sample.max_tokens}",
                    field=f"replay_stop_tokens[{i}][{j}]",
                )
    return tuple(tuple(row) for row in rows)
