"""What the demo asks for, and the memory that it needs: sizes and seeds, nothing measured."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.rollout_api import Strategy
from actors.sample_record import key_of_prompt
from deploy.demo.trace import Trace
from placement.lengths import LengthHistory, LengthPredictor

PROMPT_TOKENS = 64
SEED = 20260101
"""Of prompts and of the rollouts: all of them ask for the same samples."""

KV_BLOCK_TOKENS_LIMIT = 128
"""The largest KV block that vLLM picks by itself; whole blocks of it hold for smaller ones."""

KV_TYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch: the same samples in every rollout, however long they may get.

    Attributes:
        trace: lengths, already scaled; replayed as stops that no decision can see.
        max_tokens: what a decision sees instead.
        vocab_size: bound of the prompts' token ids.
    """

    trace: Trace
    max_tokens: int
    vocab_size: int

    @property
    def num_samples(self) -> int:
        return len(self.trace.lengths_tokens) * self.trace.num_samples

    @property
    def max_sample_tokens(self) -> int:
        return PROMPT_TOKENS + self.max_tokens

    def body(self, rollout_id: str, strategy: Strategy) -> dict[str, Any]:
        """Of ``POST /v1/rollouts``. One sample in four is drawn, three are greedy."""
        lengths = self.trace.lengths_tokens
        samplings = [
            [self._sampling(1.0 if (i + j) % 4 == 3 else 0.0) for j in range(len(row))]
            for i, row in enumerate(lengths)
        ]
        return {
            "id": rollout_id,
            "prompts": self._prompts(),
            "n": self.trace.num_samples,
            "sampling": self._sampling(0.0),
            "sample_samplings": samplings,
            "replay_stop_tokens": [list(row) for row in lengths],
            "seed": SEED,
            "strategy": strategy.value,
            "stream": True,
        }

    def length_history(self, past: Trace) -> LengthHistory:
        """What a predictor knows that has seen one rollout of the same prompts, ``past``; a length
        at the limit was cut there."""
        predictor = LengthPredictor()
        for prompt, lengths in zip(self._prompts(), past.lengths_tokens, strict=True):
            for tokens in lengths:
                predictor.observe(key_of_prompt(prompt), tokens, tokens >= self.max_tokens)
        predictor.begin_rollout()
        return predictor.history()

    def _prompts(self) -> list[list[int]]:
        noise = random.Random(SEED)
        return [
            [noise.randrange(self.vocab_size) for _ in range(PROMPT_TOKENS)]
            for _ in self.trace.lengths_tokens
        ]

    def _sampling(self, temperature: float) -> dict[str, Any]:
        # Lengths come from the trace: an early end-of-sequence would make them ours.
        return {"max_tokens": self.max_tokens, "temperature": temperature, "ignore_eos": True}


def kv_memory_bytes(
    model_config: dict[str, Any], max_workers: int, num_samples: int, sample_tokens: int
) -> int:
    """KV memory of a worker in the full group, such that a single worker that holds *all*
    experts still has KV for ``num_samples`` of ``sample_tokens``.

    A worker that takes experts over pays for them with KV, so what the last one will hold is
    added here. One more block is vLLM's null block.
    """
    layers, experts = model_config["num_hidden_layers"], model_config["num_experts"]
    token_bytes = (
        2 * model_config["num_key_value_heads"] * model_config["head_dim"] * KV_TYPE_BYTES * layers
    )
    expert_bytes = (
        3 * model_config["hidden_size"] * model_config["moe_intermediate_size"] * 2 * layers
    )
    blocks = num_samples * -(-sample_tokens // KV_BLOCK_TOKENS_LIMIT) + 1
    later_experts = experts - -(-experts // max_workers)
    return blocks * KV_BLOCK_TOKENS_LIMIT * token_bytes + later_experts * expert_bytes


def read_model_config(model_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return config
