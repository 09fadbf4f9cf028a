import hashlib
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


def test_a_file_of_version_1_is_read_as_one_that_knows_no_scatter(tmp_path: Path) -> None:
    path, known = tmp_path / "lengths", learned()
    write_length_history(path, known)
    body = json.loads(path.read_text().splitlines()[1])
    body["prompts"] = [prompt[:3] for prompt in body["prompts"]]
    line = json.dumps(body)
    digest = hashlib.sha256(line.encode()).hexdigest()
    header = {"format": "flexfloor-length-history", "version": 1, "sha256": digest}
    path.write_text(f"{json.dumps(header)}\n{line}\n")
    old = read_length_history(path).prompts
    assert [(p.prompt_key, p.weight, p.mean_log_tokens) for p in old] == [
        (p.prompt_key, p.weight, p.mean_log_tokens) for p in known.prompts
    ]
    assert all(prompt.freedom == 0 for prompt in old)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text.replace("prompt-7", "prompt-8"), "checksum"),
        (lambda text: text[: len(text) // 2], "checksum"),
        (lambda text: text.replace('"version": 2', '"version": 3'), "version 3"),
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
