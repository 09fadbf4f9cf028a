"""What every dialect's request comes down to: a rollout, and how its responses are cut.

A dialect names the fields; what may be in them is decided here, in one place.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from actors.rollout_api import RolloutRequest, ServedModel
from placement.errors import RequestError
from placement.ids import RolloutId
from placement.samples import Sampling
from service.checks import (
    Tokenizer,
    check_length,
    check_routing,
    check_vocabulary,
    need_tokenizer,
)

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 256
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a response's text ends, and what of it is shown."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    only_prompt: bool = False
    """The prompt is to be scored; the one token that this takes is not shown."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A rollout to submit; ``cuts`` has one entry per prompt."""

    rollout: RolloutRequest
    id_is_given: bool
    cuts: tuple[Cut, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.rollout.prompts)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How one prompt is to be answered, in the dialect's own values.

    Attributes:
        max_tokens: None takes ``default_tokens``, as far as there is room; 0 asks for what is
            told of the prompt.
        default_tokens: None fills the context.
        names: the dialect's names of the fields here, where they differ.
    """

    max_tokens: int | None
    default_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    routed_experts: bool = False
    names: dict[str, str] = field(default_factory=dict)

    def sampling(self, prompt: tuple[int, ...], prompt_field: str, model: ServedModel) -> Sampling:
        """Raises: RequestError."""
        stop_ids = tuple(self.stop_token_ids or ())
        check_vocabulary(stop_ids, self._name("stop_token_ids"), model)
        room = model.max_model_len - len(prompt)
        default_tokens = max(1, min(room, self.default_tokens or room))
        max_tokens = default_tokens if self.max_tokens is None else max(1, self.max_tokens)
        if self.routed_experts:
            check_routing(model, self._name("routed_experts"))
        check_length(len(prompt), max_tokens, prompt_field, model)
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=max(0, self.top_k or 0),  # -1 keeps all, as 0 does
            stop_token_ids=stop_ids,
            ignore_eos=self.ignore_eos,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            routed_experts=self.routed_experts,
        )

    def cut(self, model: ServedModel, tokenizer: Tokenizer | None) -> Cut:
        """Raises: RequestError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        name = self._name("stop")
        if stop:
            need_tokenizer(tokenizer, name, model)
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"has {len(stop)} strings; a request takes {MAX_STOP_STRINGS}", field=name
            )
        for text in stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"has a string of {len(text)} characters; one has 1 to {MAX_STOP_STRING_CHARS}",
                    field=name,
                )
        return Cut(stop, self.include_stop, self.skip_special_tokens, self.max_tokens == 0)

    def _name(self, own: str) -> str:
        return self.names.get(own, own)


def make_generation(
    prompts: Sequence[tuple[tuple[int, ...], str]],
    wanted: Sequence[Wanted],
    model: ServedModel,
    tokenizer: Tokenizer | None,
    *,
    n: int,
    seed: int | None,
    request_id: str | None,
    id_field: str,
    id_prefix: str = "",
) -> Generation:
    """Args:
        prompts: token ids, and the field that they came from.
        wanted: one per prompt.

    Raises: RequestError.
    """
    if request_id is not None and not _ID.fullmatch(request_id):
        raise RequestError(
            f"is {request_id!r}; an id is 1 to 128 letters, digits and . _ : -", field=id_field
        )
    cuts = tuple(of_prompt.cut(model, tokenizer) for of_prompt in wanted)
    rollout = RolloutRequest(
        rollout_id=RolloutId(request_id or f"{id_prefix}{secrets.token_hex(12)}"),
        prompts=tuple(prompt for prompt, _ in prompts),
        num_samples=n,
        samplings=tuple(
            of_prompt.sampling(prompt, where, model)
            for (prompt, where), of_prompt in zip(prompts, wanted, strict=True)
        ),
        seed=seed_of(seed, request_id),
        terms=json.dumps([asdict(cut) for cut in cuts]),
    )
    return Generation(rollout, request_id is not None, cuts)


def seed_of(seed: int | None, request_id: str | None) -> int:
    """Of a request that names none it derives from its id, so that a repetition is the same
    request; without an id it is drawn."""
    if seed is not None:
        return seed
    if request_id is None:
        return secrets.randbits(63)
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1
