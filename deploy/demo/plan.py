"""How large the demo is: the full one, and a short one for a quick check."""

from dataclasses import dataclass

from deploy.demo.trace import Trace

NUM_SLOTS = 4


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Sizes and bounds.

    Attributes:
        trace: scaled to ``max_tokens``.
        past: what an earlier policy answered to the same prompts, in the same proportion and cut
            at ``max_tokens``.
        regrown_max_tokens: of the rollout after the slots came back; None to leave it out.
        limit_s: the demo ends by then, one way or the other (shutting down not counted).
    """

    trace: Trace
    past: Trace
    max_tokens: int
    max_samples_per_worker: int
    regrown_max_tokens: int | None
    limit_s: float


def plan_demo(recorded: Trace, past: Trace, short: bool) -> DemoPlan:
    """In both, the four workers together have room for exactly all samples."""
    if short:
        recorded = recorded.first(num_prompts=8, num_samples=2)
        return DemoPlan(
            trace=recorded.scaled(256),
            past=_past(past.first(8, past.num_samples), recorded, 256),
            max_tokens=256,
            max_samples_per_worker=4,
            regrown_max_tokens=None,
            limit_s=240,
        )
    return DemoPlan(
        trace=recorded.scaled(512),
        past=_past(past, recorded, 512),
        max_tokens=512,
        max_samples_per_worker=16,
        regrown_max_tokens=32,
        limit_s=450,
    )


def _past(past: Trace, recorded: Trace, max_tokens: int) -> Trace:
    return past.scaled_as(recorded.longest_tokens, max_tokens).capped(max_tokens)
