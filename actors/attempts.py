"""How often something that failed may be tried again, and when."""

from collections.abc import Callable


class Attempts:
    """A bounded number of consecutive failures, each followed by a longer pause.

    Args:
        limit: failures in a row after which nothing is tried until ``succeed`` or ``reset``.
        first_pause_s: after the first failure; it doubles each time.
    """

    def __init__(
        self,
        limit: int,
        first_pause_s: float,
        longest_pause_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._limit = limit
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self.failures = 0
        self.not_before = 0.0

    @property
    def exhausted(self) -> bool:
        return self.failures >= self._limit

    @property
    def pause_s(self) -> float:
        """How long until the next try may begin."""
        return max(0.0, self.not_before - self._clock())

    @property
    def may_try(self) -> bool:
        return not self.exhausted and self.pause_s <= 0

    def fail(self) -> None:
        pause_s = min(self._longest_pause_s, self._first_pause_s * 2**self.failures)
        self.failures += 1
        self.not_before = self._clock() + pause_s

    def reset(self) -> None:
        """It worked, or there is a new reason to try."""
        self.failures = 0
        self.not_before = 0.0
