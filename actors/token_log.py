"""Where the samples of a rollout grew, in the order in which it was journaled.

A reader's place in it is one number, whatever the number of samples: who reads on from there
gets every token and every ending once. Replaying the journal makes the same log, so the number
outlives a coordinator as far as its journal does.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Growth:
    """One sample's response grew from ``start`` to ``stop`` tokens.

    Attributes:
        number: of the sample, in the order of the request.
        ended: this is the last of it.
    """

    number: int
    start: int
    stop: int
    ended: bool = False


class TokenLog:
    def __init__(self) -> None:
        self._growths: list[Growth] = []

    def __len__(self) -> int:
        return len(self._growths)

    def append(self, growth: Growth) -> None:
        self._growths.append(growth)

    def after(self, cursor: int, limit: int) -> tuple[list[Growth], int]:
        """What grew in the next ``limit`` entries, put together per sample, and the place behind
        them."""
        entries = self._growths[cursor : cursor + limit]
        grown: dict[int, Growth] = {}
        for entry in entries:
            before = grown.get(entry.number)
            grown[entry.number] = entry if before is None else replace(entry, start=before.start)
        return list(grown.values()), cursor + len(entries)
