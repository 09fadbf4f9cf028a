import json
from pathlib import Path

import pytest

from actors.length_history import read_length_history, write_length_history
from placement.errors import ConfigError
from placement.lengths import LengthHistory, LengthPredictor


def learned() -> LengthHistory:
    predictor = LengthPredictor()
    for number in range(40):
        for sample in range(4):
            predictor.observe(f"prompt-{number}", 100 + 50 * number + sample)
    predictor.begin_rollout()
    return predictor.history()


def test_what_was_learned_comes_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    write_length_history(path, learned())
    assert read_length_history(path) == learned()
    one, other = LengthPredictor(read_length_history(path)), LengthPredictor(learned())
    assert one.belief("prompt-7") == other.belief("prompt-7")
    assert one.skill == other.skill


def test_a_first_start_has_an_empty_history(tmp_path: Path) -> None:
    assert read_length_history(tmp_path / "lengths") == LengthHistory()


def test_a_second_writing_replaces_the_first_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    write_length_history(path, learned())
    write_length_history(path, LengthHistory())
    assert read_length_history(path) == LengthHistory()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text.replace("prompt-7", "prompt-8"), "checksum"),
        (lambda text: text[: len(text) // 2], "checksum"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2"),
        (lambda text: "", "not a length history"),
        (lambda text: "\x00\x01", "not a length history"),
        (lambda text: json.dumps({"format": "other"}), "not a length history"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, damage: object, complaint: str
) -> None:
    path = tmp_path / "lengths"
    write_length_history(path, learned())
    assert callable(damage)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=complaint):
        read_length_history(path)
