"""What is done again and again at a fixed interval, beside everything else."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from placement.errors import FlexFloorError

_log = logging.getLogger(__name__)


async def regularly(interval_s: float, what: str, call: Callable[[], Awaitable[None]]) -> None:
    """Call until cancelled. A call that fails is logged and tried again at the next interval."""
    while True:
        try:
            await call()
        except FlexFloorError as error:
            _log.warning("%s: %s", what, error)
        await asyncio.sleep(interval_s)
