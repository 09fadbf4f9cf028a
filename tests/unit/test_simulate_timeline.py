"""A simulated rollout is shown by the records of a measured one, and says that it is none."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.cli import app
from deploy.report.timeline import Activity, RolloutTimeline, leased_slots
from deploy.simulation.timeline import timeline_of
from placement.dispatch import plan_dispatch
from placement.release import decide_width
from placement.simulate.baselines import Baseline, Placement
from placement.simulate.cluster import Misfortunes
from placement.simulate.foresight import PredictedLengths
from placement.simulate.history import History
from placement.simulate.outcome import Outcome
from placement.simulate.policy import LivePolicy
from placement.simulate.rollout import simulate
from tests.unit.simulated import cluster, workload
from tests.unit.test_simulate_command import SMALL

QUEUED = 8200  # KV of a worker that makes samples wait


def _shown(
    kv_tokens: int = 20_000, misfortunes: Misfortunes | None = None
) -> tuple[Outcome, RolloutTimeline]:
    work, history = workload(100, limit=2000), History()
    policy = LivePolicy("today", plan_dispatch, decide_width)
    outcome = simulate(
        cluster(kv_tokens=kv_tokens),
        work,
        policy,
        PredictedLengths(work),
        misfortunes or Misfortunes(),
        history,
    )
    return outcome, timeline_of(outcome, history, 4)


def _seconds(timeline: RolloutTimeline, *activities: Activity) -> float:
    return sum(
        span.end_s - span.start_s
        for spans in timeline.slots.values()
        for span in spans
        if span.activity in activities
    )


@given(
    kv_tokens=st.sampled_from([QUEUED, 20_000]),
    deaths_s=st.lists(st.floats(0.5, 20), max_size=2),
    late_s=st.dictionaries(st.integers(2, 3), st.floats(1, 20)),
)
@settings(max_examples=10, deadline=None)
def test_what_is_drawn_adds_up_to_what_was_counted(
    kv_tokens: int, deaths_s: list[float], late_s: dict[int, float]
) -> None:
    misfortunes = Misfortunes(deaths_s=tuple(deaths_s), late_s=late_s, restart_s=3.0)
    outcome, timeline = _shown(kv_tokens, misfortunes)
    leased_s = _seconds(timeline, Activity.DECODING, Activity.IDLE)
    assert leased_s == pytest.approx(outcome.occupied_worker_s)
    points = leased_slots(timeline)
    drawn_s = sum(count * (until_s - at_s) for (at_s, count), (until_s, _) in pairwise(points))
    assert drawn_s == pytest.approx(outcome.occupied_worker_s)
    assert points[-1][1] == 0
    assert timeline.figures.freed_worker_s == pytest.approx(_seconds(timeline, Activity.FREED))
    for spans in timeline.slots.values():
        used = sorted(
            (s for s in spans if s.activity is not Activity.RECONFIGURING), key=lambda s: s.start_s
        )
        for before, after in pairwise(used):
            assert before.end_s <= after.start_s + 1e-6, "a slot is used for one thing at a time"


def test_samples_become_fewer_until_none_is_left_at_the_end() -> None:
    outcome, timeline = _shown()
    times_s, counts = zip(*timeline.active_samples, strict=True)
    assert (times_s[0], counts[0]) == (0.0, outcome.num_samples)
    assert list(times_s) == sorted(times_s)
    assert all(a > b for a, b in pairwise(counts))
    assert counts[-1] == 0
    assert times_s[-1] == pytest.approx(outcome.span_s)


def test_a_change_is_shown_with_the_steps_that_came_after_it() -> None:
    outcome, timeline = _shown()
    assert timeline.changes
    for shown, change in zip(timeline.changes, outcome.changes, strict=True):
        assert shown.measured_steps == outcome.steps - change.step > 0
    last = timeline.changes[-1]
    freed = [
        span
        for spans in timeline.slots.values()
        for span in spans
        if span.activity is Activity.FREED
    ]
    assert max(span.start_s for span in freed) == pytest.approx(last.ended_s)


def test_a_worker_that_has_run_empty_is_idle_and_not_decoding() -> None:
    # A fixed group with room for all: idle is only who has run empty.
    work, history = workload(100, limit=2000), History()
    policy = Baseline("static", Placement.ROUND_ROBIN)
    outcome = simulate(cluster(), work, policy, PredictedLengths(work), history=history)
    assert outcome.idle_worker_s > 0.05 * outcome.occupied_worker_s
    idle_s = _seconds(timeline_of(outcome, history, 4), Activity.IDLE)
    assert idle_s == pytest.approx(outcome.idle_worker_s)


def test_the_command_writes_numbers_and_picture_and_calls_them_simulated(tmp_path: Path) -> None:
    scenario, folder = tmp_path / "small.yaml", tmp_path / "out" / "timeline"
    scenario.write_text(SMALL)
    result = CliRunner().invoke(
        app, ["simulate", str(scenario), "--seeds", "1", "--timeline", str(folder)]
    )
    assert result.exit_code == 0, result.output
    assert "SIMULATED: small (qwen3-30b-a3b, 4 workers of 1 x H100)" in result.output
    plain = json.loads((folder / "timeline.json").read_text())
    assert plain["origin"] == "simulated"
    assert "nothing was measured" in plain["note"]
    assert [rollout["name"] for rollout in plain["rollouts"]] == ["chunk", "planner"]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
