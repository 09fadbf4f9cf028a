"""With which weights which tokens of a response were decoded."""

from dataclasses import dataclass, field

WeightVersions = tuple[tuple[int, str], ...]
"""(position in the response of the first token, version) of each span, ascending."""


@dataclass(slots=True)
class WeightSpans:
    _spans: list[tuple[int, str]] = field(default_factory=list)

    def extend(self, start: int, version: str) -> None:
        """Tokens from ``start`` on came with ``version``."""
        if not self._spans or self._spans[-1][1] != version:
            self._spans.append((start, version))

    def began_before(self, version: str) -> bool:
        """The first token came with other weights."""
        return bool(self._spans) and self._spans[0][1] != version

    def between(self, start: int, stop: int) -> WeightVersions:
        """Of the tokens from ``start`` to ``stop``."""
        before = [span for span in self._spans if span[0] <= start]
        inside = [span for span in self._spans if start < span[0] < stop]
        return ((start, before[-1][1]), *inside) if before and stop > start else tuple(inside)


def last_version(spans: WeightVersions, otherwise: str) -> str:
    return spans[-1][1] if spans else otherwise
