"""The error tree.

::

    FlexFloorError
    ├── ConfigError              a setting is wrong                        (start-up)
    ├── ModelRefusedError        this model or mode cannot be served       (start-up)
    │   └── ExactModeRefusedError    a kernel does not promise exact mode
    ├── RequestError             a request is wrong                        (HTTP 400)
    ├── UnknownIdError           no such rollout, sample or worker         (HTTP 404)
    ├── OverloadedError          a bounded queue is full                   (HTTP 429)
    ├── UnavailableError         the service cannot do it now              (HTTP 503)
    │   └── LeaseTimeoutError        capacity did not arrive within its bound
    ├── WeightUpdateError        new weights failed half-way, the old ones serve (HTTP 500)
    └── MembershipError          a change of the group did not happen
        ├── ExpertChecksumError      an expert arrived damaged
        ├── PlanError                a plan that would break an invariant
        └── WorkerLostError          a worker process ended or stopped answering

Every message says what is wrong, with the values, and what to change. Every error pickles:
Ray carries them between processes.
"""

from typing import Any


class FlexFloorError(Exception):
    """Root of the tree.

    Args:
        message: what is wrong, the values, and what to change.
        field: dotted path of the setting or request field at fault, if there is one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.field))


def _rebuild(kind: type[FlexFloorError], message: str, field: str | None) -> FlexFloorError:
    return kind(message, field=field)


class ConfigError(FlexFloorError):
    """A setting is wrong."""


class ModelRefusedError(FlexFloorError):
    """This model, or this model in this mode, cannot be served."""


class ExactModeRefusedError(ModelRefusedError):
    """A kernel's result depends on its batch, so exact mode cannot be promised."""


class RequestError(FlexFloorError):
    """A request is wrong; the service is fine."""


class UnknownIdError(FlexFloorError):
    """No rollout, sample or worker has this id."""


class OverloadedError(FlexFloorError):
    """A bounded queue is full; try again later."""


class UnavailableError(FlexFloorError):
    """The service cannot do this now."""


class LeaseTimeoutError(UnavailableError):
    """Capacity did not arrive within its bound."""


class WeightUpdateError(FlexFloorError):
    """New weights did not get to every worker; the version before serves on."""


class MembershipError(FlexFloorError):
    """A change of the group did not happen; the old membership stands."""


class ExpertChecksumError(MembershipError):
    """An expert arrived with other bytes than its source sent."""


class PlanError(MembershipError):
    """A plan would break an invariant."""


class WorkerLostError(MembershipError):
    """A worker process ended or stopped answering."""
