import json
from pathlib import Path
from typing import Any

import pytest

from actors.engines.environment import FIXED_ENGINE_ARGS
from actors.model_check import check_model, find_problems
from actors.settings import GroupSettings, ModelSettings, RuntimeSettings
from placement.errors import ConfigError, FlexFloorError, ModelRefusedError

PROVEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}


def settings(path: str = "model", **model: Any) -> RuntimeSettings:
    return RuntimeSettings(
        model=ModelSettings(path=path, **model), group=GroupSettings(max_workers=4)
    )


def the_problem(config: dict[str, Any], **model: Any) -> FlexFloorError:
    (problem,) = find_problems(config, settings(**model))
    return problem


def test_a_proven_model_has_no_problems() -> None:
    harmless = {"tensor_parallel_size": 1, "max_num_batched_tokens": 2048}
    assert find_problems(PROVEN, settings(engine=harmless)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_experts": None}, "not a mixture of experts"),
        ({"num_experts": 1}, "not a mixture of experts"),
        ({"architectures": ["MixtralForCausalLM"]}, "not proven"),
        ({"architectures": None}, "not proven"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2"),
        ({"shared_expert_intermediate_size": 512}, "shared experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method fp8"),
    ],
)
def test_a_model_that_is_not_proven_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    problem = the_problem(PROVEN | change)
    assert isinstance(problem, ModelRefusedError)
    assert problem.field == "model.path"
    assert words in problem.message


def test_fewer_experts_than_workers_are_refused() -> None:
    problem = the_problem(PROVEN | {"num_experts": 3})
    assert problem.field == "group.max_workers"
    assert "set it to 3 or less" in problem.message


def test_more_tokens_than_positions_are_refused() -> None:
    problem = the_problem(PROVEN, max_model_len=4097)
    assert problem.field == "model.max_model_len"
    assert "4096 positions" in problem.message


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("tensor_parallel_size", 2, "must be 1"),
        ("pipeline_parallel_size", 2, "must be 1"),
        ("max_model_len", 100, "set model.max_model_len instead"),
        ("kv_cache_memory_bytes", 1, "set group.kv_memory_bytes instead"),
        ("data_parallel_size", 4, "FlexFloor decides it"),
        ("enable_expert_parallel", True, "FlexFloor decides it"),
        ("enable_eplb", True, "FlexFloor decides it"),
        ("quantization", "fp8", "FlexFloor decides it"),
    ],
)
def test_an_engine_option_that_is_ours_is_refused(option: str, value: Any, words: str) -> None:
    problem = the_problem(PROVEN, engine={option: value})
    assert problem.field == f"model.engine.{option}"
    assert words in problem.message


def test_all_problems_are_found_at_once() -> None:
    config = PROVEN | {"num_experts": 2, "quantization_config": {"quant_method": "awq"}}
    assert len(find_problems(config, settings(max_model_len=9000, engine={"dtype": "x"}))) == 4


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    cases = {
        "nowhere": "not a directory",
        "empty": "no config.json",
        "broken": "cannot read",
        "list": "no JSON object",
    }
    (tmp_path / "empty").mkdir()
    for name, content in (("broken", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    for name, words in cases.items():
        with pytest.raises(ConfigError, match=words) as refused:
            check_model(settings(str(tmp_path / name)))
        assert refused.value.field == "model.path"


def test_the_first_problem_of_a_checkpoint_is_raised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PROVEN | {"n_shared_experts": 1}))
    with pytest.raises(ModelRefusedError):
        check_model(settings(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(PROVEN))
    check_model(settings(str(tmp_path)))


@pytest.mark.parametrize("name", sorted(FIXED_ENGINE_ARGS))
def test_an_option_that_the_elastic_group_depends_on_is_refused_by_name(name: str) -> None:
    problem = the_problem(PROVEN, engine={name: FIXED_ENGINE_ARGS[name]})
    assert problem.field == f"model.engine.{name}"
