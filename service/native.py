"""From the native dialect to the coordinator's request, and back.

All that can be known to be wrong with a request is found here, before anything is accepted:
counts against the settings, token ids and lengths against the model that is served.
"""

import secrets
from collections.abc import Sequence
from dataclasses import fields

from actors.admission import check_start
from actors.rollout_api import (
    RolloutRequest,
    SampleNews,
    SampleResult,
    SampleStart,
    ServedModel,
    Strategy,
)
from placement.errors import RequestError
from placement.ids import RolloutId
from placement.samples import Sampling
from service.checks import (
    Tokenizer,
    check_counts,
    check_length,
    check_routing,
    check_vocabulary,
    prompt_ids,
)
from service.details import native_detail, native_news
from service.generation import seed_of
from service.schemas import NewsAnswer, RolloutBody, SampleAnswer, SamplingBody
from service.settings import ServiceSettings


def to_request(
    body: RolloutBody,
    model: ServedModel,
    settings: ServiceSettings,
    tokenizer: Tokenizer | None,
) -> RolloutRequest:
    """Raises: RequestError naming the field, the value and the limit."""
    if body.num_samples < body.n:
        raise RequestError(
            f"is {body.num_started}, but n is {body.n}; start at least as many as are wanted",
            field="num_started",
        )
    check_counts(
        len(body.prompts),
        body.num_samples,
        settings,
        prompts_field="prompts",
        n_field="n" if body.num_started is None else "num_started",
    )
    prompts = tuple(
        prompt_ids(prompt, f"prompts[{index}]", model, tokenizer)
        for index, prompt in enumerate(body.prompts)
    )
    if body.routed_experts:
        check_routing(model, "routed_experts")
    sampling = _sampling(body, body.sampling, "sampling", model)
    overrides = _sample_samplings(body, model)
    for index, prompt in enumerate(prompts):
        row = overrides[index] if overrides else (sampling,)
        longest_tokens = max(s.max_tokens for s in row)
        check_length(len(prompt), longest_tokens, f"prompts[{index}]", model)
    return RolloutRequest(
        rollout_id=RolloutId(body.id if body.id is not None else f"r-{secrets.token_hex(8)}"),
        prompts=prompts,
        num_samples=body.num_samples,
        samplings=(sampling,),
        seed=seed_of(body.seed, body.id),
        strategy=Strategy(body.strategy),
        replay_stop_tokens=_replay_stop_tokens(body),
        sample_samplings=overrides,
        priority=body.priority,
        deadline_s=body.deadline_s,
        num_wanted=None if body.num_started is None else body.n,
        starts=_starts(body, sampling, overrides, model),
    )


def to_answer(sample: SampleResult, tokenizer: Tokenizer | None) -> SampleAnswer:
    values = {field.name: getattr(sample, field.name) for field in fields(SampleResult)}
    text = None if tokenizer is None else tokenizer.decode(list(sample.token_ids))
    return SampleAnswer(**values, text=text, **native_detail(sample))


def to_news(news: SampleNews) -> NewsAnswer:
    values = {field.name: getattr(news, field.name) for field in fields(SampleNews)}
    return NewsAnswer(**values, **native_news(news))


def _sampling(body: RolloutBody, drawn: SamplingBody, field: str, model: ServedModel) -> Sampling:
    check_vocabulary(drawn.stop_token_ids, f"{field}.stop_token_ids", model)
    return Sampling(
        max_tokens=drawn.max_tokens,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        stop_token_ids=tuple(drawn.stop_token_ids),
        ignore_eos=drawn.ignore_eos,
        top_logprobs=body.top_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        routed_experts=body.routed_experts,
    )


def _check_table(rows: Sequence[Sequence[object]], body: RolloutBody, field: str) -> None:
    if len(rows) != len(body.prompts):
        raise RequestError(
            f"has {len(rows)} rows for {len(body.prompts)} prompts; give one per prompt",
            field=field,
        )
    for index, row in enumerate(rows):
        if len(row) != body.num_samples:
            raise RequestError(
                f"has {len(row)} entries for n={body.num_samples} samples; give one per sample",
                field=f"{field}[{index}]",
            )


def _starts(
    body: RolloutBody,
    sampling: Sampling,
    overrides: tuple[tuple[Sampling, ...], ...] | None,
    model: ServedModel,
) -> tuple[SampleStart, ...] | None:
    if body.samples is None:
        return None
    num_samples = len(body.prompts) * body.num_samples
    if len(body.samples) != num_samples:
        raise RequestError(
            f"has {len(body.samples)} entries for {num_samples} samples; give one per sample, "
            "prompt by prompt",
            field="samples",
        )
    starts = []
    for index, entry in enumerate(body.samples):
        start = SampleStart(tuple(entry.generated_ids), entry.seed)
        prompt, sample = divmod(index, body.num_samples)
        check_start(
            start, overrides[prompt][sample] if overrides else sampling, model, f"samples[{index}]"
        )
        starts.append(start)
    return tuple(starts)


def _sample_samplings(
    body: RolloutBody, model: ServedModel
) -> tuple[tuple[Sampling, ...], ...] | None:
    rows = body.sample_samplings
    if rows is None:
        return None
    _check_table(rows, body, "sample_samplings")
    return tuple(
        tuple(
            _sampling(body, entry, f"sample_samplings[{i}][{j}]", model)
            for j, entry in enumerate(row)
        )
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
            index = i * body.num_samples + j
            least = 1 + (len(body.samples[index].generated_ids) if body.samples else 0)
            if not least <= length <= of_sample.max_tokens:
                raise RequestError(
                    f"is {length}; a recorded length is {least} to max_tokens, "
                    f"{of_sample.max_tokens}",
                    field=f"replay_stop_tokens[{i}][{j}]",
                )
    return tuple(tuple(row) for row in rows)
