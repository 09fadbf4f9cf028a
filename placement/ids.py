"""The identifiers every layer uses.

Worker ids and generations are never reused within the life of a service: a late message
that names an old one can be told apart from a current one.
"""

from typing import NewType

WorkerId = NewType("WorkerId", int)
"""One worker process, from its start to its end. A worker that comes later gets a new id."""

ExpertId = NewType("ExpertId", int)
"""Index of a routed expert within a layer, as the checkpoint numbers it."""

Generation = NewType("Generation", int)
"""Number of a membership. Each change of the group makes a new one."""

RolloutId = NewType("RolloutId", str)
SampleId = NewType("SampleId", str)
"""``<rollout id>/<prompt index>/<sample index>``."""


def make_sample_id(rollout_id: RolloutId, prompt_index: int, sample_index: int) -> SampleId:
    return SampleId(f"{rollout_id}/{prompt_index}/{sample_index}")
