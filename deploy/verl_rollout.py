"""FlexFloor as a rollout of verl: ``VERL_USE_EXTERNAL_MODULES=deploy.verl_rollout`` and
``actor_rollout_ref.rollout.name=flexfloor``.

verl imports this module; nothing else does. Written for verl 0.9. The service runs already and
leases its own slots; ``rollout.engine_kwargs.flexfloor`` says where::

    engine_kwargs: {flexfloor: {namespace: flexfloor, address: "10.0.0.1:8000"}}

One service is one replica, whatever its width, so ``tensor_model_parallel_size`` times
``data_parallel_size`` has to be the number of the trainer's workers (hybrid) or of
``nnodes * n_gpus_per_node`` (standalone, which generates and takes no weights). In a hybrid
trainer, sleeping gives the service's slots back to the cluster, and new weights go through Ray's
object store, from the trainer's first rank.
"""

import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)
from verl.workers.rollout.utils import ensure_async_iterator

from actors.control_api import ObjectWeights, WeightUpdate
from actors.ray_coordinator import connect
from deploy.verl_server import VerlServer
from placement.errors import ConfigError, RequestError

NAME = "flexfloor"


def _where(config: Any) -> tuple[str, str]:
    """(namespace, address of the HTTP service; "" where it has none).

    Raises: ConfigError.
    """
    own = dict((config.engine_kwargs or {}).get(NAME) or {})
    namespace, address = own.pop("namespace", NAME), own.pop("address", "")
    if own:
        raise ConfigError(
            f"has {sorted(own)}; it takes namespace and address",
            field=f"rollout.engine_kwargs.{NAME}",
        )
    return namespace, address


class HostedVerlServer(VerlServer):
    """The server in its actor: it finds the coordinator from there."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            connect(_where(config)[0]),
            response_tokens=config.response_length,
            budget_tokens=config.prompt_length + config.response_length,
            routed_experts=bool(config.enable_rollout_routing_replay),
            output=TokenOutput,
        )


class FlexFloorReplica(RolloutReplica):
    """The running service. Nothing is launched but the actor that passes calls on to it."""

    async def launch_servers(self) -> None:
        """Raises: ConfigError."""
        if self.replica_rank != 0:
            raise ConfigError(
                f"there would be a replica {self.replica_rank}, but one service is one replica; "
                "let tensor_model_parallel_size * data_parallel_size be the whole world size",
                field="rollout.data_parallel_size",
            )
        self._server_address = _where(self.config)[1]
        self._server_handle = (
            ray.remote(HostedVerlServer)
            .options(
                name=f"{NAME}_server_0_0{self.name_suffix}",
                num_cpus=0,
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config)
        )
        self.servers = [self._server_handle]

    async def init_standalone(self) -> None:
        """Without a resource pool: the service leases its slots itself."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def start_profile(self, **kwargs: Any) -> None:
        raise RequestError("the service has no profiler; see its metrics", field="profiler")

    async def stop_profile(self) -> None:
        raise RequestError("the service has no profiler; see its metrics", field="profiler")


class FlexFloorAdapter(BaseRollout):
    """The trainer's side, in each of its workers. The first one talks to the service; the others
    only take part in what gathers the weights."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = max(0, replica_rank)
        self._speaks = int(os.environ["RANK"]) == 0
        self._namespace = _where(self.config)[0]
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        if self._speaks and self.config.free_cache_engine:
            await self._server_actor().wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self._speaks and self.config.free_cache_engine:
            await self._server_actor().sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Raises: RequestError, for another wire format; what the coordinator's
        ``update_weights`` raises."""
        if wire_format != "named_tensors":
            raise RequestError(
                f"is {wire_format!r}; only 'named_tensors' is taken", field="wire_format"
            )
        parts = _parts(weights, self.config.checkpoint_engine.update_weights_bucket_megabytes << 20)
        if not self._speaks:
            async for _ in parts:  # gathering a tensor takes all ranks
                continue
            return
        coordinator = connect(self._namespace)
        version = (
            str(global_steps)
            if global_steps is not None
            else _next((await coordinator.weight_status()).version)
        )
        first = True
        async for part in parts:
            source = ObjectWeights((ray.put(part),))
            await coordinator.update_weights(WeightUpdate(source, version, first=first, last=False))
            first = False
        await coordinator.update_weights(
            WeightUpdate(ObjectWeights(()), version, first=first, last=True)
        )
        if global_steps is not None:
            await self._server_actor().set_global_steps.remote(global_steps)

    def _server_actor(self) -> Any:
        if self._server is None:  # it is launched after this was made
            self._server = ray.get_actor(f"{NAME}_server_0_0")
        return self._server


async def _parts(weights: Iterable[tuple[str, Any]], max_bytes: int) -> AsyncIterator[Any]:
    """The tensors on the CPU, together as far as ``max_bytes``."""
    part: dict[str, Any] = {}
    num_bytes = 0
    async for name, tensor in ensure_async_iterator(weights):
        size_bytes = tensor.numel() * tensor.element_size()
        if part and num_bytes + size_bytes > max_bytes:
            yield part
            part, num_bytes = {}, 0
        part[name] = tensor.detach().cpu()
        num_bytes += size_bytes
    if part:
        yield part


def _next(version: str) -> str:
    return str(int(version) + 1) if version.isdigit() else f"{version}+1"


_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{FlexFloorAdapter.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: FlexFloorReplica)
