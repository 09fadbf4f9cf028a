"""Occupied, freed and used worker time, measured at the leases.

For a rollout, from its first acceptance to its last ending, with L(t) slots leased, P(t) the
most that were leased so far within the rollout, and P the most of all::

    occupied = integral of share * L            freed = integral of share * (P(t) - L)
    not yet leased = integral of share * (P - P(t))
    shared = integral of (1 - share) * P

which add up to P * span by construction. ``share`` is 1 while the rollout is alone. While
several are open, each stretch between two changes (of the leases or of the open rollouts) is
split by the tokens that each of them got in it, or evenly where nobody got any.

Time is kept in whole nanoseconds and shares as whole parts of them, so that sums are exact.
"""

from dataclasses import dataclass, replace

from actors.rollout_api import RolloutUsage
from placement.ids import RolloutId

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """All rollouts together, since the ledger was begun."""

    occupied_worker_s: float
    freed_worker_s: float
    used_worker_s: float
    worker_steps: int
    steps: int
    leased: int


@dataclass(slots=True)
class _Account:
    """One rollout's sums, in slot-nanoseconds; ``own_ns`` is the integral of its share."""

    started_ns: int
    peak: int
    steps: int = 0
    worker_steps: int = 0
    own_ns: int = 0
    occupied_ns: int = 0
    freed_ns: int = 0
    used_ns: int = 0
    not_yet_leased_ns: int = 0
    ended_ns: int | None = None


class LeaseLedger:
    """All slots of the service over time. Calls come in the order of their clock."""

    def __init__(self, now: float) -> None:
        self.leased = 0
        self._steps = 0
        self._worker_steps = 0
        self._occupied_ns = 0
        self._freed_ns = 0
        self._used_ns = 0
        self._used = 0.0
        self._last_ns = round(now * _NS)
        self._accounts: dict[RolloutId, _Account] = {}
        self._open: dict[RolloutId, _Account] = {}
        self._earlier: dict[RolloutId, RolloutUsage] = {}
        self._tokens: dict[RolloutId, int] = {}
        self._segment_steps = 0

    @property
    def steps(self) -> int:
        """Of the group, since the ledger was begun."""
        return self._steps

    @property
    def freed(self) -> int:
        """Slots that an open rollout leased and gave back."""
        return max((a.peak - self.leased for a in self._open.values()), default=0)

    def lease(self, change: int, now: float) -> None:
        """``change`` more slots are leased (fewer if negative)."""
        self._close(now)
        self.leased += change
        assert self.leased >= 0, "more leases were released than granted"
        for account in self._open.values():
            if self.leased > account.peak:
                # What was leased too late was "not yet leased" all the time until now.
                account.not_yet_leased_ns += (self.leased - account.peak) * account.own_ns
                account.peak = self.leased

    def set_used(self, slots: float, now: float) -> None:
        """From now on ``slots`` of the freed ones are held by somebody else."""
        self._close(now)
        self._used = slots

    def open(self, rollout_id: RolloutId, now: float) -> None:
        self._close(now)
        account = _Account(started_ns=self._last_ns, peak=self.leased)
        self._accounts[rollout_id] = self._open[rollout_id] = account

    def end(self, rollout_id: RolloutId, now: float) -> None:
        self._close(now)
        self._open.pop(rollout_id).ended_ns = self._last_ns

    def restore(self, rollout_id: RolloutId, usage: RolloutUsage) -> None:
        """What an ended rollout took was measured by an earlier ledger."""
        self._earlier[rollout_id] = usage

    def forget(self, rollout_id: RolloutId) -> None:
        del self._accounts[rollout_id]
        self._earlier.pop(rollout_id, None)

    def tokens(self, rollout_id: RolloutId, count: int) -> None:
        self._tokens[rollout_id] = self._tokens.get(rollout_id, 0) + count

    def step(self, count: int) -> None:
        """The group made ``count`` more steps; each counts once per slot leased now."""
        self._steps += count
        self._worker_steps += count * self.leased
        self._segment_steps += count

    def usage(self, rollout_id: RolloutId, now: float) -> RolloutUsage:
        """The sums until ``now`` (or the rollout's end). Asking changes nothing."""
        if rollout_id in self._earlier:
            return self._earlier[rollout_id]
        account = self._accounts[rollout_id]
        end_ns = account.ended_ns
        if end_ns is None:
            end_ns = max(self._last_ns, round(now * _NS))
            account = replace(account)
            self._add(account, end_ns - self._last_ns, *self._share(rollout_id, self._whole()))
        span_ns = end_ns - account.started_ns
        shared_ns = (span_ns - account.own_ns) * account.peak
        return RolloutUsage(
            span_s=span_ns / _NS,
            occupied_worker_s=account.occupied_ns / _NS,
            freed_worker_s=account.freed_ns / _NS,
            used_worker_s=account.used_ns / _NS,
            not_yet_leased_worker_s=account.not_yet_leased_ns / _NS,
            peak_slots=account.peak,
            occupied_worker_steps=account.worker_steps,
            steps=account.steps,
            shared_worker_s=shared_ns / _NS,
        )

    def totals(self, now: float) -> SlotTotals:
        elapsed_ns = max(0, round(now * _NS) - self._last_ns)
        return SlotTotals(
            occupied_worker_s=(self._occupied_ns + self.leased * elapsed_ns) / _NS,
            freed_worker_s=(self._freed_ns + self.freed * elapsed_ns) / _NS,
            used_worker_s=(self._used_ns + min(self._used, self.freed) * elapsed_ns) / _NS,
            worker_steps=self._worker_steps,
            steps=self._steps,
            leased=self.leased,
        )

    def _whole(self) -> int:
        """Tokens of open rollouts since the last change."""
        return sum(self._tokens.get(rollout_id, 0) for rollout_id in self._open)

    def _share(self, rollout_id: RolloutId, whole: int) -> tuple[int, int]:
        """Part and whole of the stretch since the last change."""
        if whole == 0:
            return 1, len(self._open)
        return self._tokens.get(rollout_id, 0), whole

    def _add(self, account: _Account, elapsed_ns: int, part: int, whole: int) -> None:
        own_ns = elapsed_ns * part // whole
        freed = account.peak - self.leased
        account.own_ns += own_ns
        account.occupied_ns += self.leased * own_ns
        account.freed_ns += freed * own_ns
        account.used_ns += round(min(self._used, freed) * own_ns)
        account.steps += self._segment_steps
        account.worker_steps += self._segment_steps * self.leased * part // whole

    def _close(self, now: float) -> None:
        """Book the stretch since the last change. A clock that went back books nothing."""
        now_ns = max(self._last_ns, round(now * _NS))
        elapsed_ns = now_ns - self._last_ns
        freed = self.freed
        self._occupied_ns += self.leased * elapsed_ns
        self._freed_ns += freed * elapsed_ns
        self._used_ns += round(min(self._used, freed) * elapsed_ns)
        whole = self._whole()
        for rollout_id, account in self._open.items():
            self._add(account, elapsed_ns, *self._share(rollout_id, whole))
        self._last_ns = now_ns
        self._tokens = {}
        self._segment_steps = 0


class SlotUse:
    """How many freed slots somebody outside holds: per node, the growth of what others hold
    since before the release, and never more than was freed there."""

    def __init__(self) -> None:
        self._freed: dict[str, int] = {}
        self._before: dict[str, float] = {}

    @property
    def watching(self) -> bool:
        return any(self._freed.values())

    def released(self, node_id: str, others: dict[str, float]) -> None:
        """A slot on ``node_id`` is being given back; ``others`` as it was before that."""
        if not self._freed.get(node_id):
            self._before[node_id] = others.get(node_id, 0.0)
        self._freed[node_id] = self._freed.get(node_id, 0) + 1

    def leased(self, node_id: str) -> None:
        """A slot on ``node_id`` came (back) to the service."""
        self._freed[node_id] = max(0, self._freed.get(node_id, 0) - 1)

    def used(self, others: dict[str, float]) -> float:
        return sum(
            min(freed, max(0.0, others.get(node_id, 0.0) - self._before[node_id]))
            for node_id, freed in self._freed.items()
            if freed
        )
