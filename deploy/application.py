"""The HTTP service as a Ray Serve application.

A replica holds no state: rollouts live in the detached coordinator, which it finds by name.
So a replica that dies is replaced and its clients ask again by id.
"""

import logging
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions

from actors.ray_coordinator import connect
from deploy.config import FlexFloorConfig
from service.app import create_app
from service.native import Tokenizer

APPLICATION_NAME = "flexfloor"

logger = logging.getLogger(__name__)


class HttpService:
    """Serves ``service.app`` for the coordinator of the configuration's namespace."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = FlexFloorConfig.model_validate(config)
        self._coordinator = connect(self._config.namespace)
        self._tokenizer = load_tokenizer(self._config.model.path)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._coordinator, self._config.service, self._tokenizer)


_DEPLOYMENT = serve.deployment(
    name="http",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0},
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


def build(config: dict[str, Any]) -> serve.Application:
    """The application of a configuration tree, as ``serve deploy`` and the chart call it."""
    tree = FlexFloorConfig.model_validate(config)
    return _DEPLOYMENT.options(
        max_ongoing_requests=tree.service.max_open_requests,
    ).bind(tree.model_dump(mode="json"))


def run(config: FlexFloorConfig) -> str:
    """Start the application on this Ray cluster; returns its URL when it answers."""
    service = config.service
    serve.start(http_options=HTTPOptions(host=service.host, port=service.port))
    serve.run(build(config.model_dump(mode="json")), name=APPLICATION_NAME, route_prefix="/")
    host = "127.0.0.1" if service.host in ("0.0.0.0", "::") else service.host
    return f"http://{host}:{service.port}"


def stop() -> None:
    """Take the application away, and Serve with it unless it serves others on this cluster."""
    serve.delete(APPLICATION_NAME)
    if not serve.status().applications:
        serve.shutdown()
