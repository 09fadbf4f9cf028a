"""What has to be there before the demo's service starts: the recorded lengths, a tiny model, what
is known of the prompts' past, and the settings that follow from them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.length_history import write_length_history
from actors.settings import GroupSettings, ModelSettings, PlanningSettings
from deploy.config import FlexFloorConfig
from deploy.demo.machine import gpu_names
from deploy.demo.plan import NUM_SLOTS, DemoPlan, plan_demo
from deploy.demo.stage import free_port
from deploy.demo.trace import PAST_PATH, PAST_SHA256, load_trace
from deploy.demo.workload import Workload, kv_memory_bytes, read_model_config
from deploy.make_model import make_model
from service.settings import ServiceSettings

MODEL_NAME, HISTORY_NAME = "model", "length_history.json"
REPLAN_STEPS = 8
"""The demo's responses are a hundred times shorter than what they stand for."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Attributes:
    history_path: of the file with the prompts' past; the service will learn into it.
    """

    plan: DemoPlan
    workload: Workload
    model_dir: Path
    history_path: Path


def prepare(out_dir: Path, short: bool) -> Prepared:
    """Make what is missing in ``out_dir``; the past is always written anew.

    Raises:
        ConfigError: the checkout lacks a trace, or has another one.
    """
    plan = plan_demo(load_trace(), load_trace(PAST_PATH, PAST_SHA256), short)
    out_dir.mkdir(parents=True, exist_ok=True)
    model_dir, history_path = out_dir / MODEL_NAME, out_dir / HISTORY_NAME
    if not (model_dir / "config.json").is_file():
        make_model(model_dir)
    vocab_size = int(read_model_config(model_dir)["vocab_size"])
    workload = Workload(plan.trace, plan.max_tokens, vocab_size)
    write_length_history(history_path, workload.length_history(plan.past))
    return Prepared(plan, workload, model_dir, history_path)


def configure(prepared: Prepared, **planning: Any) -> FlexFloorConfig:
    """Args:
    planning: settings of that section that differ from the demo's.
    """
    plan, workload = prepared.plan, prepared.workload
    kv_bytes = kv_memory_bytes(
        read_model_config(prepared.model_dir),
        NUM_SLOTS,
        plan.max_samples_per_worker,
        workload.max_sample_tokens,
    )
    own = {
        "policy": "planner",
        "replan_steps": REPLAN_STEPS,
        "length_history": str(prepared.history_path.resolve()),
    }
    return FlexFloorConfig(
        model=ModelSettings(
            path=str(prepared.model_dir.resolve()),
            max_model_len=workload.max_sample_tokens,
            exact=not gpu_names(),  # no CUDA kernels are proven to keep its promise
        ),
        group=GroupSettings(
            max_workers=NUM_SLOTS,
            max_samples_per_worker=plan.max_samples_per_worker,
            kv_memory_bytes=kv_bytes,
            # After the last sample the group wants its slots back, as soon as they are free.
            idle_workers="all",
        ),
        planning=PlanningSettings.model_validate({**own, **planning}),
        service=ServiceSettings(port=free_port()),
        namespace="flexfloor-demo",
    )
