import json
from pathlib import Path

from deploy.demo.timeline import active_samples, slot_lanes, timelines_of
from deploy.report.picture import draw
from deploy.report.timeline import Activity, Span
from tests.unit.demo_records import LENGTHS, good_records


def test_a_slot_goes_from_decoding_over_idle_to_freed_and_borrowed() -> None:
    records = good_records()
    lane = slot_lanes(records.elastic, records.borrowed)["GPU:3"]
    assert [span.activity for span in lane] == [
        Activity.FREED,
        Activity.IDLE,
        Activity.DECODING,
        Activity.RECONFIGURING,
        Activity.BORROWED,
    ]
    freed, idle, decoding, reconfiguring, borrowed = lane
    assert (idle.start_s, idle.end_s) == (10, 11.5)  # the next snapshot is at 20
    assert decoding == Span(Activity.DECODING, 0, 10)
    assert (reconfiguring.start_s, reconfiguring.end_s) == (10, 11.5)
    assert (freed.start_s, freed.end_s) == (11.5, 42)
    assert (borrowed.start_s, borrowed.end_s) == (13, 42)


def test_adjoining_snapshots_of_one_activity_make_one_span() -> None:
    records = good_records()
    decoding = [
        span
        for span in slot_lanes(records.static, ())["GPU:0"]
        if span.activity is Activity.DECODING
    ]
    assert decoding == [Span(Activity.DECODING, 0, 40)]


def test_the_other_jobs_time_outside_the_rollout_is_not_drawn() -> None:
    records = good_records()
    lanes = slot_lanes(records.static, records.borrowed)
    assert all(span.activity is not Activity.BORROWED for spans in lanes.values() for span in spans)


def test_the_last_sample_leaves_no_active_one() -> None:
    points = active_samples(good_records().elastic)
    assert points[0] == (0.0, len(LENGTHS))
    assert points[-1] == (float(max(LENGTHS)), 0)


def test_the_picture_is_a_png_and_its_numbers_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    timelines = timelines_of(good_records())
    draw(timelines, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plain = json.loads(json.dumps(timelines.to_json(), allow_nan=False))
    assert plain["origin"] == "measured"
    assert [rollout["name"] for rollout in plain["rollouts"]] == ["static", "elastic"]
    change = plain["rollouts"][1]["changes"][0]
    assert (change["workers_from"], change["workers_to"], change["at_s"]) == (4, 3, 10)
    assert (change["predicted_steps"], change["measured_steps"]) == (45, 50)
