"""The receding-horizon programme: which widths, stretch by stretch, cost least.

A worker-second that is decoded or waited for costs 1, one that is given back costs 1 - v of it:
with W0 workers leased at most, a second at width W costs ``W + (1 - v)(W0 - W)``. At v = 0 only
the makespan counts, at v = 1 only what is occupied.

Dynamic programming backwards over the stretches of the grid; only the first step of the result
is acted on, and the rest is planned anew with what has been learned until then. Doubt about a
change is priced (``HYSTERESIS``), not gated: behind a threshold on the gain, waiting one more
stretch always looks nearly free, and a planner never acts.

Shapes: K = stretches, C = widths, ascending.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.horizon import Horizon, Ladder, Prices

HYSTERESIS = 1.3
"""A change costs more than its pause: it can fail, and what it was planned for can change."""

_BISECTIONS = 7  # a hundredth of the price


@dataclass(frozen=True, slots=True)
class Path:
    """A sequence of widths and what it is expected to bring, from now to the end of the load.

    Attributes:
        width_K: width during each stretch; ``width_K[0]`` is where to go now.
        seconds: decoding and changes.
        freed_worker_steps: steps of workers that were given back, counted from now.
    """

    width_K: tuple[int, ...]
    seconds: float
    freed_worker_steps: float


def cheapest_path(
    horizon: Horizon, ladder: Ladder, prices: Prices, price: float, most_workers: int
) -> Path:
    """The path of least cost that starts at the widest width of the ladder (the present one).

    Args:
        price: v, of a freed worker-second, 0 to 1.
        most_workers: W0.
    """
    width_C = np.array(ladder.widths, dtype=np.float64)
    price_C = width_C + (1 - price) * (most_workers - width_C)
    allowed_KC = prices.fits_KC.copy()
    allowed_KC[:, -1] = True  # who is here can stay, whatever is expected: there is always a path
    decode_KC = np.where(allowed_KC, prices.decode_s_KC * price_C, np.inf)
    change_KCC = HYSTERESIS * prices.change_s_KCC * price_C[:, None]
    choice_KC = np.zeros(decode_KC.shape, dtype=np.intp)
    later_C = np.zeros(len(width_C))
    for k in range(len(decode_KC) - 1, -1, -1):
        total_CC = change_KCC[k] + (decode_KC[k] + later_C)[None, :]
        # Of equally good widths the widest: it keeps all others open.
        choice_KC[k] = total_CC.shape[1] - 1 - np.argmin(total_CC[:, ::-1], axis=1)
        later_C = total_CC.min(axis=1)
    return _follow(horizon, ladder, prices, choice_KC)


def _follow(horizon: Horizon, ladder: Ladder, prices: Prices, choice_KC: NDArray[np.intp]) -> Path:
    at = len(ladder.widths) - 1
    widths, seconds, freed = [], 0.0, 0.0
    for k, (steps, choice_C) in enumerate(zip(horizon.steps, choice_KC, strict=True)):
        to = int(choice_C[at])
        seconds += float(prices.change_s_KCC[k, at, to] + prices.decode_s_KC[k, to])
        freed += float(steps) * (ladder.widths[-1] - ladder.widths[to])
        widths.append(ladder.widths[to])
        at = to
    return Path(tuple(widths), seconds, freed)


def dearest_affordable(
    horizon: Horizon, ladder: Ladder, prices: Prices, most_workers: int, most_seconds: float
) -> tuple[float, Path]:
    """The highest price at which the path still takes no longer than ``most_seconds``.

    Returns:
        the price and its path; price 0 where none is fast enough.
    """
    low, best = 0.0, cheapest_path(horizon, ladder, prices, 0.0, most_workers)
    middle, high = 1.0, 1.0
    for _ in range(_BISECTIONS):
        path = cheapest_path(horizon, ladder, prices, middle, most_workers)
        if path.seconds <= most_seconds:
            low, best = middle, path
        else:
            high = middle
        if low == high:
            break
        middle = (low + high) / 2
    return low, best
