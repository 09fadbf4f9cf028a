import hashlib
from pathlib import Path

import pytest

from actors.rollout_api import Strategy
from actors.sample_record import key_of_prompt
from deploy.demo.plan import plan_demo
from deploy.demo.trace import PAST_PATH, PAST_SHA256, TRACE_PATH, TRACE_SHA256, load_trace
from deploy.demo.workload import Workload
from placement.errors import ConfigError


def test_the_trace_in_the_checkout_is_the_one_that_is_named() -> None:
    trace = load_trace()
    assert (len(trace.lengths_tokens), trace.num_samples) == (16, 4)
    assert TRACE_SHA256 in (TRACE_PATH.parent / "README.md").read_text()


def test_scaling_keeps_proportions_and_leaves_no_sample_empty() -> None:
    scaled = load_trace().scaled(512)
    assert scaled.longest_tokens == 512
    assert min(min(lengths) for lengths in scaled.lengths_tokens) >= 1
    assert scaled.total_tokens == 8680
    assert load_trace().scaled(1).total_tokens == 64


def test_most_samples_of_the_trace_are_short_and_a_few_are_long() -> None:
    lengths = sorted(n for group in load_trace().scaled(512).lengths_tokens for n in group)
    assert lengths[len(lengths) // 2] < 512 / 5


def test_a_part_of_the_trace_keeps_its_order() -> None:
    trace = load_trace()
    assert trace.first(3, 2).lengths_tokens == tuple(g[:2] for g in trace.lengths_tokens[:3])
    assert trace.capped(100).longest_tokens == 100


def test_another_file_than_the_named_one_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("prompt_id,sample_idx,response_tokens\n0,1,5\n")
    with pytest.raises(ConfigError, match="restore the file"):
        load_trace(other)
    with pytest.raises(ConfigError, match="run the demo from a checkout"):
        load_trace(tmp_path / "absent.csv")


def test_a_trace_with_groups_of_different_sizes_is_refused(tmp_path: Path) -> None:
    uneven = tmp_path / "uneven.csv"
    uneven.write_text("prompt_id,sample_idx,response_tokens\n0,1,5\n0,2,5\n1,1,5\n")
    with pytest.raises(ConfigError, match="each needs as many"):
        load_trace(uneven, hashlib.sha256(uneven.read_bytes()).hexdigest())


def test_what_is_known_before_the_demo_is_of_the_same_prompts_at_the_same_scale() -> None:
    recorded, past = load_trace(), load_trace(PAST_PATH, PAST_SHA256)
    assert PAST_SHA256 in (TRACE_PATH.parent / "README.md").read_text()
    for short in (False, True):
        plan = plan_demo(recorded, past, short)
        assert len(plan.past.lengths_tokens) == len(plan.trace.lengths_tokens)
        assert plan.past.longest_tokens == plan.max_tokens
        first, scaled = recorded.lengths_tokens[0][0], plan.trace.lengths_tokens[0][0]
        known, known_scaled = past.lengths_tokens[0][0], plan.past.lengths_tokens[0][0]
        assert known_scaled / scaled == pytest.approx(known / first, rel=0.05)
        workload = Workload(plan.trace, plan.max_tokens, vocab_size=512)
        history = workload.length_history(plan.past)
        prompts = workload.body("demo", Strategy.ELASTIC)["prompts"]
        assert [p.prompt_key for p in history.prompts] == [key_of_prompt(p) for p in prompts]
