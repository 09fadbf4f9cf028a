"""New weights in a live group are those of a fresh engine, bit for bit; what fails leaves the old
ones, and no sample loses a token.
"""

import dataclasses
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors import sparse_delta
from actors.control_api import DiskWeights, GroupWeights, ObjectWeights, WeightUpdate
from actors.protocol import Broken
from actors.published_weights import PublishedWeights
from actors.weights_group import TrainerGroups
from placement.errors import MembershipError, WeightUpdateError
from placement.ids import SampleId
from placement.samples import Sample
from tests.engine import faults, other_weights
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same
from tests.unit import trainer
from tests.unit.list_shelf import ListShelf

pytestmark = pytest.mark.timeout(300)

Tensors = dict[str, torch.Tensor]
Responses = dict[SampleId, Response]

CHUNK_BYTES = 1 << 20


@pytest.fixture(scope="module")
def tensors(model: str) -> Tensors:
    return other_weights.perturbed(other_weights.read(model), seed=1)


@pytest.fixture(scope="module")
def later_tensors(tensors: Tensors) -> Tensors:
    """With a hundredth of the elements changed."""
    return other_weights.perturbed(tensors, seed=2, share=0.01)


def _decoded_afresh(
    model: str, tensors: Tensors, samples: list[Sample], directory: Path
) -> Responses:
    """By one engine that has read its weights from disk."""
    fresh = LocalGroup(other_weights.write_model(model, directory, tensors), 1)
    try:
        fresh.submit(0, *samples)
        return fresh.finish_all()
    finally:
        fresh.close()


@pytest.fixture(scope="module")
def updated(
    model: str, tensors: Tensors, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> Responses:
    return _decoded_afresh(model, tensors, samples, tmp_path_factory.mktemp("updated") / "model")


@pytest.fixture(scope="module")
def later(
    model: str,
    later_tensors: Tensors,
    samples: list[Sample],
    tmp_path_factory: pytest.TempPathFactory,
) -> Responses:
    directory = tmp_path_factory.mktemp("later") / "model"
    return _decoded_afresh(model, later_tensors, samples, directory)


@pytest.fixture
def weighed(group: LocalGroup, model: str) -> Iterator[LocalGroup]:
    """The shared group; afterwards it has the checkpoint's weights again."""
    yield group
    group.cancel_all()
    group.load_weights("0", other_weights.chunks_of(other_weights.read(model)))


def _spread(group: LocalGroup, samples: list[Sample]) -> None:
    for i, sample in enumerate(samples):
        group.submit(group.members[i % len(group.members)], sample)


class _Publisher:
    """A keeper, and a trainer that reaches it in each of three ways."""

    def __init__(self, model: str, directory: Path) -> None:
        self._directory = directory
        self._groups = TrainerGroups(timeout_s=30.0)
        self._keeper = PublishedWeights(
            model, ListShelf(), lambda reference: reference, self._groups, CHUNK_BYTES
        )

    def publish(
        self, group: LocalGroup, way: str, version: str, before: Tensors | None, after: Tensors
    ) -> None:
        """``before``: send a delta of it."""
        delta = sparse_delta.make_delta(before, after) if before is not None else None
        sent = sparse_delta.to_tensors(delta) if delta is not None else after
        file = self._directory / version / "sent.safetensors"
        file.parent.mkdir()
        save_file(sent, file)
        base = group.weight_version if delta is not None else None
        checksum = sparse_delta.checksum(delta) if delta is not None else ""
        ordered = sorted(sent.items())
        source = {
            "disk": DiskWeights(str(file.parent)),
            "object": ObjectWeights((delta if delta is not None else after,)),
            "group": GroupWeights(
                "weights",
                tuple(name for name, _ in ordered),
                tuple(str(t.dtype).removeprefix("torch.") for _, t in ordered),
                tuple(tuple(t.shape) for _, t in ordered),
            ),
        }[way]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        broadcasting = trainer.broadcasting(port, file) if way == "group" else nullcontext()
        with broadcasting:
            if way == "group":
                self._groups.join(trainer.group_at(port))
            update = WeightUpdate(source, version, base, checksum)
            staged = self._keeper.stage(update, group.weight_version)
        if way == "group":
            self._groups.leave("weights")
        group.load_weights(version, list(staged.chunks))
        self._keeper.commit(version)


@pytest.mark.parametrize(
    ("width", "whole_by", "delta_by"),
    [(4, "disk", "group"), (2, "group", "object"), (1, "object", "disk")],
)
def test_whole_weights_and_a_delta_are_a_fresh_engines_however_experts_have_moved(
    weighed: LocalGroup,
    model: str,
    samples: list[Sample],
    tensors: Tensors,
    later_tensors: Tensors,
    updated: Responses,
    later: Responses,
    tmp_path: Path,
    width: int,
    whole_by: str,
    delta_by: str,
) -> None:
    publisher = _Publisher(model, tmp_path)
    weighed.change(leave=weighed.members[1:2], join=1)
    if width < 4:
        weighed.change(leave=weighed.members[: 4 - width])
    publisher.publish(weighed, whole_by, "whole", None, tensors)
    _spread(weighed, samples)
    done = weighed.finish_all()
    assert_same(done, updated)
    assert {r.weight_versions for r in done.values()} == {((0, "whole"),)}
    publisher.publish(weighed, delta_by, "delta", tensors, later_tensors)
    _spread(weighed, samples)
    done = weighed.finish_all()
    assert_same(done, later)
    assert {r.weight_versions for r in done.values()} == {((0, "delta"),)}


def test_joiners_have_the_weights_of_their_peers(
    weighed: LocalGroup, samples: list[Sample], tensors: Tensors, updated: Responses
) -> None:
    weighed.change(leave=weighed.members[1:])
    weighed.load_weights("new", other_weights.chunks_of(tensors))
    weighed.change(join=3)
    _spread(weighed, samples)
    done = weighed.finish_all()
    assert_same(done, updated)
    assert {r.weight_versions for r in done.values()} == {((0, "new"),)}


def test_members_with_other_weights_make_no_membership_together(
    weighed: LocalGroup, tensors: Tensors
) -> None:
    change = dataclasses.replace(weighed.plan(leave=weighed.members[:1]), weight_version="new")
    with pytest.raises(MembershipError, match="has weights of version 0, and generation"):
        weighed.prepare(change)
    weighed.all_members("discard", change.generation)


def test_an_update_under_load_loses_no_token_and_goes_on_as_a_fresh_engine_would(
    weighed: LocalGroup,
    model: str,
    samples: list[Sample],
    tensors: Tensors,
    reference: Responses,
    tmp_path: Path,
) -> None:
    _spread(weighed, samples)
    weighed.wait_for_tokens(samples[0].sample_id, 6)
    reports = weighed.load_weights("new", other_weights.chunks_of(tensors))
    assert sum(report.resubmitted for report in reports.values()) > 6
    done = weighed.finish_all()
    continued = []
    for sample in samples:
        response = done[sample.sample_id]
        expected = reference[sample.sample_id]
        assert response.finish == expected.finish
        assert len(response.token_ids) == len(expected.token_ids)
        (start, first), *rest = response.weight_versions
        assert (start, first) == (0, "0")
        switched = rest[0][0] if rest else len(response.token_ids)
        assert response.token_ids[:switched] == expected.token_ids[:switched]
        assert response.logprobs[:switched] == expected.logprobs[:switched]
        if rest:
            assert rest == [(switched, "new")]
            continued.append(sample.continued(tuple(response.token_ids[:switched])))
    assert len(continued) > 6
    for sample_id, response in _decoded_afresh(
        model, tensors, continued, tmp_path / "model"
    ).items():
        given = len(response.sample.generated_ids)
        assert done[sample_id].token_ids == response.token_ids
        assert done[sample_id].logprobs[given:] == response.logprobs


def test_kv_of_other_weights_is_refused_and_computed_anew(
    weighed: LocalGroup, samples: list[Sample], tensors: Tensors
) -> None:
    sample = samples[4]
    source, target = weighed.members[:2]
    weighed.submit(source, sample)
    weighed.wait_for_tokens(sample.sample_id, 3)
    weighed.workers[source].do("cancel", [sample.sample_id], True)
    weighed.wait_until(lambda: sample.sample_id in weighed.waiting)
    moved = sample.continued(tuple(weighed.responses.pop(sample.sample_id).token_ids))
    weighed.waiting.clear()
    kv = weighed.workers[source].do("fetch_kv", [sample.sample_id])
    assert kv[sample.sample_id].is_of(moved)
    weighed.load_weights("new", other_weights.chunks_of(tensors))
    weighed.submit(source, moved)
    expected = weighed.finish_all()
    refused = weighed.stats(target).refused_kv
    weighed.submit(target, moved, kv=kv)
    assert_same(weighed.finish_all(), expected)
    assert weighed.stats(target).refused_kv == refused + 1


def test_weights_that_fit_no_worker_leave_the_old_ones_after_the_way_back(
    weighed: LocalGroup, model: str, samples: list[Sample], tensors: Tensors, reference: Responses
) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    wrong = {**tensors, name: tensors[name][:, :-1].contiguous()}
    _spread(weighed, samples)
    weighed.wait_for_tokens(samples[0].sample_id, 3)
    with pytest.raises(WeightUpdateError, match="cannot load"):
        weighed.load_weights("wrong", other_weights.chunks_of(wrong))
    weighed.load_weights("0", other_weights.chunks_of(other_weights.read(model)))
    assert_same(weighed.finish_all(), reference)


def test_a_worker_that_fails_in_its_load_leaves_the_old_weights_after_the_way_back(
    weighed: LocalGroup, model: str, samples: list[Sample], tensors: Tensors, reference: Responses
) -> None:
    _spread(weighed, samples)
    weighed.wait_for_tokens(samples[0].sample_id, 3)
    weighed.workers[weighed.members[2]].do(faults.fail_in_load)
    with pytest.raises(WeightUpdateError, match="made to fail"):
        weighed.load_weights("new", other_weights.chunks_of(tensors))
    weighed.load_weights("0", other_weights.chunks_of(other_weights.read(model)))
    done = weighed.finish_all()
    assert_same(done, reference)
    assert {r.weight_versions for r in done.values()} == {((0, "0"),)}


def test_a_worker_with_weights_of_two_versions_does_not_decode(
    model: str, samples: list[Sample], tensors: Tensors
) -> None:
    group = LocalGroup(model, 1)
    try:
        group.submit(0, samples[-1])
        group.workers[group.members[0]].do(faults.fail_in_load)
        with pytest.raises(WeightUpdateError):
            group.load_weights("new", other_weights.chunks_of(tensors))
        group.collect(group.members[0])
        before = len(group.responses[samples[-1].sample_id].token_ids)
        group.all_members("unhold")
        with pytest.raises(ConnectionError, match="weights of several versions"):
            group.finish_all()
        assert any(isinstance(event, Broken) for _, event in group.events)
        assert len(group.responses[samples[-1].sample_id].token_ids) == before
    finally:
        group.close()
