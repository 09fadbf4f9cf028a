"""The OpenAI dialect: what its clients send to ``/v1/completions`` and ``/v1/chat/completions``.

Extensions have vLLM's names: ``stop_token_ids``, ``ignore_eos``, ``top_k``, ``return_token_ids``
and so on.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from actors.token_detail import MAX_PROMPT_TOP_LOGPROBS, MAX_TOP_LOGPROBS
from service.dialect import ANYTHING, DialectBody, TokenId
from service.schemas import MAX_STOP_TOKEN_IDS, MAX_TOKENS_LIMIT

DEFAULT_COMPLETION_TOKENS = 16

SAMPLING_NEUTRAL: dict[str, Any] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_p": (0, None),
    "min_tokens": (0, None),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "structured_outputs": (None,),
    "spaces_between_special_tokens": (True, None),
}
"""Ways to draw tokens that vLLM has and this service has not."""

_NEUTRAL: dict[str, Any] = {
    **SAMPLING_NEUTRAL,
    "length_penalty": (1, None),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False, None),
    "response_format": (None, {"type": "text"}),
    "priority": (0, None),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "user": ANYTHING,
    "metadata": ANYTHING,
    "session_id": ANYTHING,
    # Samples share no cache that a salt could keep apart.
    "cache_salt": ANYTHING,
}


class StreamOptions(DialectBody):
    inside: ClassVar[str] = "stream_options."
    neutral: ClassVar[dict[str, Any]] = {
        "continuous_usage_stats": (False, None),
        "include_obfuscation": (False, None),
    }

    include_usage: bool | None = None
    """End the stream with an event that has the usage and no choices."""


class OpenAIBody(DialectBody):
    """What both kinds of completion take."""

    model: str | None = None
    """As ``/v1/models`` names it; absent means the one that is served."""
    n: int | None = Field(default=None, ge=1)
    """Responses per prompt; 1 by default."""
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    """0 is greedy; 1 by default."""
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """-1 and 0 keep every token."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """The noise of every response derives from it."""
    stop: str | list[str] | None = None
    """A response ends with the token that completes one of these. Its token ids and logprobs end
    there; its text ends before the string."""
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    """Names the request (the header ``X-Request-Id`` does so too). Repeated with the same
    content, it joins the one that runs and decodes nothing twice."""
    return_token_ids: bool | None = None
    """Add ``token_ids`` to every choice, and ``prompt_token_ids``."""
    return_tokens_as_token_ids: bool | None = None
    """In logprobs, name tokens ``token_id:17`` instead of by their text."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_PROMPT_TOP_LOGPROBS)
    """Tell how likely each token of the prompt was given those before it, with so many
    alternatives. Not with ``stream``."""
    return_routed_experts: bool | None = None
    """Add ``routed_experts`` to every choice: base64 of a ``.npy`` file with the experts of every
    token but the last, [tokens - 1, layers, experts per token]."""


def _prompt_kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "(text)"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else None
    if isinstance(first, str):
        return "(texts)"
    return "(batch)" if isinstance(first, list) else "(ids)"


class CompletionBody(OpenAIBody):
    neutral: ClassVar[dict[str, Any]] = {
        **_NEUTRAL,
        "best_of": (None, 1),
        "suffix": (None, ""),
        "add_special_tokens": (True, None),
    }

    prompt: Annotated[
        Annotated[str, Tag("(text)")]
        | Annotated[list[str], Tag("(texts)")]
        | Annotated[list[TokenId], Tag("(ids)")]
        | Annotated[list[list[TokenId]], Tag("(batch)")],
        Discriminator(
            _prompt_kind,
            custom_error_type="prompt_kind",
            custom_error_message="a prompt is a text, token ids, or a list of either",
        ),
    ]
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS_LIMIT)
    """Without it 16, or what the context has room for. 0 scores the prompt alone."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """0 gives the logprob of each token, more the most likely alternatives too."""
    echo: bool | None = None
    """Put the prompt's text before the response's, and its logprobs before the response's if
    those are asked for."""


class TextPart(DialectBody):
    inside: ClassVar[str] = "messages[].content[]."

    type: Literal["text"]
    text: str


class Message(DialectBody):
    inside: ClassVar[str] = "messages[]."
    neutral: ClassVar[dict[str, Any]] = {
        name: (None, [])
        for name in ("name", "refusal", "tool_calls", "function_call", "audio", "annotations")
    }

    role: str
    content: str | list[TextPart]

    def as_template_input(self) -> dict[str, str]:
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(OpenAIBody):
    neutral: ClassVar[dict[str, Any]] = {
        **_NEUTRAL,
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": ANYTHING,
        "echo": (False, None),
        "continue_final_message": (False, None),
        "add_special_tokens": (False, None),
        "chat_template": (None,),
        "chat_template_kwargs": (None, {}),
        "documents": (None, []),
        "reasoning_effort": (None,),
        "modalities": (None, ["text"]),
    }

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS_LIMIT)
    """Goes before ``max_tokens``. Without both, a response may fill the context."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """With ``logprobs``, so many of the most likely alternatives of each token."""
    add_generation_prompt: bool = True
