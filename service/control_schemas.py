"""What the native dialect's control routes take, and what they tell."""

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field

from service.schemas import Body

VERSION_PATTERN = r"^[ -~]{1,128}$"


class PauseBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"mode": "keep"}]})

    mode: Literal["keep", "abort", "wait"] = "keep"
    """What becomes of unfinished samples: ``keep`` lets them stand still with their KV, ``abort``
    ends them with what they have, ``wait`` finishes those that have begun."""


class SleepBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"mode": "keep"}]})

    mode: Literal["keep", "abort", "wait"] = "abort"
    """As for a pause; what is kept waits with its tokens, and its KV is computed anew."""


class WakeBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"paused": True}]})

    paused: bool = False
    """Stand still until ``/v1/resume``: for weights that are to come first."""


class WeightsBody(Body):
    """New weights from a directory that the coordinator's node can read."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"version": "7", "path": "/shared/step-7"}]}
    )

    version: str = Field(pattern=VERSION_PATTERN)
    """Names them; samples tell it of each of their tokens."""
    path: str = Field(min_length=1)
    """Directory of safetensors files under the checkpoint's own names. Tensors that are not in
    it keep their values."""
    base_version: str | None = Field(default=None, pattern=VERSION_PATTERN)
    """Of a sparse delta: the version that it changes."""
    checksum: str = ""
    """Of a sparse delta, checked before it is applied."""


@dataclass(frozen=True, slots=True)
class PauseAnswer:
    """Attributes:
    state: serving, pausing, paused, asleep or waking.
    mode: of the pause; null while it serves.
    waiting_for: while it is on its way to another state.
    error: why the group could not be woken last time.
    """

    state: Literal["serving", "pausing", "paused", "asleep", "waking"]
    mode: Literal["keep", "abort", "wait"] | None
    waiting_for: str
    error: str
