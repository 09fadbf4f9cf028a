"""New weights in a live group are those of a fresh engine, bit for bit."""

from collections.abc import Iterator

import pytest
import torch

from placement.ids import SampleId
from placement.samples import Sample
from tests.engine import other_weights
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import assert_same

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def tensors(model: str) -> dict[str, torch.Tensor]:
    return other_weights.perturbed(other_weights.read(model), seed=1)


@pytest.fixture(scope="module")
def updated(
    model: str,
    tensors: dict[str, torch.Tensor],
    samples: list[Sample],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[SampleId, Response]:
    """What one fresh engine decodes that has read the new weights from disk."""
    directory = tmp_path_factory.mktemp("updated") / "model"
    fresh = LocalGroup(other_weights.write_model(model, directory, tensors), 1)
    try:
        fresh.submit(0, *samples)
        return fresh.finish_all()
    finally:
        fresh.close()


@pytest.fixture
def weighed(group: LocalGroup, model: str) -> Iterator[LocalGroup]:
    """The shared group; afterwards it has the checkpoint's weights again."""
    yield group
    group.cancel_all()
    group.load_weights("0", other_weights.chunks_of(other_weights.read(model)))


def _decode(group: LocalGroup, samples: list[Sample]) -> dict[SampleId, Response]:
    for i, sample in enumerate(samples):
        group.submit(group.members[i % len(group.members)], sample)
    return group.finish_all()


@pytest.mark.parametrize("width", [4, 2, 1])
def test_new_weights_are_a_fresh_engines_however_experts_have_moved(
    weighed: LocalGroup,
    samples: list[Sample],
    updated: dict[SampleId, Response],
    tensors: dict[str, torch.Tensor],
    width: int,
) -> None:
    weighed.change(leave=weighed.members[1:2], join=1)
    if width < 4:
        weighed.change(leave=weighed.members[: 4 - width])
    weighed.load_weights("new", other_weights.chunks_of(tensors))
    done = _decode(weighed, samples)
    assert_same(done, updated)
    assert {r.weight_versions for r in done.values()} == {((0, "new"),)}
