"""A fake that the coordinator's actor can host, and a program that serves with it."""

import logging
import sys
from pathlib import Path

from actors.journal import Journal
from actors.ports import GroupStore, LeasePort, WorkerFactory
from actors.settings import RuntimeSettings
from actors.weights_keeper import WeightsKeeper
from deploy.config import load_config
from deploy.serving import serve_until_signal
from tests.unit.fake_coordinator import FakeCoordinator


class HostedFakeCoordinator(FakeCoordinator):
    """Takes what a coordinator takes; leases one slot, so that there is something to end."""

    def __init__(
        self,
        settings: RuntimeSettings,
        leases: LeasePort,
        factory: WorkerFactory,
        store: GroupStore,
        *,
        keeper: WeightsKeeper,
        journal: Journal,
    ) -> None:
        super().__init__()
        self._leases = leases

    async def start(self) -> None:
        assert await self._leases.acquire(1, 30.0, lambda _: None)


if __name__ == "__main__":
    model_path, port, namespace = sys.argv[1:]
    config = load_config(
        None,
        values={
            "model.path": model_path,
            "service.port": int(port),
            "group.max_workers": 1,
            "namespace": namespace,
        },
    )
    serve_until_signal(
        config,
        None,
        out=sys.stdout,
        say=logging.getLogger(__name__).info,
        coordinator=f"tests.service.{Path(__file__).stem}:{HostedFakeCoordinator.__name__}",
    )
