"""The HTTP service as a Ray Serve application.

A replica holds no rollout: those live in the detached coordinator, which it finds by name. So a
replica that dies is replaced and its clients ask again by id. There is one replica: it counts
who follows a rollout, to end one that nobody follows.

``flexfloor serve`` launches the runtime and then runs the application over it. Where only the
application is handed to Ray (``serve deploy``, KubeRay), ``build`` makes one whose replica
launches the runtime first. Such a runtime ends with its Ray cluster, not with the application.
"""

import logging
from collections.abc import Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions

from actors.model_check import check_model
from actors.ray_answers import first_line
from actors.ray_coordinator import COORDINATOR, connect, launch
from actors.ray_coordinator_client import CoordinatorClient
from actors.ray_processes import kill_actor, wait_until_gone
from actors.ray_tables import read_process
from actors.ray_teardown import COORDINATOR_NAME, find_actor
from deploy.config import FlexFloorConfig, load_config
from placement.errors import UnavailableError
from service.app import create_app
from service.checks import Tokenizer

APPLICATION_NAME = "flexfloor"
DEPLOYMENT_NAME = "http"
_END_TIMEOUT_S = 30.0  # Serve gives its proxies and replicas some seconds to end requests

logger = logging.getLogger(__name__)


class HttpService:
    """Serves ``service.app`` for the coordinator of the configuration's namespace.

    Args:
        launches: import path of the coordinator that is launched when none runs; "" if
            somebody else has launched it.
    """

    def __init__(self, config: dict[str, Any], launches: str = "") -> None:
        self._config = FlexFloorConfig.model_validate(config)
        self._launches = launches
        self._coordinator = self._find_coordinator()
        self._tokenizer = load_tokenizer(self._config.model.path)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._coordinator, self._config.service, self._tokenizer)

    def check_health(self) -> None:
        """Asked by Serve, which replaces this replica if it raises: its successor launches.

        Raises: UnavailableError.
        """
        if self._launches and not self._coordinator_runs():
            raise UnavailableError("the coordinator has ended for good; a new one has to start")

    def _find_coordinator(self) -> CoordinatorClient:
        if not self._launches or self._coordinator_runs():
            return connect(self._config.namespace)
        check_model(self._config)
        return launch(self._config.runtime, coordinator=self._launches)

    def _coordinator_runs(self) -> bool:
        return find_actor(COORDINATOR_NAME, self._config.namespace) is not None


_DEPLOYMENT = serve.deployment(
    name=DEPLOYMENT_NAME,
    num_replicas=1,
    graceful_shutdown_timeout_s=5,
)(serve.ingress()(HttpService))


def load_tokenizer(model_path: str) -> Tokenizer | None:
    """The checkpoint's tokenizer; None (token ids only) if it has none, which is logged."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        logger.warning("prompts must be token ids: %s has no tokenizer (%s)", model_path, error)
        return None
    return tokenizer


def build(config: Mapping[str, Any]) -> serve.Application:
    """The application of a configuration tree that brings its own runtime: what
    ``serve deploy`` and the chart name.

    Raises: ConfigError, if a setting is wrong.
    """
    return compose(load_config(None, values=config), launches=COORDINATOR)


def compose(config: FlexFloorConfig, *, launches: str = "") -> serve.Application:
    """The application over a coordinator that runs, or (see ``HttpService``) launches one."""
    return _DEPLOYMENT.options(
        max_ongoing_requests=config.service.max_open_requests,
        ray_actor_options={"num_cpus": 0, "resources": config.coordinator.resources},
    ).bind(config.model_dump(mode="json"), launches)


def run(config: FlexFloorConfig) -> str:
    """Start the application on this Ray cluster; returns its URL when it answers."""
    service = config.service
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # whoever calls tells the progress
    serve.start(http_options=HTTPOptions(host=service.host, port=service.port))
    serve.run(compose(config), name=APPLICATION_NAME, route_prefix="/")
    host = "127.0.0.1" if service.host in ("0.0.0.0", "::") else service.host
    return f"http://{host}:{service.port}"


def stop() -> None:
    """Take the application away, and Serve with it unless it serves others on this cluster."""
    serve.delete(APPLICATION_NAME)
    if not serve.status().applications:
        _end_serve()


def _end_serve() -> None:
    """Raises: UnavailableError, if its controller does not end.

    ``serve.shutdown`` waits for an answer of the controller, whose end cuts it off, and Ray tells
    every driver of a task that failed. So the controller is told without waiting for more than
    that it has heard it, and then its process is waited for.
    """
    controller = find_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    if controller is not None:
        process = read_process(controller)
        try:
            ray.get(controller.graceful_shutdown.remote(wait=False), timeout=_END_TIMEOUT_S)
        except (RayActorError, GetTimeoutError) as error:
            logger.warning("Serve's controller was not told to end: %s", first_line(error))
            kill_actor(controller, _END_TIMEOUT_S)
        if process is not None:
            wait_until_gone(process, _END_TIMEOUT_S)
    serve.shutdown()  # only what this process remembers of it is left to be forgotten
