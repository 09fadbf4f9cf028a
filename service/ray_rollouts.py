"""Rollouts without HTTP, for code that runs in the same Ray cluster.

``RayRollouts`` asks the coordinator's actor; the methods are those of ``AsyncFlexFloorClient``,
with the same arguments, answers and errors.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar, Unpack

from actors.control_api import (
    DiskWeights,
    PauseMode,
    PauseStatus,
    ServingState,
    WeightStatus,
    WeightUpdate,
)
from actors.ray_coordinator import connect
from actors.rollout_api import (
    CoordinatorPort,
    FinishedBatch,
    Health,
    OperationStatus,
    RolloutStatus,
    TokenBatch,
    WorkerStatus,
)
from placement.errors import FlexFloorError, UnavailableError
from placement.ids import RolloutId
from service.checks import Tokenizer
from service.client_calls import Patience, TryAgainError
from service.client_terms import Prompts, RolloutOptions, RolloutResult, body_of
from service.control import until_settled
from service.native import to_answer, to_news, to_request
from service.schemas import NewsAnswer, RolloutBody, SampleAnswer, SamplingBody
from service.settings import ServiceSettings

logger = logging.getLogger(__name__)

B = TypeVar("B", FinishedBatch, TokenBatch)
_Read = Callable[[RolloutId, int, float, int], Awaitable[B]]

_REPORTS = 4096  # of a worker about a sample, fetched at once
_FAREWELL_S = 5.0


class PortRollouts:
    """Args:
    tokenizer: without one, prompts must be token ids and answers have no text.
    settings: bounds of one request, as those of the HTTP service.
    """

    def __init__(
        self,
        coordinator: CoordinatorPort,
        *,
        tokenizer: Tokenizer | None = None,
        settings: ServiceSettings | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._tokenizer = tokenizer
        self._settings = settings or ServiceSettings()
        self._patience = patience or Patience()

    async def rollout(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> RolloutResult:
        body = body_of(prompts, sampling, options)
        async with aclosing(self._samples(body)) as samples:
            ended = [sample async for sample in samples]
        return RolloutResult.of(await self.status(str(body.id)), ended)

    async def stream(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> AsyncGenerator[SampleAnswer, None]:
        async with aclosing(self._samples(body_of(prompts, sampling, options))) as samples:
            async for sample in samples:
                yield sample

    async def stream_tokens(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> AsyncGenerator[NewsAnswer, None]:
        body = body_of(prompts, sampling, options)
        read = self._coordinator.new_tokens
        async with aclosing(self._batches(body, read, _REPORTS)) as batches:
            async for batch in batches:
                for news in batch.news:
                    yield to_news(news)

    async def status(self, rollout_id: str) -> RolloutStatus:
        return await self._coordinator.status(RolloutId(rollout_id))

    async def abort(self, rollout_id: str) -> RolloutResult:
        batch = await self._coordinator.abort(RolloutId(rollout_id))
        return RolloutResult.of(await self.status(rollout_id), self._answers(batch))

    async def workers(self) -> list[WorkerStatus]:
        return await self._coordinator.workers()

    async def operations(self) -> list[OperationStatus]:
        return await self._coordinator.operations()

    async def health(self) -> Health:
        return await self._coordinator.health()

    async def weights(self) -> WeightStatus:
        return await self._coordinator.weight_status()

    async def update_weights(
        self, version: str, path: str, *, base_version: str | None = None, checksum: str = ""
    ) -> WeightStatus:
        """Tensors that are no files go to ``CoordinatorPort.update_weights`` itself."""
        return await self._coordinator.update_weights(
            WeightUpdate(DiskWeights(path), version, base_version, checksum)
        )

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> PauseStatus:
        return await self._settled(await self._coordinator.pause(mode))

    async def resume(self) -> PauseStatus:
        return await self._coordinator.resume()

    async def sleep(self, mode: PauseMode = PauseMode.ABORT) -> PauseStatus:
        return await self._settled(await self._coordinator.sleep(mode))

    async def wake(self) -> PauseStatus:
        status = await self._settled(await self._coordinator.wake())
        if status.state is ServingState.ASLEEP:
            raise UnavailableError(f"the group is asleep; it could not be woken: {status.error}")
        return status

    async def _settled(self, status: PauseStatus) -> PauseStatus:
        settings = self._settings
        return await until_settled(
            self._coordinator, status, bound_s=settings.max_wait_s, poll_s=settings.poll_wait_s
        )

    def _answers(self, batch: FinishedBatch) -> list[SampleAnswer]:
        return [to_answer(sample, self._tokenizer) for sample in batch.samples]

    async def _samples(self, body: RolloutBody) -> AsyncGenerator[SampleAnswer, None]:
        limit = self._settings.poll_limit
        async with aclosing(self._batches(body, self._coordinator.results, limit)) as batches:
            async for batch in batches:
                for answer in self._answers(batch):
                    yield answer

    async def _batches(
        self, body: RolloutBody, read: _Read[B], limit: int
    ) -> AsyncGenerator[B, None]:
        """Whoever stops reading ends the rollout: there is no connection that could be missed."""
        model = await self._coordinator.served_model()
        request = await asyncio.to_thread(to_request, body, model, self._settings, self._tokenizer)
        accepted, done, cursor, failures = False, False, 0, 0
        try:
            while not done:
                try:
                    if not accepted:
                        await self._coordinator.submit(request)
                        accepted = True
                    wait_s = self._settings.poll_wait_s
                    batch = await read(request.rollout_id, cursor, wait_s, limit)
                except UnavailableError as error:
                    failures += 1
                    pause_s = self._patience.pause_s(failures, TryAgainError(error.message))
                    await asyncio.sleep(pause_s)
                    continue
                cursor, done, failures = batch.cursor, batch.done, 0
                yield batch
        except (GeneratorExit, asyncio.CancelledError):
            if body.abort_on_disconnect:
                await say_farewell(self._coordinator, request.rollout_id)
            raise


async def say_farewell(coordinator: CoordinatorPort, rollout_id: RolloutId) -> None:
    """Nobody reads it any more: end it, if the coordinator answers in time."""
    try:
        async with asyncio.timeout(_FAREWELL_S):
            await coordinator.abort(rollout_id)
    except (FlexFloorError, TimeoutError) as error:
        logger.warning("rollout %s goes on, and nobody reads it: %s", rollout_id, error)


class RayRollouts(PortRollouts):
    """Of the service that runs in this Ray namespace. Needs an initialised Ray.

    Raises:
        UnavailableError: none runs there.
    """

    def __init__(
        self,
        namespace: str = "flexfloor",
        *,
        tokenizer: Tokenizer | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(connect(namespace), tokenizer=tokenizer, patience=patience)
