import pickle
from itertools import pairwise

import pytest

from placement.errors import PlanError
from placement.ids import ExpertId, Generation, WorkerId
from placement.membership import ChangeProgress, ExpertMove, GroupChange, Phase

ROUTINE = (
    Phase.BUILD, Phase.PREPARE, Phase.PAUSE, Phase.COMMIT, Phase.FINALIZE, Phase.DONE,
)  # fmt: skip
BEFORE_FINALIZE = ROUTINE[:4]


def progress_in(phase: Phase) -> ChangeProgress:
    """Led to ``phase`` by legal steps, one second each."""
    progress = ChangeProgress.begin(0.0)
    if phase is Phase.ROLLED_BACK:
        progress.enter(phase, 1.0)
        return progress
    for now_s, step in enumerate(ROUTINE[1 : ROUTINE.index(phase) + 1], start=1):
        progress.enter(step, float(now_s))
    return progress


def test_a_change_goes_through_its_phases_in_order_and_notes_when() -> None:
    progress = progress_in(Phase.DONE)
    assert progress.ended
    assert progress.entered_s == {phase: float(i) for i, phase in enumerate(ROUTINE)}


@pytest.mark.parametrize("phase", BEFORE_FINALIZE)
def test_a_change_can_be_rolled_back_until_finalize_and_says_why(phase: Phase) -> None:
    progress = progress_in(phase)
    assert not progress.ended
    progress.enter(Phase.ROLLED_BACK, 9.0, error="worker 3 is lost")
    assert progress.ended
    assert progress.error == "worker 3 is lost"
    assert progress.entered_s[Phase.ROLLED_BACK] == 9.0


LEGAL = {*pairwise(ROUTINE), *((phase, Phase.ROLLED_BACK) for phase in BEFORE_FINALIZE)}


@pytest.mark.parametrize(
    ("phase", "step"), [(a, b) for a in Phase for b in Phase if (a, b) not in LEGAL]
)
def test_a_step_that_the_routine_does_not_have_is_refused_and_changes_nothing(
    phase: Phase, step: Phase
) -> None:
    progress = progress_in(phase)
    entered_s = dict(progress.entered_s)
    with pytest.raises(PlanError, match=f"in phase {phase} cannot go on to {step}"):
        progress.enter(step, 99.0)
    assert (progress.phase, progress.entered_s) == (phase, entered_s)


def test_a_change_knows_who_joins_who_leaves_and_who_stays() -> None:
    change = GroupChange(
        generation=Generation(4),
        old_members=(WorkerId(0), WorkerId(1), WorkerId(2)),
        new_members=(WorkerId(0), WorkerId(2), WorkerId(5)),
        moves=(ExpertMove(ExpertId(1), WorkerId(1), WorkerId(5)),),
        owner_E=(WorkerId(0), WorkerId(5), WorkerId(2), WorkerId(0)),
        dense_sources=((WorkerId(5), WorkerId(0)),),
    )
    assert change.joiners == (5,)
    assert change.leavers == (1,)
    assert change.survivors == (0, 2)
    assert change.experts_of(WorkerId(0)) == (0, 3)
    assert change.experts_of(WorkerId(1)) == ()
    assert pickle.loads(pickle.dumps(change)) == change
