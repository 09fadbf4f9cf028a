"""The coordinator's Prometheus metrics: names, labels and help in one place.

``docs/metrics.md`` is made from it. Counters of slot time are taken from the ledger, not added up
here, so that metrics and rollout usage cannot disagree.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.accounting import SlotTotals
from actors.journal import JournalFigures
from actors.protocol import StepStats
from actors.rollout_api import CancelledBy
from actors.weights_keeper import CHECKPOINT_VERSION
from placement.ids import WorkerId
from placement.membership import Phase
from placement.sample_moves import MoveReason
from placement.samples import FinishReason

WEIGHT_SOURCES = ("disk", "object", "group")
WORKER_STATES = ("building", "decoding", "idle", "leaving")
CHANGE_PHASES = (Phase.BUILD, Phase.PREPARE, Phase.PAUSE, Phase.COMMIT, Phase.FINALIZE)

_TOKEN_BUCKETS_S = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)
_SAMPLE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
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


class _Journal(Collector):
    """Reads the journal's figures at each scrape."""

    def __init__(self, figures: Callable[[], JournalFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        now = self._figures()
        for name, text, value in (
            ("journal_written_bytes", "Written to the journal's directory.", now.written_bytes),
            ("journal_writes", "Writes to it, each with one sync.", now.writes),
            ("journal_write_seconds", "Seconds that they took, syncs included.", now.write_s),
            ("journal_replayed_entries", "Entries found at the start.", now.replayed),
            ("journal_cut_bytes", "Of an unfinished write, cut off at the start.", now.cut_bytes),
        ):
            yield CounterMetricFamily(f"flexfloor_{name}", text, value=value)
        yield GaugeMetricFamily(
            "flexfloor_journal_kept_bytes", "Size of the journal now.", value=now.kept_bytes
        )
        yield GaugeMetricFamily(
            "flexfloor_journal_stuck",
            "1 while the journal cannot be written: nothing is accepted or told.",
            value=bool(now.trouble),
        )


class Telemetry:
    """Args:
    totals: the ledger's sums as they are now.
    journal: its figures as they are now.
    """

    def __init__(
        self,
        totals: Callable[[], SlotTotals],
        journal: Callable[[], JournalFigures] = JournalFigures,
    ) -> None:
        self.registry = CollectorRegistry()
        self.labels_of: dict[str, tuple[str, ...]] = {}
        """Metric -> its labels; a family without series does not tell them."""
        self.registry.register(_SlotTime(totals))
        self.registry.register(_Journal(journal))
        self.tokens = self._counter("tokens", "Response tokens.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted samples.")
        self.prefilled_tokens = self._counter(
            "prefilled_tokens",
            "Tokens whose KV was computed before a sample's next token: prompts, and contexts of "
            "samples that moved and were recomputed.",
        )
        self.accepted = self._counter("accepted_samples", "Samples accepted.")
        self.open_samples = self._gauge("open_samples", "Samples accepted and not ended.")
        self.queued = self._gauge("queued_samples", "Samples that wait for a worker.")
        self.ended = self._counter("ended_samples", "Samples by ending.", "reason")
        self.cancelled = self._counter(
            "cancelled_samples", "Samples that were ended before they had finished.", "by"
        )
        self.preempted = self._counter(
            "preempted_samples",
            "Samples that an engine put back for want of KV. Each is admitted with room for its "
            "full length, so this stays at 0.",
        )
        self.queue_s = self._histogram(
            "queue_seconds",
            "Seconds from a sample's acceptance until it first went to a worker.",
            _SAMPLE_BUCKETS_S,
        )
        self.first_token_s = self._histogram(
            "first_token_seconds",
            "Seconds from a sample's acceptance until its first token was journaled.",
            _SAMPLE_BUCKETS_S,
        )
        self.token_gap_s = self._histogram(
            "token_gap_seconds",
            "Seconds per further token of a sample, its moves and the group's pauses included; "
            "one observation per report of a worker.",
            _TOKEN_BUCKETS_S,
        )
        self.sample_s = self._histogram(
            "sample_seconds", "Seconds from a sample's acceptance to its end.", _SAMPLE_BUCKETS_S
        )
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
        self.phase_s = self._histogram(
            "change_phase_seconds",
            "Seconds of each phase of a change of the group.",
            _PHASE_BUCKETS_S,
            "phase",
        )
        self.lease_wait_s = self._histogram(
            "lease_wait_seconds",
            "Seconds until leases arrived, or the wait for them ended.",
            _PHASE_BUCKETS_S,
        )
        self.weight_updates = self._counter(
            "weight_updates", "Updates of the weights, by how they came and ended.", "source", "end"
        )
        self.weight_bytes = self._counter("weight_bytes", "New weights received.", "source")
        self.weight_update_s = self._histogram(
            "weight_update_seconds",
            "Seconds from the request to decoding with the new weights.",
            _PHASE_BUCKETS_S,
            "source",
        )
        self.weight_hold_s = self._histogram(
            "weight_hold_seconds",
            "Seconds in which nobody decoded because weights were loaded.",
            _PHASE_BUCKETS_S,
        )
        self._weight_version = self._gauge(
            "weight_version", "1 for the version of the weights that is served.", "version"
        )
        self._weight_copy_bytes = self._gauge(
            "weight_copy_bytes", "The full copy of the weights outside the workers."
        )
        self.old_weight_samples = self._gauge(
            "old_weight_samples", "Unfinished samples that began with older weights."
        )
        self.serve_weights(CHECKPOINT_VERSION, 0)
        # Series that begin at their first event hide it from increase().
        for reason in FinishReason:
            self.ended.labels(reason)
        for by in CancelledBy:
            self.cancelled.labels(by)
        self.moved_samples.labels("recompute", MoveReason.CONFIGURED)
        self.moved_samples.labels("copy", MoveReason.CONFIGURED)
        for phase in CHANGE_PHASES:
            self.rollbacks.labels(phase)
        for source in WEIGHT_SOURCES:
            self.weight_bytes.labels(source)
            for end in ("served", "failed"):
                self.weight_updates.labels(source, end)
        self._stats_of: dict[WorkerId, StepStats] = {}

    def serve_weights(self, version: str, copy_bytes: int) -> None:
        self._weight_version.clear()
        self._weight_version.labels(version).set(1)
        self._weight_copy_bytes.set(copy_bytes)

    def report(self, worker_id: WorkerId, stats: StepStats) -> None:
        before = self._stats_of.get(worker_id)
        self.refused_kv.inc(stats.refused_kv - (before.refused_kv if before else 0))
        self.preempted.inc(stats.preempted - (before.preempted if before else 0))
        self.prefilled_tokens.inc(
            stats.prefilled_tokens - (before.prefilled_tokens if before else 0)
        )
        self._stats_of[worker_id] = stats

    def grew(self, num_tokens: int, first_s: float | None, gap_s: float | None) -> None:
        """A sample got tokens, its first ones ``first_s`` after acceptance, further ones
        ``gap_s`` after those before."""
        self.tokens.inc(num_tokens)
        if first_s is not None:
            self.first_token_s.observe(first_s)
        elif gap_s is not None:
            self.token_gap_s.observe(gap_s / num_tokens)

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
        self.labels_of[f"flexfloor_{name}"] = labels
        return Counter(f"flexfloor_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        self.labels_of[f"flexfloor_{name}"] = labels
        return Gauge(f"flexfloor_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        self.labels_of[f"flexfloor_{name}"] = labels
        return Histogram(f"flexfloor_{name}", text, labels, buckets=buckets, registry=self.registry)
