"""TRL's client as its authors wrote it, for tests; they are skipped where it is missing."""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="trl is not installed (the extra dev brings it)",
)


@contextmanager
def trl_client(url: str) -> Iterator[Any]:
    with warnings.catch_warnings():
        # It warns of every version of vLLM that is newer than itself, each time it looks.
        warnings.simplefilter("ignore")
        client = importlib.import_module("trl.generation.vllm_client").VLLMClient(base_url=url)
    try:
        yield client
    finally:
        client.close_communicator()
        client.session.close()
