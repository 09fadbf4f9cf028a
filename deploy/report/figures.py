"""One rollout in numbers: the same ones whether it was measured or simulated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """ "Occupied" counts every slot leased, idle or not.

    Attributes:
        freed_worker_s: of slots that were leased and given back before the end.
        used_worker_s: the part of it in which somebody else held the slot.
    """

    strategy: str
    makespan_s: float
    response_tokens: int
    steps: int
    occupied_worker_s: float
    freed_worker_s: float
    used_worker_s: float
    occupied_worker_steps: int
    tokens_per_occupied_worker_s: float
    tokens_per_occupied_worker_step: float
    throughput_tokens_per_s: float


def figures_from(
    strategy: str,
    *,
    makespan_s: float,
    response_tokens: int,
    steps: int,
    occupied_worker_s: float,
    freed_worker_s: float,
    used_worker_s: float,
    occupied_worker_steps: int,
) -> RolloutFigures:
    """With the ratios that follow."""
    return RolloutFigures(
        strategy=strategy,
        makespan_s=makespan_s,
        response_tokens=response_tokens,
        steps=steps,
        occupied_worker_s=occupied_worker_s,
        freed_worker_s=freed_worker_s,
        used_worker_s=used_worker_s,
        occupied_worker_steps=occupied_worker_steps,
        tokens_per_occupied_worker_s=ratio(response_tokens, occupied_worker_s),
        tokens_per_occupied_worker_step=ratio(response_tokens, occupied_worker_steps),
        throughput_tokens_per_s=ratio(response_tokens, makespan_s),
    )


def ratio(value: float, over: float) -> float:
    """0 where nothing was measured: whoever judges it then names what is missing."""
    return value / over if over else 0.0
