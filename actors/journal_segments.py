"""Which segments of a journal are still needed: by rollouts in them, or for what they say.

A segment can go when every rollout in it was forgotten. If it says that a rollout was forgotten of
which an earlier segment, which stays, has something, that has to be said again at the end before
it goes: a restart would find that rollout again.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from actors.journal_format import Forgotten, Opened, Written
from placement.ids import RolloutId


@dataclass(slots=True)
class Segment:
    """Of ``number``, or what is to be written next.

    Attributes:
        named: rollouts with entries in it; ``live``: those that were not forgotten.
        forgets: rollouts that it says were forgotten, with ``Forgotten.through``.
    """

    size_bytes: int = 0
    named: set[RolloutId] = field(default_factory=set)
    live: set[RolloutId] = field(default_factory=set)
    forgets: dict[RolloutId, int] = field(default_factory=dict)

    def note(self, entry: Written) -> None:
        if isinstance(entry, Forgotten):
            self._forget(entry.rollout_id, entry.through)
        elif not isinstance(entry, Opened):
            self.named.add(entry.rollout_id)
            self.live.add(entry.rollout_id)

    def absorb(self, later: "Segment") -> None:
        self.named |= later.named
        self.live |= later.live
        for rollout_id, through in later.forgets.items():
            self._forget(rollout_id, through)

    def _forget(self, rollout_id: RolloutId, through: int) -> None:
        before = self.forgets.get(rollout_id, through)
        self.forgets[rollout_id] = max(before, through) if before and through else 0


class Segments:
    """By number, ascending; the last one is ``active``: what is written goes there."""

    def __init__(self) -> None:
        self.by_number: dict[int, Segment] = {}
        self.active = 0
        self.coming = Segment()
        """What is appended and not on its way to the disk yet."""

    def begin(self) -> None:
        """The next one is active."""
        self.active += 1
        self.by_number[self.active] = Segment()

    def add(self, number: int) -> Segment:
        """One that an earlier process wrote."""
        self.active = number
        self.by_number[number] = Segment()
        return self.by_number[number]

    def forget(self, rollout_id: RolloutId, through: int | None = None) -> None:
        """What segments, up to ``through``, have of a rollout is needed no more."""
        for number, segment in self.by_number.items():
            if through is None or number <= through:
                segment.live.discard(rollout_id)
        if through is None:
            self.coming.live.discard(rollout_id)

    def take_coming(self) -> Segment:
        """The active one, with what is on its way there from now on."""
        active = self.by_number[self.active]
        active.absorb(self.coming)
        self.coming = Segment()
        return active

    def say_again(self) -> list[Forgotten]:
        """What segments that could go say of rollouts in those that stay."""
        again: list[Forgotten] = []
        staying: set[RolloutId] = set()
        for number, segment in self.by_number.items():
            if segment.live or number == self.active:
                staying |= segment.named
                continue
            again += [
                Forgotten(rollout_id, segment.forgets.pop(rollout_id) or number)
                for rollout_id in staying.intersection(segment.forgets)
            ]
        return again

    def dropped(self) -> list[int]:
        """Segments that nobody needs once what they say was said again."""
        return [n for n, segment in self.by_number.items() if not segment.live and n != self.active]

    def size_bytes(self, without: Collection[int] = ()) -> int:
        return sum(s.size_bytes for number, s in self.by_number.items() if number not in without)
