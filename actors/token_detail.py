"""What is told of a sample's tokens beside ids and logprobs, if the caller asked for it.

Per token of the response, so that a stretch of it is cut and joined as the ids are: the most
likely alternatives, and the experts that its making was routed to. Once per sample, with the
first token: how likely the prompt's own tokens were.

Rows of routed experts: making the first token of a response feeds the whole prompt, which is a
row per prompt token; making each further token feeds the one before. The last token is never
fed, so a response has exactly one row less than prompt and response have tokens.

Bytes, not arrays: records compare, pickle and travel as they are.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Alternatives = tuple[tuple[int, float], ...]
"""Token ids with their logprobs, most likely first; only tokens that could have been drawn."""

MAX_TOP_LOGPROBS = 20
"""Alternatives per token of a response: they are kept for as long as the rollout is."""
MAX_PROMPT_TOP_LOGPROBS = 128
"""Alternatives per token of a prompt, which distillation asks for by the hundred."""


@dataclass(frozen=True, slots=True)
class RoutingLayout:
    """What one row of routed experts is: [layers, top_k] of ``dtype``, in C order.

    ``layers`` counts all of the model's layers; those without experts have zeros.
    """

    layers: int
    top_k: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        return self.layers * self.top_k * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of each token of the prompt but the first, given those before it, after temperature.

    Attributes:
        logprobs: float32 [tokens - 1].
        ranks: int32 [tokens - 1]; 1 is the most likely token.
        num_top: alternatives per token.
        top_ids, top_logprobs: int32 and float32 [tokens - 1, num_top], most likely first.
    """

    logprobs: bytes
    ranks: bytes
    num_top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    def chosen(self) -> list[tuple[float, int]]:
        """Logprob and rank of each."""
        logprobs = np.frombuffer(self.logprobs, np.float32).tolist()
        return list(zip(logprobs, np.frombuffer(self.ranks, np.int32).tolist(), strict=True))

    def alternatives(self) -> list[Alternatives]:
        count = len(self.logprobs) // np.dtype(np.float32).itemsize
        ids = np.frombuffer(self.top_ids, np.int32).reshape(count, self.num_top)
        logprobs = np.frombuffer(self.top_logprobs, np.float32).reshape(count, self.num_top)
        return [
            tuple(zip(row, values, strict=True))
            for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """Of a stretch of a response. What was not asked for is empty.

    Attributes:
        top_logprobs: per token of the stretch.
        routed: per token of the stretch, the rows that its making computed.
        layout: of a row; None: routed experts were not asked for.
        prompt: in the stretch that begins the response.
    """

    top_logprobs: tuple[Alternatives, ...] = ()
    routed: tuple[bytes, ...] = ()
    layout: RoutingLayout | None = None
    prompt: PromptScores | None = None

    def cut(self, start: int, end: int | None = None) -> "TokenDetail":
        """Of the tokens from ``start`` to ``end`` of this stretch."""
        return TokenDetail(
            self.top_logprobs[start:end],
            self.routed[start:end],
            self.layout,
            self.prompt if start == 0 else None,
        )


def joined(before: TokenDetail | None, after: TokenDetail | None) -> TokenDetail | None:
    """Of two stretches, one right behind the other."""
    if before is None or after is None:
        return before or after
    return TokenDetail(
        before.top_logprobs + after.top_logprobs,
        before.routed + after.routed,
        before.layout or after.layout,
        before.prompt or after.prompt,
    )


@dataclass(slots=True)
class DetailSoFar:
    """What has come of one response."""

    top_logprobs: list[Alternatives] = field(default_factory=list)
    routed: list[bytes] = field(default_factory=list)
    layout: RoutingLayout | None = None
    prompt: PromptScores | None = None

    def add(self, detail: TokenDetail) -> None:
        self.top_logprobs += detail.top_logprobs
        self.routed += detail.routed
        self.layout = self.layout or detail.layout
        self.prompt = self.prompt or detail.prompt

    def between(self, start: int, stop: int | None = None) -> TokenDetail | None:
        """Of the tokens from ``start`` to ``stop``; None: nothing was asked for."""
        if not (self.top_logprobs or self.layout or self.prompt):
            return None
        return TokenDetail(
            tuple(self.top_logprobs[start:stop]),
            tuple(self.routed[start:stop]),
            self.layout,
            self.prompt if start == 0 else None,
        )


def routed_rows(
    detail: TokenDetail | None, num_tokens: int
) -> npt.NDArray[np.unsignedinteger] | None:
    """[num_tokens - 1, layers, top_k], or None unless exactly so many rows were told.

    Args:
        detail: of a whole response.
        num_tokens: of prompt and response.
    """
    if detail is None or detail.layout is None:
        return None
    layout, rows = detail.layout, b"".join(detail.routed)
    if len(rows) != (num_tokens - 1) * layout.row_bytes:
        return None
    flat = np.frombuffer(rows, dtype=layout.dtype)
    return flat.reshape(num_tokens - 1, layout.layers, layout.top_k)
