"""A coordinator that moves running samples whenever that evens the context out, whatever it costs:
moves can be seen and measured with it where none would pay."""

from typing import Any

from actors.coordinator import Coordinator
from actors.settings import RuntimeSettings
from placement.cost import ReconfigurationCost, StepTimeModel
from placement.dispatcher import Dispatcher, DispatchSettings
from placement.horizon import GroupCosts
from placement.rebalance import RebalanceSettings
from placement.reserve import Reserve, ReserveTuner

_ONLY_CONTEXT_COUNTS = GroupCosts(
    StepTimeModel(0.0, context_token_s=1.0), ReconfigurationCost(0.0, 1.0, 1.0), can_copy=False
)


class EagerCoordinator(Coordinator):
    def __init__(self, settings: RuntimeSettings, *ports: Any, **more: Any) -> None:
        steps = settings.planning.rebalance_steps
        rebalance = RebalanceSettings(steps, 2 * steps, gain_ratio=0.0, full_length=True)
        tuner = ReserveTuner(Reserve(full_length=True))
        dispatch = Dispatcher(DispatchSettings(rebalance), _ONLY_CONTEXT_COUNTS, tuner)
        super().__init__(settings, *ports, dispatch=dispatch, **more)
