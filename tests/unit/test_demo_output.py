import io
from dataclasses import replace

from rich.console import Console

from deploy.demo.progress import Progress
from deploy.demo.promises import judge
from deploy.demo.replay import Observation
from deploy.demo.summary import print_summary
from placement.membership import Phase
from tests.unit.demo_records import ELASTIC_AT, change, good_records, worker


def plain_console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=160, force_terminal=False), text


def test_without_a_terminal_the_status_is_a_plain_line_now_and_then() -> None:
    console, text = plain_console()
    with Progress(console) as progress:
        progress.phase("elastic rollout")
        for ended in range(5):
            progress.observe(Observation(64, ended, (worker(0, 3), worker(1, 0)), ()))
    lines = text.getvalue().splitlines()
    assert len(lines) == 2
    assert "elastic rollout: 0/64 samples, workers: 1 decoding, 1 idle" in lines[1]


def test_a_decision_is_told_when_it_is_made_and_when_it_has_ended_but_once() -> None:
    console, text = plain_console()
    done = change(ELASTIC_AT, (0, 1, 2, 3), (0, 1), (8, 8))
    begun = replace(done, phase=Phase.PREPARE, ended_at=None)
    with Progress(console) as progress:
        for operation in (begun, begun, done, done):
            progress.observe(Observation(64, 1, (), (operation,)))
    told = text.getvalue()
    assert told.count("decision: 4 -> 2 workers (consolidate)") == 1
    assert told.count("4 -> 2 workers done: pause 50 ms") == 1


def test_the_summary_shows_the_pair_and_says_that_every_promise_held() -> None:
    console, text = plain_console()
    print_summary(judge(good_records()), console)
    told = text.getvalue()
    for expected in (
        "tokens per occupied worker-step",
        "throughput",
        "4 -> 3",
        "GPU:3 after 1.5 s",
    ):
        assert expected in told
    assert "Every promise held." in told


def test_the_summary_names_a_broken_promise() -> None:
    console, text = plain_console()
    print_summary(judge(replace(good_records(), regrow_operations=())), console)
    assert "broken promise: the group grows back" in text.getvalue()
    assert "Every promise held." not in text.getvalue()
