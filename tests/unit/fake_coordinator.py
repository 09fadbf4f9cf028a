"""A coordinator whose samples end when the test says so."""

import asyncio
from dataclasses import replace

from actors.control_api import (
    PauseMode,
    PauseStatus,
    ServingState,
    WeightsGroup,
    WeightStatus,
    WeightUpdate,
)
from actors.rollout_api import (
    FinishedBatch,
    Health,
    OperationStatus,
    RolloutRequest,
    RolloutState,
    RolloutStatus,
    RolloutUsage,
    SampleNews,
    SampleResult,
    ServedModel,
    TokenBatch,
    TokenWish,
    WorkerStatus,
)
from actors.token_log import Growth, TokenLog
from actors.weight_spans import WeightSpans
from placement.errors import FlexFloorError, RequestError, UnknownIdError
from placement.ids import Generation, RolloutId, SampleId, WorkerId, make_sample_id
from placement.membership import Phase
from placement.samples import FinishReason, derive_sample_seed
from tests.unit.fake_detail import ROUTING, detail_of

MODEL = ServedModel(
    path="/models/fake",
    vocab_size=512,
    max_model_len=100,
    exact=True,
    eos_token_ids=(256,),
    routing=ROUTING,
)
USAGE = RolloutUsage(
    span_s=2.0,
    occupied_worker_s=5.0,
    freed_worker_s=3.0,
    used_worker_s=1.0,
    not_yet_leased_worker_s=0.0,
    peak_slots=4,
    occupied_worker_steps=40,
    steps=12,
)


class FakeCoordinator:
    """Honours ``CoordinatorPort``. ``auto_finish``: samples end as soon as they are accepted.

    Every response is ``response``, as far as the rollout's samples have grown, and ends with
    ``ending``.
    """

    def __init__(self, *, auto_finish: bool = True) -> None:
        self.auto_finish = auto_finish
        self.model = MODEL
        self.response: tuple[int, ...] = (104, 105)
        self.ending = FinishReason.LENGTH
        self.weight_spans = WeightSpans()
        self.grown: dict[RolloutId, int] = {}
        self.cut_samples: list[SampleId] = []
        self.token_calls: list[int] = []
        """Of each call for tokens of many, how many it asked for."""
        self.requests: dict[RolloutId, RolloutRequest] = {}
        self.ended: dict[RolloutId, list[SampleResult]] = {}
        self.aborted: list[RolloutId] = []
        self.submitted = 0
        self.healthy = True
        self.submit_error: Exception | None = None
        self.results_error: Exception | None = None
        self.width = 1
        self.control: list[str] = []
        """Pauses and the like, in the order in which they were asked for."""
        self.standing = PauseStatus(ServingState.SERVING)
        self.way_out: PauseStatus | None = None
        """What comes when the group is on its way."""
        self.stuck: PauseStatus | None = None
        """It is on its way, and stays there."""
        self.wake_error = ""
        self.weights = WeightStatus("0")
        self.updates: list[WeightUpdate] = []
        self.update_error: Exception | None = None
        self.weights_groups: dict[str, WeightsGroup] = {}
        self._changed = asyncio.Condition()
        self._logs: dict[RolloutId, TokenLog] = {}

    async def served_model(self) -> ServedModel:
        return replace(self.model, weight_version=self.weights.version)

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        self.submitted += 1
        if self.submit_error is not None:
            raise self.submit_error
        before = self.requests.get(request.rollout_id)
        if before is not None and before != request:
            raise RequestError("this id belongs to another rollout", field="rollout_id")
        if before is None:
            self.requests[request.rollout_id] = request
            self.ended[request.rollout_id] = []
            self._logs[request.rollout_id] = TokenLog()
            if self.auto_finish:
                await self.finish(request.rollout_id, self._total(request.rollout_id))
        return await self.status(request.rollout_id)

    def _total(self, rollout_id: RolloutId) -> int:
        request = self.requests[rollout_id]
        return len(request.prompts) * request.num_samples

    def _result(self, rollout_id: RolloutId, number: int, reason: FinishReason) -> SampleResult:
        request = self.requests[rollout_id]
        prompt, sample = divmod(number, request.num_samples)
        tokens = len(self.response)
        if reason is FinishReason.ABORT:
            tokens = self.grown.get(rollout_id, tokens)
        return SampleResult(
            sample_id=make_sample_id(rollout_id, prompt, sample),
            prompt_index=prompt,
            sample_index=sample,
            seed=derive_sample_seed(request.seed, prompt, sample),
            token_ids=self.response[:tokens],
            logprobs=tuple(-0.5 / 2**position for position in range(tokens)),
            finish_reason=reason,
            worker_ids=(WorkerId(1),),
            prompt_tokens=len(request.prompts[prompt]),
            detail=detail_of(request, prompt, self.response[:tokens]),
            weight_versions=self.weight_spans.between(0, tokens),
        )

    async def finish(self, rollout_id: RolloutId, count: int) -> None:
        async with self._changed:
            done = len(self.ended[rollout_id])
            self.ended[rollout_id] += [
                self._result(rollout_id, n, self.ending) for n in range(done, done + count)
            ]
            for result in self.ended[rollout_id][done:]:
                self._log_ending(rollout_id, result)
            self._changed.notify_all()

    def _log_ending(self, rollout_id: RolloutId, result: SampleResult) -> None:
        stride = self.requests[rollout_id].num_samples
        number = result.prompt_index * stride + result.sample_index
        start = self.grown.get(rollout_id, 0)
        self._logs[rollout_id].append(Growth(number, start, len(result.token_ids), ended=True))

    async def status(self, rollout_id: RolloutId) -> RolloutStatus:
        if rollout_id not in self.requests:
            raise UnknownIdError(f"no rollout {rollout_id}", field="rollout_id")
        request = self.requests[rollout_id]
        total, ended = self._total(rollout_id), len(self.ended[rollout_id])
        state = RolloutState.FINISHED if ended == total else RolloutState.RUNNING
        if rollout_id in self.aborted:
            state = RolloutState.ABORTED
        return RolloutStatus(
            rollout_id=rollout_id,
            state=state,
            strategy=request.strategy,
            seed=request.seed,
            num_samples=total,
            num_ended=ended,
            num_queued=0,
            num_running=total - ended,
            response_tokens=2 * ended,
            num_moved=0,
            accepted_at=1.0,
            ended_at=3.0 if ended == total else None,
            waiting_for="",
            usage=USAGE,
        )

    async def results(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> FinishedBatch:
        if self.results_error is not None:
            raise self.results_error
        await self.status(rollout_id)
        ended = self.ended[rollout_id]
        if cursor > len(ended):
            raise RequestError(f"is {cursor}; there are {len(ended)}", field="cursor")
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(
                    lambda: len(ended) > cursor or len(ended) == self._total(rollout_id)
                )
        except TimeoutError:
            pass
        page = tuple(ended[cursor : cursor + limit])
        end = cursor + len(page)
        return FinishedBatch(page, end, done=end == self._total(rollout_id))

    async def grow(self, rollout_id: RolloutId, tokens: int) -> None:
        """The samples that have not ended have so many tokens."""
        async with self._changed:
            for number in range(len(self.ended[rollout_id]), self._total(rollout_id)):
                self._logs[rollout_id].append(Growth(number, self.grown.get(rollout_id, 0), tokens))
            self.grown[rollout_id] = tokens
            self._changed.notify_all()

    async def tokens(
        self, rollout_id: RolloutId, known: tuple[int | None, ...], wait_s: float
    ) -> tuple[SampleNews, ...]:
        await self.status(rollout_id)
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self._news(rollout_id, known))
        except TimeoutError:
            pass
        return self._news(rollout_id, known)

    async def tokens_of(
        self, wishes: tuple[TokenWish, ...], wait_s: float
    ) -> tuple[tuple[SampleNews, ...] | FlexFloorError | None, ...]:
        self.token_calls.append(len(wishes))

        def told() -> list[tuple[SampleNews, ...] | FlexFloorError | None]:
            return [
                self._news(wish.rollout_id, wish.known) or None
                if wish.rollout_id in self.requests
                else UnknownIdError(f"no rollout {wish.rollout_id}", field="rollout_id")
                for wish in wishes
            ]

        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: any(told()))
        except TimeoutError:
            pass
        return tuple(told())

    def _news(self, rollout_id: RolloutId, known: tuple[int | None, ...]) -> tuple[SampleNews, ...]:
        ended = {
            (sample.prompt_index, sample.sample_index): sample for sample in self.ended[rollout_id]
        }
        news = []
        for number, count in enumerate(known):
            prompt, sample = divmod(number, self.requests[rollout_id].num_samples)
            result = ended.get((prompt, sample))
            tokens = result.token_ids if result else self.response[: self.grown.get(rollout_id, 0)]
            if count is not None and (len(tokens) > count or result):
                logprobs = tuple(-0.5 / 2**at for at in range(count, len(tokens)))
                reason = result.finish_reason if result else None
                detail = detail_of(self.requests[rollout_id], prompt, tokens)
                news.append(
                    SampleNews(
                        prompt,
                        sample,
                        count,
                        tokens[count:],
                        logprobs,
                        reason,
                        detail=detail and detail.cut(count),
                        weight_versions=self.weight_spans.between(count, len(tokens)),
                    )
                )
        return tuple(news)

    async def new_tokens(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> TokenBatch:
        await self.status(rollout_id)
        log, ended = self._logs[rollout_id], self.ended[rollout_id]
        if cursor > len(log):
            raise RequestError(f"is {cursor}; there are {len(log)}", field="cursor")
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(
                    lambda: len(log) > cursor or len(ended) == self._total(rollout_id)
                )
        except TimeoutError:
            return TokenBatch((), cursor, done=False)
        grown, end = log.after(cursor, limit)
        results = {(r.prompt_index, r.sample_index): r for r in ended}
        news = []
        for growth in grown:
            prompt, sample = divmod(growth.number, self.requests[rollout_id].num_samples)
            ids = self.response[growth.start : growth.stop]
            logprobs = tuple(-0.5 / 2**at for at in range(growth.start, growth.stop))
            reason = results[prompt, sample].finish_reason if growth.ended else None
            whole = detail_of(self.requests[rollout_id], prompt, self.response[: growth.stop])
            news.append(
                SampleNews(
                    prompt,
                    sample,
                    growth.start,
                    ids,
                    logprobs,
                    reason,
                    detail=whole and whole.cut(growth.start),
                )
            )
        done = len(ended) == self._total(rollout_id) and end == len(log)
        return TokenBatch(tuple(news), end, done)

    async def open_rollouts(self) -> list[RolloutStatus]:
        statuses = [await self.status(rollout_id) for rollout_id in self.requests]
        return [status for status in statuses if status.num_ended < status.num_samples]

    async def abort(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> FinishedBatch:
        await self.status(rollout_id)
        if sample_ids is not None:
            self.cut_samples += sample_ids
            return FinishedBatch((), 0, done=False)
        self.aborted.append(rollout_id)
        ended = self.ended[rollout_id]
        async with self._changed:
            partials = tuple(
                self._result(rollout_id, n, FinishReason.ABORT)
                for n in range(len(ended), self._total(rollout_id))
            )
            ended += partials
            for partial in partials:
                self._log_ending(rollout_id, partial)
            self._changed.notify_all()
        return FinishedBatch(partials, len(ended), done=True)

    async def pause(self, mode: PauseMode, wait_s: float = 0.0) -> PauseStatus:
        """It is on its way until its status is asked for."""
        self.control.append(f"pause {mode}")
        if mode is PauseMode.ABORT:
            for status in await self.open_rollouts():
                await self.abort(status.rollout_id)
        if self.standing.state is not ServingState.ASLEEP:
            self.standing = self._way_to(ServingState.PAUSED, ServingState.PAUSING, mode)
        return self.standing

    async def resume(self) -> PauseStatus:
        self.control.append("resume")
        if self.standing.state is ServingState.ASLEEP:
            raise RequestError("the group is asleep; wake it, which resumes it, too")
        self.standing = PauseStatus(ServingState.SERVING)
        return self.standing

    async def pause_status(self, wait_s: float = 0.0) -> PauseStatus:
        if self.stuck is not None:
            await asyncio.sleep(min(wait_s, 0.01))
        elif self.standing.on_its_way and self.way_out is not None:
            self.standing = self.way_out
        return self.stuck or self.standing

    async def sleep(self, mode: PauseMode = PauseMode.ABORT, wait_s: float = 0.0) -> PauseStatus:
        self.control.append(f"sleep {mode}")
        self.standing = self._way_to(ServingState.ASLEEP, ServingState.PAUSING, mode)
        return self.standing

    async def wake(self, wait_s: float = 0.0, *, stay_paused: bool = False) -> PauseStatus:
        self.control.append("wake, stay paused" if stay_paused else "wake")
        if stay_paused and self.standing.state is ServingState.ASLEEP:
            self.standing = PauseStatus(ServingState.PAUSED, PauseMode.KEEP)
        elif not stay_paused:
            self.standing = self._way_to(ServingState.SERVING, ServingState.WAKING, None)
        return self.standing

    def _way_to(self, end: ServingState, way: ServingState, mode: PauseMode | None) -> PauseStatus:
        if self.wake_error and way is ServingState.WAKING:
            self.way_out = PauseStatus(ServingState.ASLEEP, PauseMode.ABORT, error=self.wake_error)
        else:
            self.way_out = PauseStatus(end, mode)
        return PauseStatus(way, mode, waiting_for="a step")

    async def reset_prefix_cache(self, *, running: bool = False) -> bool:
        self.control.append("reset running" if running else "reset")
        return running or not await self.open_rollouts()

    async def update_weights(self, update: WeightUpdate) -> WeightStatus:
        self.updates.append(update)
        if self.update_error is not None:
            raise self.update_error
        if update.last:
            self.weights = WeightStatus(update.version, seconds=0.5, received_bytes=8)
        else:
            self.weights = replace(self.weights, parts_version=update.version)
        return self.weights

    async def weight_status(self) -> WeightStatus:
        return self.weights

    async def init_weights_group(self, group: WeightsGroup) -> None:
        self.weights_groups[group.name] = group

    async def destroy_weights_group(self, name: str) -> None:
        if self.weights_groups.pop(name, None) is None:
            raise UnknownIdError(f"no group {name}", field="name")

    async def workers(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                worker_id=WorkerId(1 + rank),
                state="decoding",
                rank=rank,
                experts=(0, 1),
                node_id="n1",
                slot="GPU:0",
                running=1,
                kv_used_tokens=10,
                kv_capacity_tokens=100,
                steps=7,
                leased_at=1.0,
                pid=4242,
            )
            for rank in range(self.width)
        ]

    async def operations(self) -> list[OperationStatus]:
        return [
            OperationStatus(
                generation=Generation(2),
                old_members=(WorkerId(1), WorkerId(2)),
                new_members=(WorkerId(1),),
                reason="consolidate",
                explanation="2 samples fit on 1 worker",
                phase=Phase.DONE,
                error="",
                started_at=1.0,
                ended_at=2.0,
                finished_ratio_at_start=0.5,
                pause_s=0.1,
                first_step_s=0.2,
                gap_s=0.3,
            )
        ]

    async def health(self) -> Health:
        return Health(
            healthy=self.healthy,
            detail="decoding" if self.healthy else "no step for 61.0 s with 3 samples open",
            last_step_age_s=0.1 if self.healthy else 61.0,
            workers=1,
            wanted_workers=1,
        )

    async def metrics_text(self) -> bytes:
        return b"# TYPE flexfloor_tokens_total counter\nflexfloor_tokens_total 3.0\n"

    async def shutdown(self) -> None:
        self.healthy = False
