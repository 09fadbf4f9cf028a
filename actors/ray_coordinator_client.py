"""The coordinator as other processes see it: ``CoordinatorPort`` over its actor.

Works from any Ray job. A coordinator that is being restarted or does not answer is
``UnavailableError``: ask again, all calls are safe to repeat.
"""

from typing import Any

from ray.actor import ActorHandle

from actors.control_api import PauseMode, PauseStatus, WeightsGroup, WeightStatus, WeightUpdate
from actors.ray_answers import await_answer
from actors.rollout_api import (
    FinishedBatch,
    Health,
    OperationStatus,
    RolloutRequest,
    RolloutStatus,
    SampleNews,
    ServedModel,
    TokenBatch,
    TokenWish,
    WorkerStatus,
)
from placement.errors import FlexFloorError, UnavailableError
from placement.ids import RolloutId, SampleId

_CALL_TIMEOUT_S = 60.0  # calls take milliseconds, but one that meets a restart waits for its end
_WEIGHTS_TIMEOUT_S = 3600.0  # its parts have bounds of their own; this is for one that hangs
_SHUTDOWN_TIMEOUT_S = 120.0  # workers leave in order before they are killed


class CoordinatorClient:
    """``CoordinatorPort``; pickles, so it can be handed to other actors."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    async def served_model(self) -> ServedModel:
        return await self._call("served_model")

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        return await self._call("submit", request)

    async def status(self, rollout_id: RolloutId) -> RolloutStatus:
        return await self._call("status", rollout_id)

    async def results(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> FinishedBatch:
        bound_s = wait_s + _CALL_TIMEOUT_S
        return await self._call("results", rollout_id, cursor, wait_s, limit, bound_s=bound_s)

    async def tokens(
        self, rollout_id: RolloutId, known: tuple[int | None, ...], wait_s: float
    ) -> tuple[SampleNews, ...]:
        bound_s = wait_s + _CALL_TIMEOUT_S
        return await self._call("tokens", rollout_id, known, wait_s, bound_s=bound_s)

    async def tokens_of(
        self, wishes: tuple[TokenWish, ...], wait_s: float
    ) -> tuple[tuple[SampleNews, ...] | FlexFloorError | None, ...]:
        return await self._call("tokens_of", wishes, wait_s, bound_s=wait_s + _CALL_TIMEOUT_S)

    async def new_tokens(
        self, rollout_id: RolloutId, cursor: int, wait_s: float, limit: int
    ) -> TokenBatch:
        bound_s = wait_s + _CALL_TIMEOUT_S
        return await self._call("new_tokens", rollout_id, cursor, wait_s, limit, bound_s=bound_s)

    async def abort(
        self, rollout_id: RolloutId, sample_ids: tuple[SampleId, ...] | None = None
    ) -> FinishedBatch:
        return await self._call("abort", rollout_id, sample_ids)

    async def open_rollouts(self) -> list[RolloutStatus]:
        return await self._call("open_rollouts")

    async def workers(self) -> list[WorkerStatus]:
        return await self._call("workers")

    async def operations(self) -> list[OperationStatus]:
        return await self._call("operations")

    async def health(self) -> Health:
        return await self._call("health")

    async def metrics_text(self) -> bytes:
        return await self._call("metrics_text")

    async def pause(self, mode: PauseMode, wait_s: float = 0.0) -> PauseStatus:
        return await self._call("pause", mode, wait_s, bound_s=wait_s + _CALL_TIMEOUT_S)

    async def resume(self) -> PauseStatus:
        return await self._call("resume")

    async def pause_status(self, wait_s: float = 0.0) -> PauseStatus:
        return await self._call("pause_status", wait_s, bound_s=wait_s + _CALL_TIMEOUT_S)

    async def sleep(self, mode: PauseMode = PauseMode.ABORT, wait_s: float = 0.0) -> PauseStatus:
        return await self._call("sleep", mode, wait_s, bound_s=wait_s + _CALL_TIMEOUT_S)

    async def wake(self, wait_s: float = 0.0, *, stay_paused: bool = False) -> PauseStatus:
        return await self._call("wake", wait_s, stay_paused, bound_s=wait_s + _CALL_TIMEOUT_S)

    async def reset_prefix_cache(self, *, running: bool = False) -> bool:
        return await self._call("reset_prefix_cache", running)

    async def update_weights(self, update: WeightUpdate) -> WeightStatus:
        return await self._call("update_weights", update, bound_s=_WEIGHTS_TIMEOUT_S)

    async def weight_status(self) -> WeightStatus:
        return await self._call("weight_status")

    async def init_weights_group(self, group: WeightsGroup) -> None:
        await self._call("init_weights_group", group, bound_s=_WEIGHTS_TIMEOUT_S)

    async def destroy_weights_group(self, name: str) -> None:
        await self._call("destroy_weights_group", name)

    async def shutdown(self) -> None:
        """Workers and leases end; ``ray_coordinator.shutdown_runtime`` ends the rest too."""
        await self._call("shutdown", bound_s=_SHUTDOWN_TIMEOUT_S)

    async def _call(self, method: str, *args: Any, bound_s: float = _CALL_TIMEOUT_S) -> Any:
        ref = getattr(self._handle, method).remote(*args)
        return await await_answer(
            ref, bound_s, who="the coordinator", what=method, lost=UnavailableError
        )
