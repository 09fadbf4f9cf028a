"""The coordinator's Prometheus metrics: names, labels and help in one place.

Counters of slot time are taken from the ledger, not added up here, so that metrics and
rollout usage cannot disagree.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.accounting import SlotTotals
from actors.protocol import StepStats
from placement.ids import WorkerId
from placement.membership import Phase
from placement.sample_moves import MoveReason
from placement.samples import FinishReason

WORKER_STATES = ("building", "decoding", "idle", "leaving")
CHANGE_PHASES = (Phase.BUILD, Phase.PREPARE, Phase.PAUSE, Phase.COMMIT, Phase.FINALIZE)

_PHASE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class _SlotTime(Collector):
    """Reads the ledger at each scrape."""

    def __init__(self, totals: Callable[[], SlotTotals]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        now = self._totals()
        for name, text, value in (
            ("occupied_worker_seconds", "Leased slots over time.", now.occupied_worker_s),
            ("freed_worker_seconds", "Slots given back by open rollouts.", now.freed_worker_s),
            ("used_worker_seconds", "Freed slots that others held.", now.used_worker_s),
            ("worker_steps", "Group steps times leased slots.", now.worker_steps),
            ("group_steps", "Lockstep steps of the group.", now.steps),
        ):
            yield CounterMetricFamily(f"flexfloor_{name}", text, value=value)
        yield GaugeMetricFamily("flexfloor_leased_slots", "Slots leased now.", value=now.leased)


class Telemetry:
    """Args:
    totals: the ledger's sums as they are now.
    """

    def __init__(self, totals: Callable[[], SlotTotals]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_SlotTime(totals))
        self.tokens = self._counter("tokens", "Response tokens.")
        self.accepted = self._counter("accepted_samples", "Samples accepted.")
        self.open_samples = self._gauge("open_samples", "Samples accepted and not ended.")
        self.queued = self._gauge("queued_samples", "Samples that wait for a worker.")
        self.ended = self._counter("ended_samples", "Samples by ending.", "reason")
        self._workers = self._gauge("workers", "Workers by state.", "state")
        self._kv_used = self._gauge("kv_used_tokens", "KV in use, all workers.")
        self._kv_capacity = self._gauge("kv_capacity_tokens", "KV there is, all workers.")
        self.moved_samples = self._counter(
            "moved_samples", "Samples that moved, by how they got their KV again.", "by", "reason"
        )
        self.moved_kv_bytes = self._counter("moved_kv_bytes", "KV copied between workers.")
        self.moved_kv_s = self._counter(
            "moved_kv_seconds", "Seconds of these copies, as the coordinator sees them."
        )
        self.refused_kv = self._counter("refused_kv", "Copied KV that did not fit its sample.")
        self.releases = self._counter("released_workers", "Workers released.", "reason")
        self.changes = self._counter("group_changes", "Changes of the group that held.", "reason")
        self.rollbacks = self._counter("rolled_back_changes", "Changes rolled back.", "phase")
        self.restarts = self._counter("group_restarts", "Groups given up and begun afresh.")
        self.lease_timeouts = self._counter("lease_timeouts", "Waits for leases that got none.")
        self.phase_s = Histogram(
            "flexfloor_change_phase_seconds",
            "Seconds of each phase of a change of the group.",
            ["phase"],
            buckets=_PHASE_BUCKETS_S,
            registry=self.registry,
        )
        self.lease_wait_s = Histogram(
            "flexfloor_lease_wait_seconds",
            "Seconds until leases arrived, or the wait for them ended.",
            buckets=_PHASE_BUCKETS_S,
            registry=self.registry,
        )
        # Series that begin at their first event hide it from increase().
        for reason in FinishReason:
            self.ended.labels(reason)
        self.moved_samples.labels("recompute", MoveReason.CONFIGURED)
        self.moved_samples.labels("copy", MoveReason.CONFIGURED)
        for phase in CHANGE_PHASES:
            self.rollbacks.labels(phase)
        self._stats_of: dict[WorkerId, StepStats] = {}

    def report(self, worker_id: WorkerId, stats: StepStats) -> None:
        before = self._stats_of.get(worker_id)
        self.refused_kv.inc(stats.refused_kv - (before.refused_kv if before else 0))
        self._stats_of[worker_id] = stats

    def gone(self, worker_id: WorkerId) -> None:
        self._stats_of.pop(worker_id, None)

    def text(self, states: list[str]) -> bytes:
        """Exposition, with the gauges as they are now; ``states``: one per worker."""
        for state in WORKER_STATES:
            self._workers.labels(state).set(states.count(state))
        self._kv_used.set(sum(s.kv_used_tokens for s in self._stats_of.values()))
        self._kv_capacity.set(sum(s.kv_capacity_tokens for s in self._stats_of.values()))
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"flexfloor_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"flexfloor_{name}", text, labels, registry=self.registry)
