"""What goes wrong in a scenario, from its file to what comes of it."""

from pathlib import Path

import pytest

from deploy.simulation.comparison import Task, play_task
from deploy.simulation.scenario import Scenario, load_scenario
from placement.errors import ConfigError, PlanError
from placement.simulate.contest import Entrant, Terms
from placement.simulate.outcome import Outcome
from tests.unit.test_simulate_command import SMALL


def _scenario(tmp_path: Path, misfortunes: str = "", **replaced: str) -> Scenario:
    text = SMALL
    for line in replaced.values():
        key = line.split(":")[0]
        text = "".join(
            f"{line}\n" if old.startswith(f"{key}:") else f"{old}\n" for old in text.splitlines()
        )
    path = tmp_path / "scenario.yaml"
    path.write_text(text + misfortunes)
    return load_scenario(str(path))


def _play(scenario: Scenario, entrant: Entrant = Entrant.PLANNER) -> Outcome:
    return play_task(Task(scenario, 0, entrant, Terms()))


def test_a_slow_slot_slows_every_step(tmp_path: Path) -> None:
    even = _play(_scenario(tmp_path), Entrant.ROUND_ROBIN)
    slowed = _play(
        _scenario(tmp_path, "misfortunes: {slow: [{slot: 3, factor: 2.0}]}\n"),
        Entrant.ROUND_ROBIN,
    )
    decoding_s = even.span_s - even.prefill_s
    assert slowed.span_s == pytest.approx(2 * decoding_s + even.prefill_s)


def test_a_late_slot_is_not_leased_before_its_time(tmp_path: Path) -> None:
    outcome = _play(
        _scenario(
            tmp_path,
            "misfortunes: {late: [{slot: 3, until_s: 0.5}]}\n",
            limit="max_samples_per_worker: 4",
            samples="samples: 96",
        )
    )
    leases = [occupation for occupation in outcome.occupations if occupation.slot == 3]
    assert all(lease.from_s >= 0.5 for lease in leases)
    assert {o.slot for o in outcome.occupations if o.from_s == 0.0} == {0, 1, 2}


def test_a_death_is_a_restart_of_that_length_and_no_sample_is_lost(tmp_path: Path) -> None:
    even = _play(_scenario(tmp_path))
    struck = _play(_scenario(tmp_path, "misfortunes: {deaths_s: [1.0], restart_s: 30}\n"))
    assert struck.restarts == 1
    assert struck.total_tokens == even.total_tokens
    assert struck.span_s > even.span_s + 29


def test_workers_of_several_gpus_are_fewer_and_faster(tmp_path: Path) -> None:
    single = _scenario(tmp_path)
    double = _scenario(tmp_path, "gpus_per_worker: 2\n")
    one, two = single.cluster(), double.cluster()
    assert one.num_workers == two.num_workers == 4
    assert two.kv_tokens_at_width[4] > 2 * one.kv_tokens_at_width[4]
    assert two.step_time.step_s(4, 64, 100_000) < one.step_time.step_s(4, 64, 100_000)
    assert _play(double).span_s < _play(single).span_s
    assert _play(double).num_samples == 48


@pytest.mark.parametrize(
    ("misfortunes", "words"),
    [
        ("slow: [{slot: 4, factor: 2.0}]", r"slow names the slots \[4\].*between 0 and 3"),
        ("slow: [{slot: 1, factor: 2}, {slot: 1, factor: 3}]", "name each once"),
        ("slow: [{slot: 1, factor: 0.5}]", "slow.0.factor: .*greater than or equal to 1"),
        ("late: [{slot: 0, until_s: 0}]", "late.0.until_s: .*greater than 0"),
        ("deaths_s: [-1]", "deaths_s.0: .*greater than 0"),
        ("earthquake: 1", "earthquake: Extra inputs are not permitted"),
    ],
)
def test_misfortunes_that_cannot_be_are_named(tmp_path: Path, misfortunes: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _scenario(tmp_path, f"misfortunes: {{{misfortunes}}}\n")


def test_a_group_that_starts_below_its_floor_is_refused(tmp_path: Path) -> None:
    late = ", ".join(f"{{slot: {slot}, until_s: 9}}" for slot in range(4))
    with pytest.raises(PlanError, match="leaves 0 workers at the start"):
        _play(_scenario(tmp_path, f"misfortunes: {{late: [{late}]}}\n"))
