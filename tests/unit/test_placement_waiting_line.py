from placement.ids import SampleId
from placement.views import LengthBelief, SampleView
from placement.waiting_line import WaitingLine


def sample(order: int, expected_log_tokens: float) -> SampleView:
    belief = LengthBelief(expected_log_tokens, 0.3)
    return SampleView(SampleId(str(order)), 10, 1010, order, prompt_key=str(order), belief=belief)


def test_a_sample_that_comes_back_before_its_first_token_is_in_the_line_again() -> None:
    line = WaitingLine(100)
    long, short = sample(0, 7.0), sample(1, 5.0)
    assert list(line.in_order([long, short])) == [long, short]
    line.begin([long])
    assert list(line.in_order([short])) == [short]
    assert sorted(line.in_order([long, short]), key=lambda s: s.order) == [long, short]


def test_what_is_believed_anew_changes_the_order() -> None:
    line = WaitingLine(100)
    first, second = sample(0, 7.0), sample(1, 5.0)
    assert list(line.in_order([first, second])) == [first, second]
    longer = sample(1, 8.0)
    assert list(line.in_order([first, longer])) == [longer, first]
