"""What a simulated rollout believes about lengths: predicted as live, or known for comparison."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from placement.lengths import LengthPredictor
from placement.simulate.workload import Ints, Workload, prompt_key
from placement.views import CERTAIN_SIGMA, LengthBelief


class Foresight(Protocol):
    """Beliefs about the samples of one workload, by their index."""

    def observe(self, sample: int, response_tokens: int) -> None:
        """This sample has ended."""

    def refresh(self, running: Sequence[int], generated_tokens_N: Ints) -> None:
        """Learn from what still runs."""

    def beliefs(self) -> list[LengthBelief]:
        """One for each sample."""


class PredictedLengths:
    """The live predictor, with the workload's history as an earlier rollout."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._predictor = LengthPredictor()
        if workload.history:
            self._predictor.begin_rollout()
            for key, lengths in workload.history.items():
                for tokens in lengths:
                    self._predictor.observe(key, tokens, tokens >= workload.max_response_tokens)
        self._predictor.begin_rollout()

    def observe(self, sample: int, response_tokens: int) -> None:
        censored = response_tokens >= self._workload.max_response_tokens
        self._predictor.observe(self._workload.prompt_key(sample), response_tokens, censored)

    def refresh(self, running: Sequence[int], generated_tokens_N: Ints) -> None:
        self._predictor.refresh(
            (self._workload.prompt_key(i), int(generated_tokens_N[i])) for i in running
        )

    def beliefs(self) -> list[LengthBelief]:
        prompts = self._workload.prompt_N.tolist()
        of_prompt = {p: self._predictor.belief(prompt_key(p)) for p in set(prompts)}
        return [of_prompt[p] for p in prompts]


class TrueLengths:
    """An oracle, or one that errs: a factor of log-normal spread ``error_sigma`` per prompt."""

    def __init__(self, workload: Workload, error_sigma: float = 0.0, seed: int = 0) -> None:
        noise = np.random.default_rng(seed).standard_normal(int(workload.prompt_N.max()) + 1)
        sigma = math.hypot(error_sigma, CERTAIN_SIGMA)
        self._beliefs = [
            LengthBelief(math.log(tokens) + error_sigma * float(noise[prompt]), sigma)
            for tokens, prompt in zip(
                workload.response_tokens_N.tolist(), workload.prompt_N.tolist(), strict=True
            )
        ]

    def observe(self, sample: int, response_tokens: int) -> None:
        """It knows already."""

    def refresh(self, running: Sequence[int], generated_tokens_N: Ints) -> None:
        """It knows already."""

    def beliefs(self) -> list[LengthBelief]:
        return self._beliefs
