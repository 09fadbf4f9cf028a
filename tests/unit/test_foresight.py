"""The planning rules under the live coordinator, among fakes and in virtual time."""

import dataclasses
from pathlib import Path

import pytest

from actors.admission import make_samples
from actors.foresight import Foresight
from actors.journal import MemoryJournal
from actors.length_history import read_length_history, write_length_history
from actors.measured_costs import MeasuredCosts
from actors.rollout import Rollout
from actors.rollout_api import OperationStatus, RolloutRequest, ServedModel, Strategy
from actors.sample_record import SampleRecord, key_of_prompt
from actors.settings import PlanningSettings, RuntimeSettings
from placement.cost import TimeUnit
from placement.errors import ConfigError
from placement.ids import RolloutId, SampleId, WorkerId
from placement.lengths import LengthPredictor
from placement.samples import FinishReason, Sample
from placement.views import LengthBelief
from tests.unit.coordinator_harness import (
    World,
    all_results,
    check_tokens,
    check_usage_adds_up,
    make_request,
    make_settings,
    started,
)
from tests.unit.fake_cluster import FACTS
from tests.unit.virtual_time import run

LENGTHS = [5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 30, 35, 40, 60, 100, 140]


def planning(**changes: object) -> RuntimeSettings:
    values = {"policy": "planner", "unit": "steps", "replan_steps": 4} | changes
    return make_settings().model_copy(update={"planning": PlanningSettings.model_validate(values)})


def knowing(path: Path, request: RolloutRequest, lengths: list[int]) -> None:
    """A history in which each prompt was answered at these lengths, four times."""
    predictor = LengthPredictor()
    for prompt, tokens in zip(request.prompts, lengths, strict=True):
        for _ in range(4):
            predictor.observe(key_of_prompt(prompt), tokens)
    predictor.begin_rollout()
    write_length_history(path, predictor.history())


def releases(operations: list[OperationStatus]) -> list[OperationStatus]:
    return [op for op in operations if len(op.new_members) < len(op.old_members)]


def without_replay(request: RolloutRequest) -> RolloutRequest:
    """It decodes to its limit of tokens."""
    return dataclasses.replace(request, replay_stop_tokens=None)


def test_each_release_is_held_against_the_steps_that_came(tmp_path: Path) -> None:
    async def main() -> None:
        world, path = World(), tmp_path / "history.json"
        request = make_request("r", LENGTHS)
        knowing(path, request, LENGTHS)
        async with started(world, planning(length_history=str(path))) as coordinator:
            await coordinator.submit(request)
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            await check_usage_adds_up(coordinator, "r")
            done = releases(await coordinator.operations())
            assert done
            steps = (await coordinator.status(RolloutId("r"))).usage.steps
            for op in done:
                assert op.predicted is not None
                assert op.measured_steps is not None
                assert op.steps_error_ratio is not None
                assert 0 < op.measured_steps < steps
                assert abs(op.steps_error_ratio) < 0.25

    run(main())


def test_with_known_lengths_each_prediction_is_within_a_tenth_of_what_came() -> None:
    async def main() -> None:
        world = World()
        async with started(world, planning(known_lengths=True)) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            done = releases(await coordinator.operations())
            assert len(done) >= 2
            for op in done:
                assert op.steps_error_ratio is not None
                assert abs(op.steps_error_ratio) <= 0.1

    run(main())


def test_lengths_are_known_of_replays_only_and_only_where_that_is_asked_for() -> None:
    replayed, own = make_request("r", [30] * 4), without_replay(make_request("own", [30] * 4))
    for known in (True, False):
        foresight = Foresight(planning(known_lengths=known))
        beliefs = []
        for request in (replayed, own):
            samples = make_samples(request, ServedModel("model", 100, 200, False, ()))
            record = next(iter(Rollout(request, samples, 0, 0.0).records.values()))
            beliefs.append(foresight.belief_of(record))
        assert (beliefs[0] == LengthBelief.certain(30)) == known
        assert beliefs[1] == foresight.belief(key_of_prompt(own.prompts[0]))


def test_a_group_that_plans_is_far_narrower_than_one_in_which_nobody_leaves() -> None:
    async def main() -> None:
        world = World()
        async with started(world, planning()) as coordinator:
            for name, strategy in (("fixed", Strategy.STATIC), ("plans", Strategy.ELASTIC)):
                await coordinator.submit(make_request(name, LENGTHS, strategy=strategy))
                check_tokens(await all_results(coordinator, name), LENGTHS)
            fixed = (await coordinator.status(RolloutId("fixed"))).usage
            plans = (await coordinator.status(RolloutId("plans"))).usage
            assert plans.steps <= fixed.steps * 1.02
            assert plans.occupied_worker_steps < fixed.occupied_worker_steps / 1.5

    run(main())


def test_no_more_releases_than_allowed_happen_in_a_load_and_the_next_one_has_its_own() -> None:
    async def main() -> None:
        world = World()
        async with started(world, planning(max_changes=1)) as coordinator:
            for name in ("one", "two"):
                await coordinator.submit(make_request(name, LENGTHS))
                check_tokens(await all_results(coordinator, name), LENGTHS)
            assert len(releases(await coordinator.operations())) == 2

    run(main())


def test_by_the_first_rule_nothing_is_predicted() -> None:
    async def main() -> None:
        world = World()
        async with started(world, planning(policy="first_rule")) as coordinator:
            await coordinator.submit(make_request("r", LENGTHS))
            await all_results(coordinator, "r")
            for op in releases(await coordinator.operations()):
                assert op.predicted is None
                assert op.measured_steps is not None
                assert op.steps_error_ratio is None

    run(main())


def test_what_was_learned_is_written_and_a_replay_teaches_nothing_that_lasts(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        world, path = World(), tmp_path / "history.json"
        async with started(world, planning(length_history=str(path))) as coordinator:
            replayed = make_request("replayed", LENGTHS)
            await coordinator.submit(replayed)
            await all_results(coordinator, "replayed")
            assert not path.exists()
            own = without_replay(make_request("own", [30] * 16, max_tokens=30))
            await coordinator.submit(own)
            await all_results(coordinator, "own")
            known = {past.prompt_key for past in read_length_history(path).prompts}
            assert known == {key_of_prompt(prompt) for prompt in own.prompts}

    run(main())


def test_a_coordinator_that_comes_back_plans_on_with_what_has_ended() -> None:
    async def main() -> None:
        world, journal = World(), MemoryJournal()
        first = world.coordinator(planning(), journal)
        await first.start()
        await first.submit(make_request("r", LENGTHS))
        await first.results(RolloutId("r"), 0, 30.0, 7)
        await world.coordinator_dies()
        async with started(world, planning(), journal) as coordinator:
            check_tokens(await all_results(coordinator, "r"), LENGTHS)
            assert releases(await coordinator.operations())

    run(main())


def test_a_damaged_history_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="is not a length history"):
        Foresight(planning(length_history=str(path)))


def test_beliefs_are_not_renewed_for_every_token() -> None:
    foresight = Foresight(planning(replan_steps=50))
    request = make_request("r", [100] * 100)
    rollout = Rollout(
        request,
        tuple(
            Sample(SampleId(f"r/{i}/0"), prompt, request.samplings[0], i)
            for i, prompt in enumerate(request.prompts)
        ),
        0,
        0.0,
    )
    records = list(rollout.records.values())
    asked = 0

    def running() -> list[SampleRecord]:
        nonlocal asked
        asked += 1
        return [r for r in records if r.finish_reason is None]

    for step in range(1, 101):
        for record in records:
            record.token_ids.append(1)
        if step == 10:
            rollout.end(records[0], FinishReason.STOP, "", 1.0)
            foresight.ended(records[0])
        ended = int(step >= 10)
        foresight.renew(running, step, ended)
    assert asked <= 100 // 50 + 50  # an ending is looked at until the next renewal
    before = foresight.belief(records[1].prompt_key)
    foresight.renew(running, 150, 1)
    assert foresight.belief(records[1].prompt_key) != before


def test_steps_are_priced_as_measured_or_alike_where_they_are_the_unit() -> None:
    request = make_request("r", [100] * 8)
    rollout = Rollout(
        request,
        tuple(
            Sample(SampleId(f"r/{i}/0"), prompt, request.samplings[0], i)
            for i, prompt in enumerate(request.prompts)
        ),
        0,
        0.0,
    )
    records = list(rollout.records.values())
    for i, record in enumerate(records):
        record.place(WorkerId(i % 4), 0.0)
    seconds = MeasuredCosts(TimeUnit.SECONDS, can_copy=False)
    steps = MeasuredCosts(TimeUnit.STEPS, can_copy=False)
    for width, step_s in ((4, 0.02), (2, 0.04)) * 8:
        for measured in (seconds, steps):
            measured.add_steps(width, [step_s] * 16, lambda: records)
    seconds.add_change(0.3)
    fitted = seconds.costs(FACTS, None, None)
    assert fitted.step_time.step_s(4, 2, 6) == pytest.approx(0.02, rel=0.05)
    assert fitted.step_time.step_s(2, 4, 6) == pytest.approx(0.04, rel=0.05)
    assert fitted.change.seconds(4, 2, 1e9, 0) == 0.3
    sparse = seconds.costs(dataclasses.replace(FACTS, experts_per_token=4), None, None)
    assert sparse.step_time.routed_ratio == 0.25
    assert steps.costs(FACTS, None, None).step_time.step_s(2, 4, 6) == 1.0


def test_steps_are_the_unit_where_workers_share_cores_and_seconds_where_they_do_not() -> None:
    on_cpu = dataclasses.replace(FACTS, on_cpu=True)
    automatic = MeasuredCosts(None, can_copy=True)
    assert automatic.costs(FACTS, 0.1, 1e9).step_time.unit is TimeUnit.SECONDS
    costs = automatic.costs(on_cpu, 0.1, 1e9)
    assert costs.step_time.unit is costs.change.unit is TimeUnit.STEPS
    assert costs.recompute_token_s == 0.0
    chosen = MeasuredCosts(TimeUnit.SECONDS, can_copy=True)
    assert chosen.costs(on_cpu, 0.1, 1e9).step_time.unit is TimeUnit.SECONDS
