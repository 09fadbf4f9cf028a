"""The queue, in the order in which it is bound.

The highest priority goes first; within it whoever ran before, then a scout of each prompt, from
which the predictor learns about its siblings, then whoever is expected to become longest. Where
nothing is believed, or the same of all, the order is that of arrival.

The order of those that have not begun changes only with what is believed of them, so it is kept
from one decision to the next: a long queue is looked at far more often than it changes.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from placement.views import SampleView

_LEAST_TAUGHT_SIGMA = 0.05  # of a belief to which the prompt's other samples could add nothing

_Key = tuple[int, int, bool, float, int]


class WaitingLine:
    """Changes with every call: which prompts have begun, and the order that is kept.

    Args:
        window_samples: samples are sorted by length only within so many arrivals.
    """

    def __init__(self, window_samples: int) -> None:
        self._window_samples = window_samples
        self._begun: set[str] = set()
        self._keep([])

    def forget(self) -> None:
        """Another load begins."""
        self._begun.clear()
        self._keep([])

    def begin(self, samples: Iterable[SampleView]) -> None:
        """These were bound."""
        self._begun.update(sample.prompt_key for sample in samples)

    def in_order(self, queued: Sequence[SampleView]) -> Iterator[SampleView]:
        fresh = [sample for sample in queued if not sample.generated_tokens]
        if any(self._known.get(sample.sample_id) is not sample for sample in fresh):
            self._sort(fresh)
        if len(fresh) < len(self._fresh):
            waiting = {sample.sample_id for sample in fresh}
            self._keep([entry for entry in self._fresh if entry[1].sample_id in waiting])
        ran = sorted((_ran_before(s), s) for s in queued if s.generated_tokens)
        return (sample for _, sample in heapq.merge(ran, self._fresh))

    def _sort(self, fresh: Iterable[SampleView]) -> None:
        scouted = set(self._begun)
        arrived = sorted(fresh, key=lambda sample: sample.order)
        # No two keys are equal, so samples are never compared.
        self._keep(sorted((self._not_begun(sample, scouted), sample) for sample in arrived))

    def _keep(self, fresh: list[tuple[_Key, SampleView]]) -> None:
        self._fresh = fresh
        self._known = {sample.sample_id: sample for _, sample in fresh}

    def _not_begun(self, sample: SampleView, scouted: set[str]) -> _Key:
        """Args:
        scouted: prompts of which a sample goes ahead; grows by this one's.
        """
        window, belief = sample.order // self._window_samples, sample.belief
        if belief is None:
            return (-sample.priority, window, False, 0.0, sample.order)
        follows = sample.prompt_key in scouted or belief.sigma < _LEAST_TAUGHT_SIGMA
        scouted.add(sample.prompt_key)
        # A log-normal's mean is monotone in mu + sigma^2 / 2.
        longest = -belief.mu - 0.5 * belief.sigma * belief.sigma
        return (-sample.priority, window, follows, longest, sample.order)


def _ran_before(sample: SampleView) -> _Key:
    """The largest first: it is the hardest to find room for."""
    return (-sample.priority, -1, False, -sample.context_tokens, sample.order)
