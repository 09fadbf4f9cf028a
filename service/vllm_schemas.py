"""The vLLM dialect: what clients of its token-in, token-out server send (vLLM 0.32)."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from actors.token_detail import MAX_PROMPT_TOP_LOGPROBS, MAX_TOP_LOGPROBS
from service.dialect import ANYTHING, DialectBody, TokenId
from service.generation import Wanted
from service.openai_schemas import SAMPLING_NEUTRAL, StreamOptions
from service.schemas import MAX_STOP_TOKEN_IDS, MAX_TOKENS_LIMIT, Body


class VllmParams(DialectBody):
    inside: ClassVar[str] = "sampling_params."
    neutral: ClassVar[dict[str, Any]] = {
        **SAMPLING_NEUTRAL,
        "detokenize": ANYTHING,  # output_mode says whether text is wanted
        "output_kind": ANYTHING,  # and stream, how it is told
        "stream_interval": ANYTHING,
        "flat_logprobs": (False, None),
        "logprob_token_ids": (None,),
        "skip_reading_prefix_cache": ANYTHING,
        "extra_args": (None, {}),
    }

    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    """Without it, a response may fill the context."""
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """0 gives the logprob of each token, more the most likely alternatives too."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """Tell how likely each token of the prompt was given those before it, with so many
    alternatives. Not with ``stream``."""

    def wanted(self) -> Wanted:
        """What is wanted of each response itself."""
        return Wanted(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            top_logprobs=self.logprobs or 0,
            names={name: f"{self.inside}{name}" for name in ("stop", "stop_token_ids")},
        )


class TokensBody(DialectBody):
    """A prompt of token ids, to be answered with token ids."""

    neutral: ClassVar[dict[str, Any]] = {
        "features": (None,),
        "content_parts": (None, []),
        "token_offsets": ANYTHING,
        "reasoning_ended": (None,),
        "reasoning_parser_kwargs": (None,),
        "priority": (0, None),
        "kv_transfer_params": (None,),
        "ec_transfer_params": (None,),
        # Samples share no cache that a salt could keep apart.
        "cache_salt": ANYTHING,
    }

    token_ids: list[TokenId]
    sampling_params: VllmParams = VllmParams()
    model: str | None = None
    request_id: str | None = None
    """Names the request. Repeated with the same content, it joins the one that runs."""
    return_token_ids: bool | None = None
    """Send the prompt's token ids back."""
    return_routed_experts: bool | None = None
    """Add ``routed_experts`` to every choice: base64 of a ``.npy`` file with the experts of every
    token but the last, [tokens - 1, layers, experts per token]."""
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def wanted(self) -> Wanted:
        wanted = self.sampling_params.wanted()
        return replace(
            wanted,
            prompt_logprobs=self.sampling_params.prompt_logprobs,
            routed_experts=bool(self.return_routed_experts),
            names={**wanted.names, "routed_experts": "return_routed_experts"},
        )


class AbortRequestsBody(Body):
    request_ids: list[str] | None = None
    """Without any, all requests."""
