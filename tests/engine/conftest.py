"""One tiny model, one reference run and one live group of four for the whole folder.

The reference is a single rank that never changes. Exact mode promises that a sample's tokens
and logprobs are the same wherever and beside whomever it decodes, so every test can compare
with it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.make_model import make_model
from placement.ids import SampleId
from placement.samples import Sample
from tests.engine.local_group import LocalGroup, Response
from tests.engine.workload import workload

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # The fork server finds the tests' own modules through the environment only.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return str(directory)


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return workload()


@pytest.fixture(scope="session")
def reference(model: str, samples: list[Sample]) -> Iterator[dict[SampleId, Response]]:
    """Every sample of the workload on one rank that never changes."""
    group = LocalGroup(model, 1)
    try:
        group.submit(0, *samples)
        yield group.finish_all()
    finally:
        group.close()


@pytest.fixture(scope="session")
def shared_group(model: str) -> Iterator[LocalGroup]:
    group = LocalGroup(model, 4)
    yield group
    group.close()


@pytest.fixture
def group(shared_group: LocalGroup) -> Iterator[LocalGroup]:
    """The shared group, with four members again and no sample."""
    if len(shared_group.members) < 4:
        shared_group.change(join=4 - len(shared_group.members))
    yield shared_group
    shared_group.cancel_all()
