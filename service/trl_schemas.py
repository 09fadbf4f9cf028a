"""The dialect of ``trl vllm-serve``, which TRL's clients spoke until 1.13: what they send.

Later clients of TRL speak OpenAI's and vLLM's.
"""

from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from actors.token_detail import MAX_PROMPT_TOP_LOGPROBS
from placement.errors import RequestError
from service.dialect import ANYTHING, DialectBody, TokenId
from service.errors import request_error
from service.openai_schemas import Message
from service.schemas import Prompt
from service.vllm_schemas import VllmParams

_NAMED = (
    "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs",
)  # fmt: skip


class _TrlParams(VllmParams):
    inside: ClassVar[str] = "generation_kwargs."


class _Generating(DialectBody):
    """What ``/generate/`` and ``/chat/`` have in common."""

    n: int = Field(default=1, ge=1)
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = 0
    """0 gives the logprob of each token, more the most likely alternatives too, null none."""
    structured_outputs_regex: None = None
    generation_kwargs: dict[str, Any] = Field(default={})
    """More of vLLM's sampling parameters; they come before those of the same name above."""

    def params(self) -> VllmParams:
        """Raises: RequestError."""
        named = {name: getattr(self, name) for name in _NAMED}
        try:
            return _TrlParams.model_validate(named | self.generation_kwargs)
        except ValidationError as error:
            wrong = request_error(error)
            given = (wrong.field or "") in self.generation_kwargs
            raise RequestError(
                wrong.message, field=f"generation_kwargs.{wrong.field}" if given else wrong.field
            ) from error


class TrlGenerateBody(_Generating):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompts": [[72, 105]], "n": 4, "max_tokens": 64}]}
    )
    neutral: ClassVar[dict[str, Any]] = {"images": (None, [])}

    prompts: list[Prompt] = Field(min_length=1)
    """Texts or lists of token ids."""


class TrlChatBody(_Generating):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [[{"role": "user", "content": "Hi"}]]}]}
    )
    neutral: ClassVar[dict[str, Any]] = {"chat_template_kwargs": ({}, None), "tools": (None, [])}

    messages: list[list[Message]] = Field(min_length=1)
    """Conversations, each put into a prompt by the checkpoint's chat template."""


class SequenceLogprobsBody(DialectBody):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"sequences": [[72, 105, 33]], "prompt_lengths": [1], "top_logprobs": 2}]
        }
    )
    neutral: ClassVar[dict[str, Any]] = {"client_id": ANYTHING}

    sequences: list[list[TokenId]] = Field(min_length=1)
    """Prompts with their completions."""
    prompt_lengths: list[int]
    """Of each; what comes behind is told."""
    top_logprobs: int = Field(default=100, ge=1, le=MAX_PROMPT_TOP_LOGPROBS)
    temperature: float = Field(default=1.0, gt=0, le=100, allow_inf_nan=False)
    response_format: Literal["json", "binary"] = "json"

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if len(self.prompt_lengths) != len(self.sequences):
            raise RequestError(
                f"has {len(self.prompt_lengths)} entries for {len(self.sequences)} sequences; "
                "give one per sequence",
                field="prompt_lengths",
            )
        pairs = zip(self.prompt_lengths, self.sequences, strict=True)
        for number, (length, sequence) in enumerate(pairs):
            if not 0 <= length <= len(sequence):
                raise RequestError(
                    f"is {length}; its sequence has {len(sequence)} tokens",
                    field=f"prompt_lengths[{number}]",
                )
        return self
