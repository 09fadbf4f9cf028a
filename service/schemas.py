"""The native dialect: what a caller sends to ``POST /v1/rollouts`` and what comes back.

Unknown fields and wrong types are errors: a setting that is ignored would be noticed late.
Limits that depend on the model or on the settings are checked in ``service.native``.
Answers carry the coordinator's records (``actors.rollout_api``) under their own names.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from actors.rollout_api import RolloutStatus, SampleNews, SampleResult
from actors.token_detail import MAX_PROMPT_TOP_LOGPROBS, MAX_TOP_LOGPROBS, Alternatives

TEXT, IDS = "(text)", "(ids)"
"""Kinds of prompt. No field has such a name: errors leave them out of its path."""
MAX_TOKENS_LIMIT = 1 << 24  # far above any context; keeps sums within 64 bits
MAX_STOP_TOKEN_IDS = 256
MAX_DEADLINE_S = 30 * 86400
MAX_RECONNECT_S = 86400

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def _prompt_kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return TEXT
    return IDS if isinstance(prompt, list) else None


Prompt = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TokenId], Tag(IDS)],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_kind",
        custom_error_message="a prompt is a text or a list of token ids",
    ),
]


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class SamplingBody(Body):
    """How the tokens of a response are drawn."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS_LIMIT)
    """Bound on the response, in tokens."""
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    """Keep the fewest tokens whose probabilities sum up to this."""
    top_k: int = Field(default=0, ge=0, lt=1 << 31)
    """Keep the most likely tokens; 0 keeps all."""
    stop_token_ids: list[TokenId] = Field(default=[], max_length=MAX_STOP_TOKEN_IDS)
    """The response ends with the first of these, which it contains."""
    ignore_eos: bool = False
    """Go on behind the model's end-of-sequence token."""


class StreamOf(StrEnum):
    """What the lines of a stream are about."""

    SAMPLES = "samples"
    TOKENS = "tokens"


class SampleStartBody(Body):
    """Where one sample begins."""

    generated_ids: list[TokenId] = []
    """Tokens that the response has already, from an answer that ended as ``abort``. Decoding goes
    on behind them; ``max_tokens`` bounds them and the new ones together. The answer has the new
    ones, and in ``start`` how many were given."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """The sample's own seed, as its answer named it: with it the noise goes on as if nothing had
    happened, wherever the sample stands in this batch. Without it, the seed derives from that of
    the rollout."""


class RolloutBody(Body):
    """A batch of prompts, each to be answered ``n`` times."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "prompts": ["What is 2 + 2?", [72, 105]],
                    "n": 4,
                    "sampling": {"max_tokens": 256, "temperature": 1.0},
                    "seed": 7,
                    "stream": True,
                }
            ]
        }
    )

    prompts: list[Prompt] = Field(min_length=1)
    """Texts or lists of token ids."""
    n: int = Field(default=1, ge=1)
    """Responses per prompt."""
    num_started: int | None = Field(default=None, ge=1)
    """Oversampling: so many responses per prompt are started, at least ``n``. As soon as ``n`` of
    a prompt have finished, the others end as ``abort`` with ``cancelled_by`` "oversampling".
    Who finishes first is among the wanted ones, which favours short responses: whoever trains on
    them has to allow for that."""
    sampling: SamplingBody
    """Of all samples."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Every sample's noise derives from it. Drawn, and named in the answer, if absent."""
    stream: Literal[False, True, "samples", "tokens"] = False
    """Answer with lines of JSON, instead of all samples at the end: true or "samples" gives a
    line per ended sample, "tokens" lines with what is new of each. Every line has the ``cursor``
    from which ``GET /v1/rollouts/{id}/stream`` goes on behind it."""
    id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """Names the rollout. The same id with the same content joins the running rollout."""
    strategy: Literal["elastic", "static"] = "elastic"
    """``static`` places contiguous chunks and releases nobody: the baseline to compare with."""
    abort_on_disconnect: bool = True
    """End the rollout when the last client that follows it has gone. Only the request that
    created the rollout decides this."""
    reconnect_s: float = Field(default=0, ge=0, le=MAX_RECONNECT_S, allow_inf_nan=False)
    """How long the last client may be gone before ``abort_on_disconnect`` ends the rollout."""
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    """Where samples wait, those of a higher priority start first. What runs is left alone."""
    deadline_s: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)
    """From acceptance on; what has not ended then ends as ``abort``, with what it has and
    ``cancelled_by`` "deadline"."""
    samples: list[SampleStartBody] | None = None
    """Partials that go on: one entry per sample, prompt by prompt."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Tell so many of the most likely alternatives of each token."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """Tell how likely each token of the prompts was given those before it, after temperature,
    with so many alternatives."""
    routed_experts: bool = False
    """Tell which experts every token of prompt and response but the last was routed to, in every
    layer, for training that replays it."""
    sample_samplings: list[list[SamplingBody]] | None = None
    """Replays only: the sampling of each sample, per prompt; overrides ``sampling``."""
    replay_stop_tokens: list[list[int]] | None = None
    """Replays only: recorded lengths in tokens, per prompt and sample. The engine ends each
    response there; dispatch and planning never see them."""

    @property
    def num_samples(self) -> int:
        """Samples per prompt."""
        return self.n if self.num_started is None else self.num_started

    @property
    def stream_of(self) -> StreamOf:
        return StreamOf.TOKENS if self.stream == "tokens" else StreamOf.SAMPLES


@dataclass(frozen=True, slots=True)
class PromptLogprobsAnswer:
    """Of each token of the prompt but the first. ``ranks``: 1 is the most likely token.
    ``top``: token ids with their logprobs, most likely first."""

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top: tuple[Alternatives, ...]


@dataclass(frozen=True, slots=True)
class RoutedExpertsAnswer:
    """[tokens of prompt and response - 1, layers, experts per token] in C order; layers without
    experts have zeros. ``base64`` is null, with the reason in ``missing``, unless every row is
    there."""

    base64: str | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class SampleAnswer(SampleResult):
    """A sample; what was not asked for is null.

    Attributes:
        text: decoded from its token ids; null without a tokenizer.
        top_logprobs: per token, token ids with their logprobs, most likely first.
    """

    text: str | None = None
    top_logprobs: tuple[Alternatives, ...] | None = None
    prompt_logprobs: PromptLogprobsAnswer | None = None
    routed_experts: RoutedExpertsAnswer | None = None


@dataclass(frozen=True, slots=True)
class NewsAnswer(SampleNews):
    """New tokens of a sample, and what was asked for beside them: rows of routed experts are those
    that these tokens were made of, and the prompt's logprobs come with the first ones."""

    top_logprobs: tuple[Alternatives, ...] | None = None
    prompt_logprobs: PromptLogprobsAnswer | None = None
    routed_experts: RoutedExpertsAnswer | None = None


@dataclass(frozen=True, slots=True)
class RolloutAnswer:
    """A rollout and some of its samples.

    Attributes:
        samples: ended ones in the order in which they ended; an abort's answer has the
            unfinished ones with what they have.
        cursor: ask for samples after it to get the next ones.
        done: nothing more will come behind ``cursor``.
    """

    rollout: RolloutStatus
    samples: tuple[SampleAnswer, ...] = ()
    cursor: int = 0
    done: bool = False
