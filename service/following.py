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
    TokenBatch,
    TokenWish,
)
from placement.errors import FlexFloorError, RequestError, UnavailableError, UnknownIdError
from placement.ids import RolloutId, SampleId
from service.schemas import StreamOf
from service.settings import ServiceSettings
from service.token_polls import TokenPolls

logger = logging.getLogger(__name__)

_REPORTS = 4096  # of a worker about a sample, fetched at once: a few seconds of a large rollout


@dataclass(frozen=True, slots=True)
class _Followed:
    """``abort_when_left``, ``reconnect_s``: decided by the request that created the rollout."""

    num_followers: int
    abort_when_left: bool = False
    reconnect_s: float = 0.0


class Following:
    """One request's way through a rollout, from its acceptance or a cursor to its last sample."""

    def __init__(
        self, rollouts: "FollowedRollouts", status: RolloutStatus, cursor: int = 0
    ) -> None:
        self.status = status
        self.cursor = cursor
        self._rollouts = rollouts
        self._give_up_at_s = time.monotonic() + rollouts.settings.max_wait_s

    async def next_batch(self) -> FinishedBatch:
        """The next ended samples; none when there were none for ``poll_wait_s``.

        Raises: UnavailableError after ``max_wait_s``; the rollout goes on.
        """
        self._check_patience()
        settings = self._rollouts.settings
        batch = await self._rollouts.coordinator.results(
            self.status.rollout_id, self.cursor, settings.poll_wait_s, settings.poll_limit
        )
        self.cursor = batch.cursor
        return batch

    async def next_growth(self) -> TokenBatch:
        """The next tokens and endings, bounded likewise.

        Raises: UnavailableError after ``max_wait_s``; the rollout goes on.
        """
        self._check_patience()
        batch = await self._rollouts.coordinator.new_tokens(
            self.status.rollout_id, self.cursor, self._rollouts.settings.poll_wait_s, _REPORTS
        )
        self.cursor = batch.cursor
        return batch

    async def next_tokens(self, known: tuple[int | None, ...]) -> tuple[SampleNews, ...]:
        """What is new beyond ``known`` (see ``CoordinatorPort.tokens``), bounded likewise. Nothing
        may be new, though others that wait were told something.

        Raises: UnavailableError after ``max_wait_s``; the rollout goes on.
        """
        self._check_patience()
        return await self._rollouts.polls.next_tokens(TokenWish(self.status.rollout_id, known))

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
        self.polls = TokenPolls(coordinator, settings.poll_wait_s)
        self.settings = settings
        self._followed: dict[RolloutId, _Followed] = {}
        self._expected_back: dict[RolloutId, tuple[_Followed, asyncio.TimerHandle]] = {}
        """Rollouts whose clients have gone, and may come back."""
        self._submitting = asyncio.Lock()  # asking whether an id is new, and taking it, are one
        self._aborts: set[asyncio.Task[None]] = set()

    async def submit(
        self,
        request: RolloutRequest,
        *,
        id_field: str,
        id_is_given: bool,
        abort_when_left: bool,
        reconnect_s: float = 0.0,
    ) -> Following:
        """Submit the rollout, or join it, and follow it.

        Args:
            id_field: the caller's name of the id.
            reconnect_s: how long to wait for a client to come back before the abort.

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
            self._come(rollout_id, _Followed(0, is_new and abort_when_left, reconnect_s))
        return Following(self, status)

    async def join(self, rollout_id: RolloutId, cursor: int, of: StreamOf) -> Following:
        """Follow a rollout from ``cursor`` on.

        Raises: RequestError, UnknownIdError, UnavailableError.
        """
        read = self.coordinator.results if of is StreamOf.SAMPLES else self.coordinator.new_tokens
        await read(rollout_id, cursor, 0.0, 1)  # before any line goes out: is there such a place?
        status = await self.coordinator.status(rollout_id)
        self._come(rollout_id, _Followed(0))
        return Following(self, status, cursor)

    def _come(self, rollout_id: RolloutId, first: _Followed) -> None:
        """One more follows; ``first`` is what holds if nobody does or did."""
        back, timer = self._expected_back.pop(rollout_id, (first, None))
        if timer is not None:
            timer.cancel()
        followed = self._followed.get(rollout_id, back)
        self._followed[rollout_id] = replace(followed, num_followers=followed.num_followers + 1)

    def left(self, rollout_id: RolloutId, *, client_gone: bool) -> None:
        followed = self._followed.pop(rollout_id)
        followed = replace(followed, num_followers=followed.num_followers - 1)
        if followed.num_followers:
            self._followed[rollout_id] = followed
        elif client_gone and followed.abort_when_left:
            timer = asyncio.get_running_loop().call_later(
                followed.reconnect_s, self._stays_away, rollout_id
            )
            self._expected_back[rollout_id] = (followed, timer)

    def _stays_away(self, rollout_id: RolloutId) -> None:
        del self._expected_back[rollout_id]
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
