"""How a leaver's unfinished sample gets its KV at its next worker: copied, or computed anew.

Both make the same tokens; only the time until the next one differs.
"""

from dataclasses import dataclass
from enum import StrEnum


class MovePolicy(StrEnum):
    RECOMPUTE = "recompute"
    COPY = "copy"
    AUTO = "auto"


class MoveReason(StrEnum):
    """Why a sample moves the way it does."""

    CONFIGURED = "configured"
    NO_KV = "no_kv"
    """Nothing is left to copy: it had not begun, or its worker has gone."""
    UNMEASURED = "unmeasured"
    """One of the two has never been measured on these workers: copying is tried, which costs
    nobody else's step."""
    CHEAPER = "cheaper"


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """What the copies seen so far allow to expect.

    The best of them is believed, not their mean: a copy beside a busy machine says little, and
    copies that are no longer made could never prove a bad belief wrong.

    Attributes:
        least_s: of one copy, however small.
        s_per_byte: of a large one.
    """

    least_s: float
    s_per_byte: float

    def copy_s(self, num_bytes: int) -> float:
        return max(self.least_s, num_bytes * self.s_per_byte)


@dataclass(frozen=True, slots=True)
class MoveView:
    """One sample that has to move. None: not measured yet.

    Attributes:
        kv_tokens: tokens whose KV is still at its old worker; 0: none.
        kv_bytes: of the blocks that hold them.
        prefill_s_per_token: what computing one token's KV adds to a step.
    """

    kv_tokens: int
    kv_bytes: int
    copy_speed: CopySpeed | None
    prefill_s_per_token: float | None


@dataclass(frozen=True, slots=True)
class MoveChoice:
    copies: bool
    reason: MoveReason


def choose_move(view: MoveView, policy: MovePolicy) -> MoveChoice:
    if not view.kv_tokens:
        return MoveChoice(False, MoveReason.NO_KV)
    if policy is not MovePolicy.AUTO:
        return MoveChoice(policy is MovePolicy.COPY, MoveReason.CONFIGURED)
    if view.copy_speed is None or view.prefill_s_per_token is None:
        return MoveChoice(True, MoveReason.UNMEASURED)
    recompute_s = view.kv_tokens * view.prefill_s_per_token
    return MoveChoice(view.copy_speed.copy_s(view.kv_bytes) <= recompute_s, MoveReason.CHEAPER)
