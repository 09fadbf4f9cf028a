"""What stands where verl expects its rollout server: one actor that passes everything on to a
service that runs.

It holds no model and no GPU. The service decides how many workers there are; to verl it is one
replica, however wide.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.control_api import PauseMode, PauseStatus, ServingState
from actors.rollout_api import CoordinatorPort, RolloutRequest
from placement.errors import RequestError, UnavailableError
from service.client_calls import Patience, TryAgainError
from service.control import until_settled
from service.ray_rollouts import say_farewell
from service.verl_requests import to_output, to_rollout

_POLL_S = 30.0
_SETTLE_S = 1800.0  # a large model needs minutes to be loaded again
_GENERATE_S = 86400.0


class VerlServer:
    """Args:
    response_tokens, budget_tokens: of a response, and of prompt and response together, where
        a request does not say.
    routed_experts: tell which experts each token was routed to.
    output: makes verl's answer of its fields.
    """

    def __init__(
        self,
        coordinator: CoordinatorPort,
        *,
        response_tokens: int,
        budget_tokens: int,
        routed_experts: bool,
        output: Callable[..., Any],
        patience: Patience | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._response_tokens = response_tokens
        self._budget_tokens = budget_tokens
        self._routed_experts = routed_experts
        self._output = output
        self._patience = patience or Patience()
        self._global_steps: int | None = None
        self._rejecting = False

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Any:
        """One response. A call that is cancelled ends it.

        Raises: RequestError, UnavailableError.
        """
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        for field, value in media.items():
            if value:
                raise RequestError("is given, but only text models are served", field=field)
        if self._rejecting:
            return self._output(
                token_ids=[],
                stop_reason="aborted",
                extra_fields={"global_steps": self._global_steps},
            )
        rest_tokens = self._budget_tokens - len(prompt_ids)
        rollout = to_rollout(
            prompt_ids,
            sampling_params,
            request_id,
            await self._coordinator.served_model(),
            default_tokens=max(1, min(self._response_tokens, rest_tokens)),
            priority=priority,
            routed_experts=self._routed_experts,
        )
        try:
            async with asyncio.timeout(_GENERATE_S):
                return await self._ended(rollout)
        except asyncio.CancelledError:
            await say_farewell(self._coordinator, rollout.rollout_id)
            raise

    async def _ended(self, rollout: RolloutRequest) -> Any:
        failures = 0
        while True:
            try:
                await self._coordinator.submit(rollout)  # or join it
                batch = await self._coordinator.results(rollout.rollout_id, 0, _POLL_S, 1)
            except UnavailableError as error:
                failures += 1
                pause_s = self._patience.pause_s(failures, TryAgainError(error.message))
                await asyncio.sleep(pause_s)
                continue
            failures = 0
            for sample in batch.samples:
                return self._output(**to_output(sample, self._global_steps))

    # What verl's trainer asks around its steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Everybody gets what there is. Until ``resume_generation``, what comes waits, or comes
        back empty where ``reject_request`` says so."""
        open_ids = [r.rollout_id for r in await self._coordinator.open_rollouts()]
        self._rejecting = reject_request
        await self._settled(await self._coordinator.pause(PauseMode.ABORT))
        return {"aborted_count": len(open_ids), "request_ids": open_ids}

    async def resume_generation(self) -> None:
        await self._coordinator.resume()
        self._rejecting = False

    async def sleep(self) -> None:
        """Every worker ends, and its slot goes back to the cluster."""
        await self._settled(await self._coordinator.sleep())

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Lease and found the group again. Woken for weights alone, it stands still until it is
        woken for the rest."""
        stay_paused = tags is not None and "kv_cache" not in tags
        status = await self._settled(await self._coordinator.wake(stay_paused=stay_paused))
        if status.state is ServingState.ASLEEP:
            raise UnavailableError(f"the group could not be woken: {status.error}")

    async def clear_kv_cache(self) -> None:
        """No KV outlives its sample, so this finds something only if samples run; theirs is
        computed anew."""
        await self._coordinator.reset_prefix_cache(running=True)

    async def release_kv_cache(self) -> None:
        """Stand still. KV memory alone is not given back: ``sleep`` gives back everything."""
        await self._settled(await self._coordinator.pause(PauseMode.KEEP))

    async def resume_kv_cache(self) -> None:
        await self._coordinator.resume()

    async def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = global_steps

    async def _settled(self, status: PauseStatus) -> PauseStatus:
        return await until_settled(self._coordinator, status, bound_s=_SETTLE_S, poll_s=_POLL_S)
