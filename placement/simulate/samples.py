"""Where every sample of a simulated rollout stands, as arrays; and a stretch of lockstep steps.

Shapes: N = samples of the rollout, R = running samples, W = members of the group, J = steps of
a stretch.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placement.simulate.workload import Ints, Workload

QUEUED = -1
ENDED = -2


@dataclass(eq=False)
class SampleStates:
    """Changes as the rollout goes on.

    Attributes:
        worker_N: id of the worker it decodes on, ``QUEUED`` or ``ENDED``.
        started_N: number of its admission; who was admitted last is preempted first.
    """

    workload: Workload
    generated_N: Ints = field(init=False)
    worker_N: Ints = field(init=False)
    started_N: Ints = field(init=False)
    num_admissions: int = 0

    def __post_init__(self) -> None:
        count = len(self.workload)
        self.generated_N = np.zeros(count, np.int64)
        self.worker_N = np.full(count, QUEUED, np.int64)
        self.started_N = np.zeros(count, np.int64)

    @property
    def context_tokens_N(self) -> Ints:  # noqa: N802 - a shape suffix, as its fields have
        return self.workload.prompt_tokens_N + self.generated_N

    def running(self) -> Ints:
        """Indices, ascending."""
        return np.flatnonzero(self.worker_N >= 0)

    def queued(self) -> Ints:
        return np.flatnonzero(self.worker_N == QUEUED)

    def num_ended(self) -> int:
        return int(np.count_nonzero(self.worker_N == ENDED))

    def bind(self, sample: int, worker: int) -> None:
        self.worker_N[sample] = worker
        self.started_N[sample] = self.num_admissions
        self.num_admissions += 1

    def preempt_from(self, worker: int, kv_capacity_tokens: int) -> list[int]:
        """Queue the samples that were admitted last, until the rest can take one more step."""
        here = np.flatnonzero(self.worker_N == worker)
        here = here[np.argsort(-self.started_N[here])]
        context = self.context_tokens_N[here]
        need_tokens = int(context.sum()) + len(here)
        taken = []
        for sample, tokens in zip(here.tolist(), context.tolist(), strict=True):
            if need_tokens <= kv_capacity_tokens:
                break
            need_tokens -= tokens + 1
            self.worker_N[sample] = QUEUED
            taken.append(sample)
        return taken


@dataclass(frozen=True, eq=False)
class Stretch:
    """Steps during which nobody joins, leaves or is admitted.

    Attributes:
        batch_WJ: samples that decode, per member and step.
        context_WJ: tokens of KV they hold at the end of that step.
        ended: samples that end within it.
        full: members (positions) whose KV the step after the last would overflow.
    """

    num_steps: int
    batch_WJ: Ints
    context_WJ: Ints
    ended: Ints
    full: Ints


def look_ahead(
    states: SampleStates, members: npt.NDArray[np.int64], kv_capacity_tokens: int, most_steps: int
) -> Stretch:
    """The next steps, until ``most_steps``, the last running sample's end or the first step
    that a member has no KV for; 0 steps when that is the very next one.

    A sample with r tokens to go decodes in steps 1 .. r and holds no KV after step r.
    """
    running = states.running()
    position = np.zeros(int(members.max()) + 1, np.int64)
    position[members] = np.arange(len(members))
    worker_R = position[states.worker_N[running]]
    left_R = states.workload.response_tokens_N[running] - states.generated_N[running]
    context_R = states.context_tokens_N[running]
    num_steps = int(min(most_steps, left_R.max()))

    ending = left_R < num_steps  # those gone before the last step of the stretch
    cell = worker_R[ending] * num_steps + left_R[ending]  # absent from 0-based step ``left`` on
    shape = (len(members), num_steps)
    size = len(members) * num_steps
    gone_WJ = np.bincount(cell, minlength=size).reshape(shape).cumsum(axis=1)
    gone_context_WJ = (
        np.bincount(cell, context_R[ending], minlength=size).reshape(shape).cumsum(axis=1)
    )
    batch_W = np.bincount(worker_R, minlength=len(members))
    context_W = np.bincount(worker_R, context_R, minlength=len(members))
    batch_WJ = batch_W[:, None] - gone_WJ
    context_WJ = context_W[:, None] - gone_context_WJ + batch_WJ * np.arange(1, num_steps + 1)

    over_WJ = context_WJ > kv_capacity_tokens
    full = np.zeros(0, np.int64)
    if over_WJ.any():
        num_steps = int(np.argmax(over_WJ.any(axis=0)))
        full = np.flatnonzero(over_WJ[:, num_steps])
    return Stretch(
        num_steps=num_steps,
        batch_WJ=batch_WJ[:, :num_steps],
        context_WJ=context_WJ[:, :num_steps].astype(np.int64),
        ended=running[left_R <= num_steps],
        full=full,
    )


def take(states: SampleStates, stretch: Stretch) -> None:
    """Let the steps of the stretch happen."""
    running = states.running()
    states.generated_N[running] = np.minimum(
        states.generated_N[running] + stretch.num_steps,
        states.workload.response_tokens_N[running],
    )
    states.worker_N[stretch.ended] = ENDED
