import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.simulation.scenario import SCENARIOS, load_scenario
from deploy.simulation.traces import read_groups
from placement.errors import ConfigError

BASELINES = {
    "chunk",
    "round_robin",
    "least_loaded",
    "best_static_width",
    "idle_release",
    "half_once",
    "oracle",
}
SMALL = """\
name: small
model: qwen3-30b-a3b
gpu: H100
workers: 4
memory_ratio: 0.9
samples: 48
samples_per_prompt: 4
max_response_tokens: 1500
trace: {kind: synthetic, median_tokens: 300}
v: 0.5
"""


def simulate(tmp_path: Path, *options: str) -> Any:
    scenario, out = tmp_path / "small.yaml", tmp_path / "out" / "small.json"
    scenario.write_text(SMALL)
    result = CliRunner().invoke(
        app, ["simulate", str(scenario), "--seeds", "1", "--json", str(out), *options]
    )
    assert result.exit_code == 0, result.output
    assert "simulated" in result.output
    return json.loads(out.read_text())


def test_the_comparison_has_a_pair_of_ratios_for_every_baseline(tmp_path: Path) -> None:
    compared = simulate(tmp_path, "--v", "0.25")
    assert set(compared) == {"scenario", "v", "baselines", "bound"}
    assert (compared["scenario"], compared["v"]) == ("small", 0.25)
    assert set(compared["baselines"]) == BASELINES
    for ratios in compared["baselines"].values():
        assert set(ratios) == {"throughput_ratio", "efficiency_ratio"}
        for ratio in ratios.values():
            assert set(ratio) == {"median", "min", "max"}
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert all(0 < share["median"] <= 1.001 for share in compared["bound"].values())


def test_a_baseline_against_itself_is_even(tmp_path: Path) -> None:
    compared = simulate(tmp_path, "--policy", "chunk")
    assert compared["baselines"]["chunk"]["throughput_ratio"]["median"] == 1.0


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_of_the_checkout_holds_its_model_and_one_sample(path: Path) -> None:
    scenario = load_scenario(path.stem)
    assert scenario.name == path.stem
    workload = scenario.workload(seed=0)
    assert len(workload) == scenario.samples
    assert scenario.cluster().floor(workload.max_context_tokens) < scenario.workers
    assert len(workload.history) == len(workload) // scenario.samples_per_prompt


def test_the_responses_and_their_history_are_of_the_same_prompts() -> None:
    prompts = read_groups(28, 38)
    assert len(prompts) == 198
    assert sum(len(prompt.response_tokens) for prompt in prompts) == 1578
    assert all(prompt.history_tokens for prompt in prompts)


def test_what_is_wrong_with_a_scenario_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="30b-16-queued"):
        load_scenario("40b")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SMALL.replace("workers: 4", "workers: 0"))
    with pytest.raises(ConfigError, match=r"workers: .*greater than or equal to 1"):
        load_scenario(str(wrong))
    with pytest.raises(ConfigError, match=r"trace\.run: is 999"):
        read_groups(999, None)
