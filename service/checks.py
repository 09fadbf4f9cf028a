"""What can be wrong with token ids, lengths and counts of a request, by the caller's own names.

All of it is found before anything is accepted. Every dialect asks here, so that a limit is the
same by whatever route a request comes.
"""

from collections.abc import Sequence
from typing import Protocol

from actors.rollout_api import ServedModel
from placement.errors import RequestError, UnknownIdError
from service.settings import ServiceSettings


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the service uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """The text of the prompt, while ``tokenize`` is False."""
        ...


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises: UnknownIdError, unless it is the served one or none is named."""
    if name is not None and name != model.path:
        raise UnknownIdError(f"the model {name!r} is not served; {model.path!r} is", field="model")


def need_tokenizer(tokenizer: Tokenizer | None, field: str, model: ServedModel) -> Tokenizer:
    """Raises: RequestError, for a request that has or wants text."""
    if tokenizer is None:
        raise RequestError(
            f"is a text, but {model.path} has no tokenizer; send token ids", field=field
        )
    return tokenizer


def check_counts(
    num_prompts: int, n: int, settings: ServiceSettings, *, prompts_field: str, n_field: str
) -> None:
    """Raises: RequestError."""
    if num_prompts > settings.max_prompts:
        raise RequestError(
            f"{num_prompts} prompts, but one rollout takes {settings.max_prompts}; "
            "send several rollouts or raise service.max_prompts",
            field=prompts_field,
        )
    num_samples = num_prompts * n
    if num_samples > settings.max_samples_per_rollout:
        raise RequestError(
            f"{num_prompts} prompts times n={n} are {num_samples} samples, but one rollout "
            f"takes {settings.max_samples_per_rollout}; send several rollouts or raise "
            "service.max_samples_per_rollout",
            field=n_field,
        )


def prompt_ids(
    prompt: str | Sequence[int], field: str, model: ServedModel, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The token ids of a prompt that is a text or has been tokenized already.

    Raises: RequestError.
    """
    if isinstance(prompt, str):
        prompt = need_tokenizer(tokenizer, field, model).encode(prompt)
    if not prompt:
        raise RequestError("has no tokens; a prompt needs at least one", field=field)
    check_vocabulary(prompt, field, model)
    return tuple(prompt)


def check_vocabulary(token_ids: Sequence[int], field: str, model: ServedModel) -> None:
    """Raises: RequestError."""
    for position, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise RequestError(
                f"token id {token_id} is not in the vocabulary, whose ids are "
                f"0 to {model.vocab_size - 1}",
                field=f"{field}[{position}]",
            )


def check_routing(model: ServedModel, field: str) -> None:
    """Raises: RequestError, if routed experts cannot be told."""
    if model.routing is None:
        raise RequestError(
            f"{model.path} has routers that do not tell where they route to; leave it out",
            field=field,
        )


def check_length(prompt_tokens: int, max_tokens: int, field: str, model: ServedModel) -> None:
    """Raises: RequestError."""
    if prompt_tokens + max_tokens > model.max_model_len:
        raise RequestError(
            f"has {prompt_tokens} tokens, and with max_tokens {max_tokens} needs "
            f"{prompt_tokens + max_tokens}, but this service takes {model.max_model_len}; "
            "shorten the prompt, lower max_tokens or raise model.max_model_len",
            field=field,
        )
