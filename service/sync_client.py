"""The client for code that does not await: ``AsyncFlexFloorClient`` in a thread of its own.

One client may be used by several threads.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from actors.control_api import PauseMode, PauseStatus, WeightStatus
from actors.rollout_api import Health, OperationStatus, RolloutStatus, SampleNews, WorkerStatus
from service.client import AsyncFlexFloorClient
from service.client_calls import Patience
from service.client_terms import Prompts, RolloutOptions, RolloutResult
from service.schemas import SampleAnswer, SamplingBody

T = TypeVar("T")


class FlexFloorClient:
    """See ``AsyncFlexFloorClient`` for arguments, methods and errors. Close it when done."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        silence_s: float = 300.0,
        patience: Patience | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncFlexFloorClient(
            base_url, token=token, silence_s=silence_s, patience=patience
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._result(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def rollout(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> RolloutResult:
        return self._result(self._client.rollout(prompts, sampling, **options))

    def stream(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> Iterator[SampleAnswer]:
        return self._each(self._client.stream(prompts, sampling, **options))

    def stream_tokens(
        self, prompts: Prompts, sampling: SamplingBody, **options: Unpack[RolloutOptions]
    ) -> Iterator[SampleNews]:
        return self._each(self._client.stream_tokens(prompts, sampling, **options))

    def status(self, rollout_id: str) -> RolloutStatus:
        return self._result(self._client.status(rollout_id))

    def abort(self, rollout_id: str) -> RolloutResult:
        return self._result(self._client.abort(rollout_id))

    def workers(self) -> list[WorkerStatus]:
        return self._result(self._client.workers())

    def operations(self) -> list[OperationStatus]:
        return self._result(self._client.operations())

    def health(self) -> Health:
        return self._result(self._client.health())

    def weights(self) -> WeightStatus:
        return self._result(self._client.weights())

    def update_weights(
        self, version: str, path: str, *, base_version: str | None = None, checksum: str = ""
    ) -> WeightStatus:
        return self._result(
            self._client.update_weights(version, path, base_version=base_version, checksum=checksum)
        )

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> PauseStatus:
        return self._result(self._client.pause(mode))

    def resume(self) -> PauseStatus:
        return self._result(self._client.resume())

    def sleep(self, mode: PauseMode = PauseMode.ABORT) -> PauseStatus:
        return self._result(self._client.sleep(mode))

    def wake(self) -> PauseStatus:
        return self._result(self._client.wake())

    def _result(self, call: Coroutine[Any, Any, T]) -> T:
        """What the call returns; Ctrl-C cancels it, and with it the rollout."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _each(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        async def next_one() -> tuple[T, ...]:
            async for item in stream:
                return (item,)
            return ()

        try:
            while item := self._result(next_one()):
                yield item[0]
        finally:
            self._result(stream.aclose())
