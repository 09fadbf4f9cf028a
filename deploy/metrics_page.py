"""``docs/metrics.md``: every metric of a scrape, from the registries themselves.

After a change of metrics::

    python -m deploy.metrics_page > docs/metrics.md
"""

import sys
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry

from actors.accounting import SlotTotals
from actors.telemetry import Telemetry
from service.metrics import ServiceMetrics

_HEAD = """\
# Metrics

Generated from the registries by `python -m deploy.metrics_page`.

`GET /metrics` answers with the coordinator's metrics and, behind them, those of the HTTP replica
that was asked. There is one replica, because it counts who follows which rollout; one that was
replaced counts from zero, and so does a coordinator that came back: `rate` and `increase` allow for
both. Ray's own metrics (nodes, actors, Serve) have their own ports, and vLLM's are not exposed: an
engine has no life of its own here, and what a sample waits for is measured where it is known.

Seconds of samples are measured by the coordinator, at the reports of the workers: plain tokens come
about ten times a second, so a time to the first token is up to 0.1 s longer than in the engine. The
group decodes in lockstep, so the seconds per further token of one sample are about those of a step.
A slot is what one worker leases, and worker-seconds are measured at the leases.
"""


def metrics_text() -> str:
    """What ``docs/metrics.md`` has to say."""
    nothing = SlotTotals(0.0, 0.0, 0.0, 0, 0, 0)
    telemetry, service = Telemetry(lambda: nothing), ServiceMetrics()
    lines = [_HEAD]
    for title, registry, labels_of in (
        ("Coordinator", telemetry.registry, telemetry.labels_of),
        ("HTTP replica", service.registry, service.labels_of),
    ):
        lines += [f"## {title}", "", *_table(registry, labels_of), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(registry: CollectorRegistry, labels_of: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    yield "| series | type | labels | meaning |"
    yield "|---|---|---|---|"
    for family in registry.collect():
        suffix = {"counter": "_total", "histogram": "_bucket, _sum, _count"}.get(family.type, "")
        labels = ", ".join(f"`{label}`" for label in labels_of.get(family.name, ()))
        name = f"`{family.name}`" + (f" {suffix}" if "," in suffix else "")
        if family.type == "counter":
            name = f"`{family.name}{suffix}`"
        yield f"| {name} | {family.type} | {labels} | {family.documentation} |"


if __name__ == "__main__":
    sys.stdout.write(metrics_text())
