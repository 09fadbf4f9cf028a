"""Rollouts without HTTP, for code that runs in the same Ray cluster.

``RayRollouts`` asks the coordinator's actor; the methods are those of ``AsyncFlexFloorClient``,
with the same arguments, answers and errors.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Unpack

from actors.ray_coordinator import connect
from actors.rollout_api import (
    CoordinatorPort,
    FinishedBatch,
    Health,
    OperationStatus,
    RolloutStatus,
    WorkerStatus,
)
from placement.errors import FlexFloorError, UnavailableError
from placement.ids import RolloutId
from service.checks import Tokenizer
from service.client_calls import Patience, TryAgainError
from service.client_terms import Prompts, RolloutOptions, RolloutResult, body_of
from service.native import to_answer, to_request
from service.schemas import RolloutBody, SampleAnswer, SamplingBody
from service.settings import ServiceSettings

logger = logging.getLogger(__name__)

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

    def _answers(self, batch: FinishedBatch) -> list[SampleAnswer]:
        return [to_answer(sample, self._tokenizer) for sample in batch.samples]

    async def _samples(self, body: RolloutBody) -> AsyncGenerator[SampleAnswer, None]:
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
                    batch = await self._coordinator.results(
                        request.rollout_id,
                        cursor,
                        self._settings.poll_wait_s,
                        self._settings.poll_limit,
                    )
                except UnavailableError as error:
                    failures += 1
                    pause_s = self._patience.pause_s(failures, TryAgainError(error.message))
                    await asyncio.sleep(pause_s)
                    continue
                cursor, done, failures = batch.cursor, batch.done, 0
                for answer in self._answers(batch):
                    yield answer
        except (GeneratorExit, asyncio.CancelledError):
            if body.abort_on_disconnect:
                await self._say_farewell(request.rollout_id)
            raise

    async def _say_farewell(self, rollout_id: RolloutId) -> None:
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._coordinator.abort(rollout_id)
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
