"""Requests that follow a rollout until its end, and what their going away means.

A rollout that a request has created ends when the last request that follows it loses its
client, so that no GPU decodes for nobody. A retry that joins in time keeps it alive.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from actors.rollout_api import (
    CoordinatorPort,
    FinishedBatch,
    RolloutRequest,
    RolloutStatus,
    SampleNews,
)
from placement.errors import FlexFloorError, RequestError, UnavailableError, UnknownIdError
from placement.ids import RolloutId, SampleId
from service.settings import ServiceSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Followed:
    """``abort_when_left``: decided by the request that created the rollout."""

    num_followers: int
    abort_when_left: bool


class Following:
    """One request's way through a rollout, from its acceptance to its last sample."""

    def __init__(self, rollouts: "FollowedRollouts", status: RolloutStatus) -> None:
        self.status = status
        self._rollouts = rollouts
        self._cursor = 0
        self._give_up_at_s = time.monotonic() + rollouts.settings.max_wait_s

    async def next_batch(self) -> FinishedBatch:
        """The next ended samples; none when there were none for ``poll_wait_s``.

        Raises: UnavailableError after ``max_wait_s``; the rollout goes on.
        """
        self._check_patience()
        settings = self._rollouts.settings
        batch = await self._rollouts.coordinator.results(
            self.status.rollout_id, self._cursor, settings.poll_wait_s, settings.poll_limit
        )
        self._cursor = batch.cursor
        return batch

    async def next_tokens(self, known: tuple[int | None, ...]) -> tuple[SampleNews, ...]:
        """What is new beyond ``known`` (see ``CoordinatorPort.tokens``), bounded likewise.

        Raises: UnavailableError after ``max_wait_s``; the rollout goes on.
        """
        self._check_patience()
        return await self._rollouts.coordinator.tokens(
            self.status.rollout_id, known, self._rollouts.settings.poll_wait_s
        )

    def end_samples(self, sample_ids: tuple[SampleId, ...]) -> None:
        """Nothing more of them is wanted. Does not wait."""
        self._rollouts.abort_soon(self.status.rollout_id, sample_ids)

    def _check_patience(self) -> None:
        settings = self._rollouts.settings
        if time.monotonic() > self._give_up_at_s:
            raise UnavailableError(
                f"rollout {self.status.rollout_id} has not ended within service.max_wait_s = "
                f"{settings.max_wait_s:g} s; ask for it by its id"
            )

    async def last_status(self) -> RolloutStatus:
        return await self._rollouts.coordinator.status(self.status.rollout_id)

    def leave(self, *, client_gone: bool) -> None:
        """Call exactly once. Never waits, so that a request that is cancelled can call it."""
        self._rollouts.left(self.status.rollout_id, client_gone=client_gone)


class FollowedRollouts:
    """The rollouts that requests of this process follow now."""

    def __init__(self, coordinator: CoordinatorPort, settings: ServiceSettings) -> None:
        self.coordinator = coordinator
        self.settings = settings
        self._followed: dict[RolloutId, _Followed] = {}
        self._submitting = asyncio.Lock()  # asking whether an id is new, and taking it, are one
        self._aborts: set[asyncio.Task[None]] = set()

    async def submit(
        self,
        request: RolloutRequest,
        *,
        id_field: str,
        id_is_given: bool,
        abort_when_left: bool,
    ) -> Following:
        """Submit the rollout, or join it, and follow it.

        Args:
            id_field: the caller's name of the id.

        Raises: RequestError, OverloadedError, UnavailableError.
        """
        rollout_id = request.rollout_id
        async with self._submitting:
            is_new = not (id_is_given and await self._exists(rollout_id))
            try:
                status = await self.coordinator.submit(request)
            except asyncio.CancelledError:
                # It may have been accepted before the client went.
                if is_new and abort_when_left:
                    self.abort_soon(rollout_id)
                raise
            except RequestError as error:
                if error.field == "rollout_id":
                    error.field = id_field
                raise
            before = self._followed.get(rollout_id)
            self._followed[rollout_id] = (
                _Followed(1, is_new and abort_when_left)
                if before is None
                else replace(before, num_followers=before.num_followers + 1)
            )
        return Following(self, status)

    def left(self, rollout_id: RolloutId, *, client_gone: bool) -> None:
        followed = self._followed.pop(rollout_id)
        if followed.num_followers > 1:
            self._followed[rollout_id] = replace(followed, num_followers=followed.num_followers - 1)
        elif client_gone and followed.abort_when_left:
            self.abort_soon(rollout_id)

    async def _exists(self, rollout_id: RolloutId) -> bool:
        try:
            await self.coordinator.status(rollout_id)
        except UnknownIdError:
            return False
        return True

    def abort_soon(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> None:
        """Without waiting for it."""
        task = asyncio.create_task(self._abort(rollout_id, sample_ids))
        self._aborts.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None) -> None:
        try:
            async with asyncio.timeout(self.settings.abort_timeout_s):
                await self.coordinator.abort(rollout_id, sample_ids)
        except (FlexFloorError, TimeoutError) as error:
            logger.warning("samples of rollout %s that nobody wants go on: %s", rollout_id, error)
            return
        if sample_ids is None:
            logger.info("aborted rollout %s: its client has gone", rollout_id)
