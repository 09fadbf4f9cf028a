"""What a real engine tells of tokens beside ids and logprobs, through moves and releases."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from actors.token_detail import TokenDetail, routed_rows
from placement.ids import SampleId
from placement.samples import Sample
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same

pytestmark = pytest.mark.timeout(180)

TOP = 4
Told = tuple[Response, npt.NDArray[np.unsignedinteger]]


def _asking(samples: list[Sample]) -> list[Sample]:
    return [
        replace(
            sample,
            sampling=replace(
                sample.sampling, routed_experts=True, prompt_logprobs=TOP, top_logprobs=TOP
            ),
        )
        for sample in samples
    ]


def _detail(response: Response) -> TokenDetail:
    detail = response.detail.between(0)
    assert detail is not None
    return detail


def _routed(response: Response) -> npt.NDArray[np.unsignedinteger]:
    num_tokens = len(response.sample.prompt_ids) + len(response.token_ids)
    rows = routed_rows(_detail(response), num_tokens)
    assert rows is not None, "the rows are not one less than the tokens"
    return rows


@pytest.fixture(scope="module")
def told(model: str, samples: list[Sample]) -> dict[SampleId, Told]:
    """Every sample of the workload, asked for everything, on one rank that never changes."""
    group = LocalGroup(model, 1)
    try:
        group.submit(0, *_asking(samples))
        return {s: (r, _routed(r)) for s, r in group.finish_all().items()}
    finally:
        group.close()


def test_asking_changes_no_token_and_no_logprob(
    told: dict[SampleId, Told], reference: dict[SampleId, Response]
) -> None:
    assert_same({s: response for s, (response, _) in told.items()}, reference)


def test_what_is_told_is_the_same_when_samples_move_and_workers_leave(
    model: str, samples: list[Sample], told: dict[SampleId, Told]
) -> None:
    """Recomputed by one survivor, copied to another: nothing twice, nothing missing."""
    group = LocalGroup(model, 3, max_workers=3)
    try:
        asking = _asking(samples)
        for i, sample in enumerate(asking):
            group.submit(group.members[i % 3], sample)
        group.wait_for_tokens(asking[0].sample_id, 3)
        group.change(leave=(group.members[2],))
        group.copies = True
        group.wait_for_tokens(asking[0].sample_id, 9)
        group.change(leave=(group.members[1],))
        assert group.moved_kv
        done = group.finish_all()
        moved = [response for response in done.values() if len(response.workers) > 1]
        assert len(moved) >= 6
        for sample_id, response in done.items():
            expected, rows = told[sample_id]
            assert np.array_equal(_routed(response), rows), sample_id
            assert _detail(response) == _detail(expected), sample_id
    finally:
        group.close()


def test_a_fresh_prefill_of_prompt_and_response_says_the_same(
    group: LocalGroup, told: dict[SampleId, Told]
) -> None:
    """Routing of every token, and, as prompt logprobs, what the response's tokens had."""
    for sample_id, (response, rows) in list(told.items())[:6]:
        sample = response.sample
        whole = (*sample.prompt_ids, *response.token_ids)
        sampling = replace(sample.sampling, max_tokens=1)
        again = Sample(SampleId(f"whole-{sample_id}"), whole, sampling, seed=sample.seed)
        group.submit(group.members[1], again)
        scored = group.finish_all()[again.sample_id]
        assert np.array_equal(_routed(scored)[: len(whole) - 1], rows)
        prompt = _detail(scored).prompt
        assert prompt is not None
        assert len(prompt.chosen()) == len(whole) - 1
        if sample.sampling.top_k or sample.sampling.top_p < 1:
            continue  # logprobs of a response are those after truncation
        decoded = prompt.chosen()[len(sample.prompt_ids) - 1 :]
        assert [logprob for logprob, _ in decoded] == response.logprobs
        tops = prompt.alternatives()[len(sample.prompt_ids) - 1 :]
        assert tuple(tops) == _detail(response).top_logprobs


def test_alternatives_are_the_most_likely_tokens_and_those_that_truncation_left(
    told: dict[SampleId, Told],
) -> None:
    for response, _ in told.values():
        rows = _detail(response).top_logprobs
        assert len(rows) == len(response.token_ids)
        for token, logprob, row in zip(response.token_ids, response.logprobs, rows, strict=True):
            assert 1 <= len(row) <= TOP
            assert [value for _, value in row] == sorted((v for _, v in row), reverse=True)
            if response.sample.sampling.temperature == 0:
                assert row[0][1] == logprob  # of equally likely ones any may come first
            known = dict(row)
            assert known.get(token, logprob) == logprob


def test_ranks_of_a_prompt_agree_with_its_alternatives(
    told: dict[SampleId, Told],
) -> None:
    for response, _ in told.values():
        prompt = _detail(response).prompt
        assert prompt is not None
        ids = response.sample.prompt_ids[1:]
        places = zip(ids, prompt.chosen(), prompt.alternatives(), strict=True)
        for token, (logprob, rank), row in places:
            assert dict(row).get(token, logprob) == logprob
            if rank <= TOP:
                assert row[rank - 1][1] == logprob
            else:
                assert logprob <= row[-1][1]


def test_who_asks_for_nothing_is_told_nothing_beside_one_who_asks(
    group: LocalGroup, samples: list[Sample], reference: dict[SampleId, Response]
) -> None:
    asking, silent = _asking(samples)[0], samples[1]
    group.submit(group.members[0], asking, silent)
    done = group.finish_all()
    assert done[silent.sample_id].detail.between(0) is None
    assert done[asking.sample_id].detail.between(0) is not None
    assert_same(done, reference)
