"""A scenario file: model, hardware, batch, trace, limits and misfortunes of a simulated rollout."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deploy.simulation.traces import read_groups, read_production
from placement.errors import ConfigError
from placement.hardware import GPUS, MODELS, Deployment
from placement.simulate.cluster import Misfortunes, SimulatedCluster, cluster_of
from placement.simulate.workload import Workload, resample, synthetic_prompts

SCENARIOS = Path(__file__).parents[2] / "benchmarks" / "scenarios"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GroupedTrace(_Record):
    """Recorded groups, and an earlier run on the same prompts as history."""

    kind: Literal["groups"] = "groups"
    run: int
    history_run: int | None = None


class ProductionTrace(_Record):
    """Requests of a production service, one response each."""

    kind: Literal["production"]


class SyntheticTrace(_Record):
    """Log-normal lengths."""

    kind: Literal["synthetic"]
    median_tokens: float = 3000.0
    between_sigma: float = 0.8
    within_sigma: float = 0.6


Trace = Annotated[GroupedTrace | ProductionTrace | SyntheticTrace, Field(discriminator="kind")]


class GpuName(StrEnum):
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"


class SlowSlot(_Record):
    """Every step that the worker of this slot takes part in takes so many times as long."""

    slot: int = Field(ge=0)
    factor: float = Field(ge=1)


class LateSlot(_Record):
    """The lease of this slot is granted only then."""

    slot: int = Field(ge=0)
    until_s: float = Field(gt=0)


class PlannedMisfortunes(_Record):
    """What goes wrong, for whoever takes part. Slots count from 0; times are virtual.

    Attributes:
        deaths_s: when a member dies: the group is founded again and everything recomputed.
        restart_s: from a death to the new group.
    """

    slow: tuple[SlowSlot, ...] = ()
    late: tuple[LateSlot, ...] = ()
    deaths_s: tuple[Annotated[float, Field(gt=0)], ...] = ()
    restart_s: float = Field(60.0, ge=0)

    def simulated(self) -> Misfortunes:
        return Misfortunes(
            slow={entry.slot: entry.factor for entry in self.slow},
            late_s={entry.slot: entry.until_s for entry in self.late},
            deaths_s=self.deaths_s,
            restart_s=self.restart_s,
        )


class Scenario(_Record):
    """``v`` is the price at which the scenario's ratios are published."""

    name: str
    model: Literal["qwen3-30b-a3b", "qwen3-235b-a22b", "kimi-k2-1t"]
    gpu: GpuName
    workers: int = Field(ge=1)
    gpus_per_worker: int = Field(1, ge=1)
    memory_ratio: float = Field(gt=0, le=1)
    max_samples_per_worker: int = Field(1024, ge=1)
    samples: int = Field(ge=1)
    samples_per_prompt: int = Field(8, ge=1)
    max_response_tokens: int = Field(32768, ge=1)
    trace: Trace
    v: float = Field(0.5, ge=0, le=1)
    misfortunes: PlannedMisfortunes = PlannedMisfortunes()

    @model_validator(mode="after")
    def _slots_are_there(self) -> Self:
        for kind in ("slow", "late"):
            slots = [entry.slot for entry in getattr(self.misfortunes, kind)]
            if len(set(slots)) < len(slots) or max(slots, default=0) >= self.workers:
                raise ValueError(
                    f"misfortunes.{kind} names the slots {slots}; name each once, between 0 and "
                    f"{self.workers - 1}"
                )
        return self

    def cluster(self) -> SimulatedCluster:
        deployment = Deployment(
            GPUS[self.gpu],
            MODELS[self.model],
            self.workers,
            self.memory_ratio,
            self.gpus_per_worker,
        )
        return cluster_of(deployment, self.max_samples_per_worker)

    def workload(self, seed: int) -> Workload:
        per_prompt, trace = self.samples_per_prompt, self.trace
        match trace:
            case GroupedTrace():
                prompts = read_groups(trace.run, trace.history_run)
            case ProductionTrace():
                prompts, per_prompt = read_production(), 1
            case SyntheticTrace():
                prompts = synthetic_prompts(
                    -(-self.samples // per_prompt),
                    per_prompt,
                    seed,
                    trace.median_tokens,
                    trace.between_sigma,
                    trace.within_sigma,
                )
        return resample(prompts, self.samples, per_prompt, self.max_response_tokens, seed)


def load_scenario(name: str) -> Scenario:
    """A scenario of ``benchmarks/scenarios`` by its name, or any by its path.

    Raises:
        ConfigError: no such scenario, or what is wrong in it.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else SCENARIOS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in SCENARIOS.glob("*.yaml"))) or "none"
        raise ConfigError(
            f"no scenario at {path}; the checkout has {known}, or give a path", field="scenario"
        )
    tree: Any = yaml.safe_load(path.read_text())
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{first['msg']} in {path.name}", field=where or "scenario") from error
