"""The machine that a simulated rollout has, and what may go wrong on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from placement.cost import ReconfigurationCost, StepTimeModel
from placement.errors import PlanError
from placement.hardware import Deployment
from placement.memory import floor_workers, kv_tokens_at_width


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Attributes:
    max_samples: most samples that one worker decodes at once.
    kv_tokens_at_width: as in ``placement.views.GroupView``.
    prefill_token_s: one token of a prompt, or of a sample that is recomputed, on one worker.
    """

    num_workers: int
    max_samples: int
    kv_tokens_at_width: tuple[int, ...]
    kv_block_tokens: int
    kv_token_bytes: int
    num_experts: int
    expert_bytes: int
    step_time: StepTimeModel
    prefill_token_s: float
    reconfiguration: ReconfigurationCost

    def floor(self, max_context_tokens: int) -> int:
        """Fewest workers that hold all experts and, each, one sample of full length.

        Raises:
            PlanError: not even all workers do.
        """
        floor = floor_workers(self.kv_tokens_at_width, max_context_tokens)
        if floor is None:
            raise PlanError(
                f"one sample of {max_context_tokens} tokens does not fit beside the experts on "
                f"{self.num_workers} workers; lower the limit or take more workers",
                field="num_workers",
            )
        return floor


def cluster_of(deployment: Deployment, max_samples: int) -> SimulatedCluster:
    budget = deployment.memory_budget()
    return SimulatedCluster(
        num_workers=deployment.num_workers,
        max_samples=max_samples,
        kv_tokens_at_width=kv_tokens_at_width(
            budget.num_experts,
            budget.max_workers,
            budget.expert_bytes,
            budget.kv_block_bytes,
            budget.kv_block_tokens,
            budget.kv_memory_bytes,
        ),
        kv_block_tokens=budget.kv_block_tokens,
        kv_token_bytes=deployment.model.kv_token_bytes,
        num_experts=deployment.model.num_experts,
        expert_bytes=deployment.model.expert_bytes,
        step_time=deployment.step_time_model(),
        prefill_token_s=deployment.prefill_token_s(),
        reconfiguration=deployment.reconfiguration_cost(),
    )


@dataclass(frozen=True, slots=True)
class Misfortunes:
    """What goes wrong, by slot number (0 .. workers - 1) and virtual time.

    Attributes:
        slow: factors on the time of a step that the worker of that slot takes part in; the
            lockstep waits for the slowest.
        late_s: leases that are granted only then.
        deaths_s: at these times a member dies: the group is given up and founded again, and all
            running samples are recomputed.
        restart_s: from a death to the new group.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    late_s: Mapping[int, float] = field(default_factory=dict)
    deaths_s: tuple[float, ...] = ()
    restart_s: float = 60.0
