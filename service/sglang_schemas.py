"""The SGLang dialect: what its clients send to ``/generate`` and ``/abort_request``."""

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from actors.token_detail import MAX_TOP_LOGPROBS
from service.dialect import ANYTHING, DialectBody, TokenId
from service.generation import Wanted
from service.schemas import MAX_STOP_TOKEN_IDS, MAX_TOKENS_LIMIT, Body

DEFAULT_NEW_TOKENS = 128


class SglangParams(DialectBody):
    inside: ClassVar[str] = "sampling_params."
    neutral: ClassVar[dict[str, Any]] = {
        "min_p": (0, None),
        "min_new_tokens": (0, None),
        "frequency_penalty": (0, None),
        "presence_penalty": (0, None),
        "repetition_penalty": (1, None),
        "spaces_between_special_tokens": (True, None),
        "json_schema": (None,),
        "regex": (None,),
        "ebnf": (None,),
        "structural_tag": (None,),
        "stop_regex": (None, []),
        "logit_bias": (None, {}),
        "custom_params": (None, {}),
        "stream_interval": ANYTHING,
    }

    max_new_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS_LIMIT)
    """Without it 128, or what the context has room for. 0 scores the prompt alone."""
    n: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1, lt=1 << 31)
    """-1 and 0 keep every token."""
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Leave the stop string or token in the text."""
    sampling_seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Of a list, the first prompt's counts; those of the others derive from it."""

    def wanted(self, inside: str, body: "GenerateBody") -> Wanted:
        names = {name: f"{inside}.{name}" for name in ("stop", "stop_token_ids")}
        top_logprobs = body.top_logprobs_num or 0
        return Wanted(
            max_tokens=self.max_new_tokens,
            default_tokens=DEFAULT_NEW_TOKENS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            top_logprobs=top_logprobs if body.return_logprob else 0,
            prompt_logprobs=top_logprobs if body.scores_prompt else None,
            routed_experts=bool(body.return_routed_experts),
            names=names | {"routed_experts": "return_routed_experts"},
        )


def _one_or_many(given: Any) -> str | None:
    if isinstance(given, list):
        return "(many)" if not given or not isinstance(given[0], int) else "(ids)"
    return "(one)"


class GenerateBody(DialectBody):
    """One prompt, or a list of them; ``text`` or ``input_ids``."""

    neutral: ClassVar[dict[str, Any]] = {
        "image_data": (None, []),
        "video_data": (None, []),
        "audio_data": (None, []),
        "input_embeds": (None,),
        "token_ids_logprob": (None, []),
        "lora_path": (None,),
        "session_params": (None,),
        "return_hidden_states": (False, None),
        "custom_logit_processor": (None,),
        "log_metrics": ANYTHING,
        "bootstrap_host": (None,),
        "priority": (0, None),
    }

    text: str | list[str] | None = None
    input_ids: (
        Annotated[
            Annotated[list[TokenId], Tag("(ids)")] | Annotated[list[list[TokenId]], Tag("(many)")],
            Discriminator(
                _one_or_many,
                custom_error_type="ids_kind",
                custom_error_message="input_ids is a list of token ids, or a list of such lists",
            ),
        ]
        | None
    ) = None
    sampling_params: (
        Annotated[
            Annotated[SglangParams, Tag("(one)")] | Annotated[list[SglangParams], Tag("(many)")],
            Discriminator(_one_or_many),
        ]
        | None
    ) = None
    """For all prompts, or a list with those of each; ``n`` and ``sampling_seed`` are of all."""
    rid: str | None = None
    """Names the request; of a list, ``meta_info.id`` adds the number. Repeated with the same
    content, it joins the one that runs."""
    return_logprob: bool | None = None
    return_text_in_logprobs: bool | None = None
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """With ``return_logprob``, so many of the most likely alternatives of each token."""
    logprob_start_len: int | None = Field(default=None, ge=-1)
    """With ``return_logprob``, tell how likely the prompt's tokens from this one on were
    (``input_token_logprobs``); the first of them has none. -1 tells of the response alone."""
    return_routed_experts: bool | None = None
    """Add ``meta_info.routed_experts``: base64 of int32 with the experts of every token but the
    last, [tokens - 1, layers, experts per token]; null if a row is missing."""
    stream: bool | None = None

    @property
    def scores_prompt(self) -> bool:
        start = self.logprob_start_len
        return bool(self.return_logprob) and start is not None and start >= 0


class AbortBody(Body):
    rid: str | None = None
    abort_all: bool = False
    abort_message: str | None = None
    """Taken and not shown: the answers of aborted requests say that they were aborted."""
