"""Real engines over Ray, whose leavers give the KV of their samples away."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.ray_coordinator import launch, shutdown_runtime
from actors.rollout_api import SampleResult
from tests.cluster.real_runtime import RealRuntime, assert_same, batch, settings

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def real_runtime(cluster: str, model: str) -> Iterator[RealRuntime]:
    name = f"real-{uuid.uuid4().hex[:8]}"
    client = launch(settings(name, model, move_samples_by="copy"))
    try:
        yield RealRuntime(client, name, cluster)
    finally:
        shutdown_runtime(name)


async def _metrics(runtime: RealRuntime) -> dict[str, float]:
    """Sums over all labels but ``by``."""
    sums: dict[str, float] = {}
    text = (await runtime.client.metrics_text()).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = " ".join(filter(None, [sample.name, sample.labels.get("by")]))
            sums[key] = sums.get(key, 0.0) + sample.value
    return sums


async def test_samples_whose_kv_was_copied_over_ray_equal_those_that_stayed(
    real_runtime: RealRuntime, reference: list[SampleResult], record_property: Any
) -> None:
    await real_runtime.whole()
    results = await real_runtime.decode(batch("copied"))
    assert_same(results, reference)
    num_moves = sum(len(sample.worker_ids) - 1 for sample in results)
    assert num_moves
    metrics = await _metrics(real_runtime)
    assert metrics["flexfloor_moved_samples_total copy"] == num_moves
    assert metrics["flexfloor_moved_samples_total recompute"] == 0
    assert metrics["flexfloor_refused_kv_total"] == 0
    record_property("copied_kv_bytes", metrics["flexfloor_moved_kv_bytes_total"])
    record_property("fetch_s", metrics["flexfloor_moved_kv_seconds_total"])
