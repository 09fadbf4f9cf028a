"""Awaiting an actor's answer: bounded, and with errors of our own tree.

Ray wraps what a method raised into a ``RayTaskError`` and reports a dead process as a
``RayActorError``. Callers see the original error when it is one of ours, and the error they
chose for an actor that does not answer.
"""

import asyncio
from typing import Any

from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from placement.errors import FlexFloorError


def own_error(error: RayTaskError) -> FlexFloorError | None:
    """The error of ours that a method raised in its process, if it is one."""
    cause = error.cause
    return cause if isinstance(cause, FlexFloorError) else None


def first_line(error: BaseException) -> str:
    """What a Ray error says, without the traceback that it carries."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def cause_of_death(error: RayActorError) -> str:
    """What Ray knows of an actor's end, on one line, without the actor's own particulars."""
    return " ".join(line for line in str(error).splitlines() if line and line[0] != "\t")


async def await_answer(
    ref: "ObjectRef[Any]", timeout_s: float, *, who: str, what: str, lost: type[FlexFloorError]
) -> Any:
    """The result of an actor call, within ``timeout_s``.

    Args:
        who, what: the actor and the call, for messages.
        lost: raised when the actor has died or does not answer in time.

    Raises:
        FlexFloorError: as the method raised it, or ``lost``.
        RayTaskError: the method raised something that is not ours.
    """
    try:
        # Not wait_for: in Python 3.11 it drops a cancellation that comes together with the answer.
        async with asyncio.timeout(timeout_s):
            return await ref
    except RayTaskError as error:
        raise own_error(error) or error from None
    except RayActorError as error:
        raise lost(f"{who} ended before it answered {what}: {cause_of_death(error)}") from error
    except TimeoutError:
        raise lost(f"{who} did not answer {what} within {timeout_s:g} s") from None
