"""What a forward shows beside its tokens: routed experts, and how likely a prompt was; and whether
the scheduler keeps to what it was promised.

Touches vLLM's private API as ``vllm_private`` does, under the same rules and for the same
version. It looks at the one place of vLLM's model runner where a forward's hidden states are
there and the batch is still the one that it was made of; requests that ask for nothing cost a
look into an empty dict, and routers get a callback only while somebody asks.

vLLM's own way to return routed experts belongs to its other model runner. What fills the buffer
here is its capturer, which knows in which layouts a router sees the tokens of several ranks.

On GPUs with modular expert kernels the same hooks are there; monolithic ones have none, and then
this model's routing is not told. Read, not measured.

Invariants: a row is told once, whatever is recomputed; what is not complete is not made up, so
that whoever counts the rows finds out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    _get_routed_experts_shape,
)
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from actors.token_detail import Alternatives, PromptScores, RoutingLayout, TokenDetail
from placement.samples import Sample

_SCORED_ROWS = 256
"""Logits of so many prompt tokens exist at once: with large vocabularies they are gigabytes."""


@dataclass(slots=True)
class _Watched:
    """A request that asked for something.

    Attributes:
        num_prompt_tokens: of the sample's own prompt, without what it has generated.
        first_rows: that the next token to be told brings: the whole context before the first one.
        next_row: position in the sequence whose routing is told next; None: not asked for.
        rows: computed and not told yet.
        scores: pieces of the prompt's; None: not asked for, or told.
    """

    num_top: int
    temperature: float
    num_prompt_tokens: int
    first_rows: int
    next_row: int | None
    rows: bytearray = field(default_factory=bytearray)
    num_prompt_top: int = 0
    scores: list[tuple[torch.Tensor, ...]] | None = None


class ForwardWatch:
    """Attributes:
    layout: of a row of routed experts; None: this model's routers do not tell them.
    preempted: times that the scheduler put a request back for want of KV.
    """

    def __init__(
        self, config: VllmConfig, scheduler: Any, runner: Any, model: torch.nn.Module
    ) -> None:
        self.preempted = 0
        self._preempt = scheduler._preempt_request
        scheduler._preempt_request = self._count_preemption
        self._config = config
        self._runner = runner
        self._model = model
        self._layers = [m for m in model.modules() if isinstance(m, MoERunner)]
        self._watched: dict[str, _Watched] = {}
        self._capturer: RoutedExpertsCapturer | None = None
        self._capturing = False
        self.layout = self._read_layout()
        runner._get_prompt_logprobs_dict = self._look

    def _read_layout(self) -> RoutingLayout | None:
        if not self._layers or any(
            not isinstance(layer.router, BaseRouter) or layer._quant_method.is_monolithic
            for layer in self._layers
        ):
            return None
        layers, experts, top_k = _get_routed_experts_shape(self._config)
        return RoutingLayout(layers, top_k, "uint8" if experts <= 256 else "uint16")

    def _count_preemption(self, *args: Any, **kwargs: Any) -> None:
        self.preempted += 1
        self._preempt(*args, **kwargs)

    # -------------------------------------------------------------------------- who asks

    def begin(self, request_id: str, sample: Sample) -> None:
        """A sample is about to be added. What it has generated already was told before."""
        wanted = sample.sampling
        scores = wanted.prompt_logprobs is not None and not sample.begun
        if not (wanted.top_logprobs or wanted.routed_experts or scores):
            return
        self._watched[request_id] = _Watched(
            num_top=wanted.top_logprobs,
            temperature=wanted.temperature,
            num_prompt_tokens=len(sample.prompt_ids),
            first_rows=1 if sample.begun else sample.context_tokens,
            next_row=sample.untold_from if wanted.routed_experts else None,
            num_prompt_top=wanted.prompt_logprobs or 0,
            scores=[] if scores else None,
        )
        self._capture_if_asked()

    def forget(self, request_id: str) -> None:
        if self._watched.pop(request_id, None) is not None:
            self._capture_if_asked()

    def _capture_if_asked(self) -> None:
        asked = any(watched.next_row is not None for watched in self._watched.values())
        if asked == self._capturing:
            return
        self._capturing = asked
        if asked and self._capturer is None:
            rows = self._config.scheduler_config.max_num_batched_tokens
            self._capturer = RoutedExpertsCapturer(rows, self._config)
        for layer in self._layers:
            fill = partial(self._fill, layer.layer_id)
            layer.router.set_capture_fn(fill if asked else None)

    def _fill(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        assert self._capturer is not None
        # The rank changes with the group.
        self._capturer.dp_rank = self._config.parallel_config.data_parallel_rank
        self._capturer.capture(layer_id, topk_ids)

    # ------------------------------------------------------------------------ in a forward

    def _look(self, hidden: torch.Tensor, num_scheduled: dict[str, int]) -> dict[str, None]:
        """In place of vLLM's own prompt logprobs, which know no temperature."""
        if not self._watched:
            return {}
        runner = self._runner
        routed = None
        if self._capturing and self._capturer is not None:
            routed = self._capturer.snapshot_routing_data(len(hidden)).cpu().numpy()
        for request_id, count in num_scheduled.items():
            watched = self._watched.get(request_id)
            if watched is None:
                continue
            row = runner.input_batch.req_id_to_index[request_id]
            first = int(runner.query_start_loc.np[row])
            request = runner.requests[request_id]
            start = request.num_computed_tokens
            if watched.next_row is not None and routed is not None:
                _take_rows(watched, routed[first : first + count], start)
            if watched.scores is not None:
                end = min(start + 1 + count, watched.num_prompt_tokens)
                targets = request.prompt_token_ids[start + 1 : end]
                self._score(watched, hidden[first : first + len(targets)], targets)
        return {}

    def _score(self, watched: _Watched, hidden: torch.Tensor, targets: list[int]) -> None:
        assert watched.scores is not None
        for at in range(0, len(targets), _SCORED_ROWS):
            logits = self._model.compute_logits(hidden[at : at + _SCORED_ROWS])
            logits = logits.to(torch.float32)
            if watched.temperature:  # 0 is greedy, and its logprobs are those of 1
                logits = logits.div_(watched.temperature)
            logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
            ids = torch.tensor(targets[at : at + _SCORED_ROWS], device=logits.device)[:, None]
            chosen = logprobs.gather(-1, ids)
            ranks = (logprobs > chosen).sum(-1) + 1
            top = logprobs.topk(min(watched.num_prompt_top, logprobs.shape[-1]), dim=-1)
            watched.scores.append(
                (chosen.flatten().cpu(), ranks.cpu(), top.indices.cpu(), top.values.cpu())
            )

    # ------------------------------------------------------------------------- what it told

    def detail(
        self, request_id: str, num_tokens: int, read_top: Callable[[], list[Alternatives]]
    ) -> TokenDetail | None:
        """What belongs to the next ``num_tokens`` of a request.

        Args:
            read_top: their alternatives, at least as many as were asked for.
        """
        watched = self._watched.get(request_id)
        if watched is None or not num_tokens:
            return None
        routed: list[bytes] = []
        if watched.next_row is not None and self.layout is not None:
            for _ in range(num_tokens):
                num_bytes = watched.first_rows * self.layout.row_bytes
                routed.append(bytes(watched.rows[:num_bytes]))
                del watched.rows[:num_bytes]
                watched.first_rows = 1
        scores, watched.scores = watched.scores, None
        return TokenDetail(
            tuple(row[: watched.num_top] for row in read_top()) if watched.num_top else (),
            tuple(routed),
            None if watched.next_row is None else self.layout,
            None if scores is None else _prompt_scores(scores, watched.num_prompt_top),
        )


def _take_rows(watched: _Watched, rows: np.ndarray[Any, Any], start: int) -> None:
    """``rows``: of the positions from ``start`` on. Those told before are recomputed ones."""
    assert watched.next_row is not None
    end = start + len(rows)
    if start <= watched.next_row < end:
        watched.rows += rows[watched.next_row - start :].tobytes()
        watched.next_row = end


def _prompt_scores(pieces: list[tuple[torch.Tensor, ...]], num_top: int) -> PromptScores:
    if not pieces:  # a prompt of one token: nothing comes before it
        return PromptScores(b"", b"", num_top)
    chosen, ranks, ids, logprobs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return PromptScores(
        chosen.numpy().tobytes(),
        ranks.to(torch.int32).numpy().tobytes(),
        ids.shape[1],
        ids.to(torch.int32).numpy().tobytes(),
        logprobs.numpy().tobytes(),
    )
