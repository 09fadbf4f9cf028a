"""Detail is cut and joined as the tokens that it belongs to, and incomplete rows are none."""

from dataclasses import replace

import numpy as np
import pytest

from actors.outbox import Outbox
from actors.protocol import Tokens
from actors.token_detail import (
    DetailSoFar,
    PromptScores,
    RoutingLayout,
    TokenDetail,
    joined,
    routed_rows,
)
from placement.ids import SampleId
from placement.samples import Sample, Sampling

LAYOUT = RoutingLayout(layers=2, top_k=3, dtype="uint16")
PROMPT_TOKENS = 4
SCORES = PromptScores(
    np.float32([-1.0, -2.5, -0.5]).tobytes(),
    np.int32([1, 7, 2]).tobytes(),
    2,
    np.int32([[5, 6], [7, 8], [9, 1]]).tobytes(),
    np.float32([[-1, -2], [-0.25, -3], [-0.125, -0.5]]).tobytes(),
)


def rows(first: int, count: int) -> bytes:
    """Rows of positions, each told apart by its numbers."""
    return np.arange(first * 6, (first + count) * 6, dtype=np.uint16).tobytes()


def whole() -> TokenDetail:
    """Of a response of three tokens."""
    return TokenDetail(
        (((5, -0.5),), ((6, -0.25), (7, -1.5)), ((8, -0.125),)),
        (rows(0, 4), rows(4, 1), rows(5, 1)),
        LAYOUT,
        SCORES,
    )


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_two_stretches_say_what_the_whole_says(at: int) -> None:
    detail = whole()
    assert joined(detail.cut(0, at), detail.cut(at)) == replace(
        detail, prompt=SCORES if at > 0 else detail.cut(at).prompt
    )
    so_far = DetailSoFar()
    so_far.add(detail)
    assert so_far.between(at) == detail.cut(at)


def test_a_response_has_one_row_less_than_there_are_tokens() -> None:
    array = routed_rows(whole(), PROMPT_TOKENS + 3)
    assert array is not None
    assert array.shape == (6, 2, 3)
    assert array.reshape(-1).tolist() == list(range(36))


def test_rows_that_are_missing_or_doubled_are_no_answer() -> None:
    detail = whole()
    assert routed_rows(detail.cut(1), PROMPT_TOKENS + 3) is None
    assert routed_rows(joined(detail, detail.cut(2)), PROMPT_TOKENS + 3) is None
    assert routed_rows(None, PROMPT_TOKENS) is None


def test_scores_of_a_prompt_are_read_as_they_were_written() -> None:
    assert SCORES.chosen() == [(-1.0, 1), (-2.5, 7), (-0.5, 2)]
    assert SCORES.alternatives()[1] == ((7, -0.25), (8, -3.0))


def test_the_outbox_puts_detail_together_with_its_tokens() -> None:
    outbox, detail = Outbox(), whole()
    for at in range(3):
        part = Tokens(SampleId("s"), at, (at,), (-0.5,), detail=detail.cut(at, at + 1))
        outbox.put(part)
    _, (merged,) = outbox.collect(0, 0.0)
    assert isinstance(merged, Tokens)
    assert merged.detail == detail


def test_a_moved_sample_needs_no_forward_that_was_told_and_a_given_start_needs_all() -> None:
    asking = Sampling(max_tokens=9, routed_experts=True)
    fresh = Sample(SampleId("s"), (1, 2, 3), asking, seed=0)
    assert fresh.untold_from == 0
    assert fresh.continued((4, 5)).untold_from == 4
    given = replace(fresh, generated_ids=(4, 5), num_given=2)
    assert given.untold_from == 0
    assert given.continued((4, 5, 6)).untold_from == 5
    silent = replace(fresh, sampling=Sampling(max_tokens=9))
    assert silent.untold_from == 2
