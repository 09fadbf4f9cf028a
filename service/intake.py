"""What the dialects share at run time: the coordinator, the bounds, the tokenizer, and who follows
which rollout."""

import asyncio
from collections.abc import Callable

from actors.rollout_api import CoordinatorPort, ServedModel
from placement.errors import UnknownIdError
from placement.ids import RolloutId
from service.checks import Tokenizer
from service.following import FollowedRollouts
from service.generation import Generation
from service.responses import Responses
from service.settings import ServiceSettings


class Intake:
    def __init__(
        self,
        coordinator: CoordinatorPort,
        settings: ServiceSettings,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.coordinator = coordinator
        self.settings = settings
        self.tokenizer = tokenizer
        self.followed = FollowedRollouts(coordinator, settings)
        self._served: ServedModel | None = None

    async def served_model(self) -> ServedModel:
        """Asked once: a service serves one model.

        Raises: UnavailableError.
        """
        if self._served is None:
            self._served = await self.coordinator.served_model()
        return self._served

    async def start(
        self, translate: Callable[[ServedModel], Generation], *, id_field: str
    ) -> Responses:
        """Submit what a dialect's request means, or join it, and follow it.

        Args:
            translate: runs in a thread of its own: tokenizing a large batch takes seconds.
            id_field: the dialect's name of the request's id.

        Raises: RequestError, OverloadedError, UnavailableError.
        """
        model = await self.served_model()
        generation = await asyncio.to_thread(translate, model)
        following = await self.followed.submit(
            generation.rollout,
            id_field=id_field,
            id_is_given=generation.id_is_given,
            abort_when_left=True,
        )
        return Responses(generation, following, self.tokenizer)

    async def abort_if_known(self, rollout_id: RolloutId) -> None:
        """End a rollout; one that is not known has ended."""
        try:
            await self.coordinator.abort(rollout_id)
        except UnknownIdError:
            return

    async def abort_all(self) -> int:
        """End every open rollout; returns how many there were."""
        rollouts = await self.coordinator.open_rollouts()
        await asyncio.gather(*(self.abort_if_known(r.rollout_id) for r in rollouts))
        return len(rollouts)
