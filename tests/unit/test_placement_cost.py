from dataclasses import astuple, replace

import numpy as np
import pytest

from placement.cost import MeasuredStep, ReconfigurationCost, StepTimeModel, TimeUnit
from placement.errors import PlanError
from placement.hardware import GPUS, MODELS, Deployment

MODEL = StepTimeModel(
    fixed_s=0.005,
    experts_s=0.02,
    context_token_s=4e-8,
    multiply_sample_s=1.3e-5,
    exchange_sample_s=7e-6,
    routed_ratio=1 / 16,
)


def measured(model: StepTimeModel) -> list[MeasuredStep]:
    return [
        MeasuredStep(width, batch, batch * mean, model.step_s(width, batch, batch * mean))
        for width in (1, 2, 4, 8)
        for batch in (1, 4, 32, 256, 2048)
        for mean in (500, 4000)
    ]


def test_a_wider_group_reads_fewer_experts_each_and_exchanges() -> None:
    alone, two, eight = (MODEL.step_s(width, 16, 16 * 4000) for width in (1, 2, 8))
    assert eight < two < alone
    assert MODEL.step_s(1, 1, 0) == pytest.approx(0.005 + 0.02 / 16)


def test_a_step_is_never_faster_with_more_to_do() -> None:
    batch = np.arange(1, 500)
    assert np.all(np.diff(MODEL.steps_s(4, batch, 0)) >= 0)
    assert np.all(np.diff(MODEL.steps_s(4, 8, batch * 1000)) > 0)


def test_the_parameters_are_found_again_in_steps_that_follow_them() -> None:
    start = replace(MODEL, fixed_s=0.05, experts_s=0.3, context_token_s=0, multiply_sample_s=4e-5)
    fitted = start.fit(measured(MODEL))
    assert astuple(fitted)[:5] == pytest.approx(astuple(MODEL)[:5], rel=1e-6)


def test_noise_moves_the_fit_little_and_makes_no_term_negative() -> None:
    noise = np.random.default_rng(0)
    steps = [
        replace(step, step_s=step.step_s * float(noise.uniform(0.9, 1.1)))
        for step in measured(MODEL)
    ]
    fitted = MODEL.fit(steps)
    assert all(term >= 0 for term in astuple(fitted)[:5])
    assert fitted.step_s(4, 64, 64 * 2000) == pytest.approx(MODEL.step_s(4, 64, 64 * 2000), rel=0.1)


def test_steps_of_one_kind_fit_a_constant() -> None:
    fitted = StepTimeModel(fixed_s=1.0).fit([MeasuredStep(4, 8, 800, 0.25)] * 5)
    assert fitted.step_s(4, 8, 800) == pytest.approx(0.25)


def test_where_workers_share_cores_every_step_counts_as_one() -> None:
    counting = replace(MODEL, unit=TimeUnit.STEPS)
    assert {counting.step_s(width, 3, 500) for width in (1, 4)} == {1.0}
    assert counting.fit(measured(MODEL)).unit is TimeUnit.STEPS


def test_impossible_parameters_and_measurements_are_named() -> None:
    with pytest.raises(PlanError, match="fixed_s: is -1"):
        StepTimeModel(fixed_s=-1)
    with pytest.raises(PlanError, match="no measured steps"):
        MODEL.fit([])
    with pytest.raises(PlanError, match="kv_bytes_per_s"):
        ReconfigurationCost(1, 1, 0)


def test_a_change_costs_its_rebuild_and_what_each_taker_takes() -> None:
    cost = ReconfigurationCost(rebuild_s=2.0, expert_bytes_per_s=10.0, kv_bytes_per_s=5.0)
    assert cost.seconds(8, 8, 100, 100) == 0
    assert cost.seconds(8, 4, 80, 40) == 2 + 80 / 4 / 10 + 40 / 4 / 5
    assert cost.seconds(4, 6, 80, 0) == 2 + 80 / 2 / 10
    assert replace(cost, unit=TimeUnit.STEPS).seconds(8, 4, 80, 40) == 2


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("model", "num_workers", "memory_ratio"),
    [("qwen3-30b-a3b", 8, 0.9), ("qwen3-235b-a22b", 32, 0.9), ("kimi-k2-1t", 256, 0.7)],
)
def test_what_a_worker_holds_is_its_memory(
    gpu: str, model: str, num_workers: int, memory_ratio: float
) -> None:
    deployment = Deployment(GPUS[gpu], MODELS[model], num_workers, memory_ratio)
    budget = deployment.memory_budget()
    held = (
        budget.experts_at(num_workers) * budget.expert_bytes
        + budget.kv_memory_bytes
        + deployment.model.dense_bytes
    )
    assert held == deployment.usable_bytes
    assert 0.005 < deployment.step_time_model().step_s(num_workers, 32, 32 * 4000) < 0.1


def test_weights_that_do_not_fit_are_refused_with_what_to_change() -> None:
    with pytest.raises(PlanError, match="raise memory_ratio"):
        Deployment(GPUS["H100"], MODELS["kimi-k2-1t"], 8, 0.9)


def test_a_worker_of_two_gpus_reads_twice_as_fast_and_holds_more() -> None:
    one = Deployment(GPUS["H100"], MODELS["qwen3-235b-a22b"], 16, 0.9)
    two = replace(one, gpus_per_worker=2)
    assert two.kv_memory_bytes > 2 * one.kv_memory_bytes
    assert two.step_time_model().experts_s == one.step_time_model().experts_s / 2
