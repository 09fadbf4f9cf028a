"""How the baselines admit a sample: with the same foresight about KV as the dispatcher.

A worker keeps a reserve for what its running samples will still grow, in the same form and with
the same tuner as the dispatcher (``placement.reserve``); without it late admission preempts, and
with the full length reserved most of the KV would stay empty. So no comparison is won by a
baseline's bad memory.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placement.ids import SampleId
from placement.remaining import Remaining
from placement.reserve import Reserve, ReserveTuner
from placement.simulate.policy import Moment
from placement.simulate.workload import Ints
from placement.views import GroupView, SampleView

Floats = npt.NDArray[np.float64]

_SOMEBODY = (SampleView(SampleId("somebody"), 0, 0, 0),)  # waits: the tuner asks no more


class Admission:
    """Changes with every call: the reserve."""

    def __init__(self) -> None:
        self._tuner = ReserveTuner(Reserve())

    def tune(self, moment: Moment, waiting: bool) -> None:
        self._tuner.update(
            GroupView(
                workers=(),
                running=(),
                queued=_SOMEBODY if waiting else (),
                num_experts=moment.cluster.num_experts,
                kv_tokens_at_width=moment.cluster.kv_tokens_at_width,
                max_workers=moment.cluster.num_workers,
                floor_workers=moment.floor_workers,
                any_finished=moment.num_ended > 0,
                steps=moment.steps,
                num_preempted=moment.num_preempted,
            )
        )

    def needs(self, moment: Moment, samples: Ints) -> Floats:
        return need_tokens(moment, samples, self._tuner.reserve)

    def rooms(self, moment: Moment) -> "Rooms":
        width, running = len(moment.members), moment.states.running()
        where = positions(moment, running)
        taken = np.bincount(where, self.needs(moment, running), width)
        batch = np.bincount(where, minlength=width)
        free = np.asarray(moment.kv_capacity_tokens - taken, np.float64)
        return Rooms(free, moment.cluster.max_samples - batch)


@dataclass(eq=False)
class Rooms:
    """The members' KV and sample slots (by position), filled as samples are admitted."""

    free_tokens_W: Floats
    free_slots_W: Ints

    def slots(self, position: int) -> int:
        return max(0, int(self.free_slots_W[position]))

    def fits(self, position: int, need_tokens: float) -> bool:
        return bool(self.free_slots_W[position] > 0 and need_tokens <= self.free_tokens_W[position])

    def admit(self, position: int, need_tokens: float) -> None:
        self.free_tokens_W[position] -= need_tokens
        self.free_slots_W[position] -= 1


def need_tokens(moment: Moment, samples: Ints, reserve: Reserve) -> Floats:
    """KV that a sample has or gets at once, with its share of the reserve."""
    states, limit = moment.states, moment.workload.max_response_tokens
    generated = states.generated_N[samples]
    expected = Remaining(
        moment.beliefs.mu_N[samples],
        moment.beliefs.sigma_N[samples],
        generated.astype(np.float64),
        np.full(len(samples), float(limit)),
    ).expected_tokens()
    further = reserve.ratio * np.maximum(expected, reserve.least_tokens)
    growth = np.minimum(further, limit - generated)
    return np.asarray(states.context_tokens_N[samples] + growth)


def positions(moment: Moment, samples: Ints) -> Ints:
    """The members that running samples are on, by their position in the group."""
    members = np.array(moment.members)
    position = np.zeros(int(members.max()) + 1, np.int64)
    position[members] = np.arange(len(members))
    return np.asarray(position[moment.states.worker_N[samples]])
