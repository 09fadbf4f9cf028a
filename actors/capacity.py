"""What a worker's first measurements say about every width of the group."""

from dataclasses import dataclass

from actors.protocol import ModelFacts
from actors.settings import GroupSettings
from placement.errors import ConfigError, PlanError
from placement.memory import MemoryBudget, floor_workers, kv_tokens_at_width


@dataclass(frozen=True, slots=True)
class Capacity:
    """``kv_tokens_at_width`` as in ``placement.views.GroupView``; ``floor``: the fewest workers
    that hold all experts and, each, one sample of full length."""

    facts: ModelFacts
    budget: MemoryBudget
    kv_tokens_at_width: tuple[int, ...]
    floor: int


def measure_capacity(facts: ModelFacts, group: GroupSettings) -> Capacity:
    """Raises:
    ConfigError: no width that the settings allow can serve the model.
    """
    try:
        budget = MemoryBudget(
            facts.num_experts,
            group.max_workers,
            facts.expert_bytes,
            facts.kv_block_bytes,
            facts.kv_block_tokens,
            group.kv_memory_bytes,
        )
    except PlanError as error:
        raise ConfigError(str(error), field="group") from error
    table = kv_tokens_at_width(
        budget.num_experts,
        budget.max_workers,
        budget.expert_bytes,
        budget.kv_block_bytes,
        budget.kv_block_tokens,
        budget.kv_memory_bytes,
    )
    floor = floor_workers(table, facts.max_model_len)
    if floor is None:
        raise ConfigError(
            "one sample of full length does not fit on a worker of the widest group: "
            f"{budget.explain(group.max_workers, facts.max_model_len)}; raise it, or lower "
            "model.max_model_len",
            field="group.kv_memory_bytes",
        )
    return Capacity(facts, budget, table, floor)
