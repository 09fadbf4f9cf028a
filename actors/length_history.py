"""What the length predictor knows, as a file that outlives the service.

Two lines of JSON: a header with format, version and the SHA-256 of the second line, and the
history. A file is replaced as a whole, so a reader finds the old one or the new one; one that is
damaged, too large or of another version is refused with the reason and never half read.
"""

import hashlib
import json
import math
import os
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from placement.errors import ConfigError
from placement.length_fit import LengthFit
from placement.lengths import LengthHistory, PromptPast

FORMAT = "flexfloor-length-history"
VERSION = 2
READABLE = (1, VERSION)
"""Version 1 did not know how much the samples of a prompt differ."""
MOST_BYTES = 64 << 20
"""About half a million prompts; a predictor remembers fewer (``LengthPredictor.max_prompts``)."""

_HEADER_BYTES = 4096


def write_length_history(path: Path, history: LengthHistory) -> None:
    """Replace the file at ``path``.

    Raises:
        ConfigError: the history is larger than a reader would take.
        OSError: the disk does not take it; the old file stands.
    """
    body = json.dumps(_to_json(history), allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MOST_BYTES:
        raise ConfigError(
            f"the length history of {len(history.prompts)} prompts takes {len(body)} bytes, more "
            f"than {MOST_BYTES}; let the predictor remember fewer prompts",
            field="max_prompts",
        )
    header = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(body).hexdigest()}
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with beside.open("wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + body + b"\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_length_history(path: Path) -> LengthHistory:
    """The history at ``path``; an empty one where there is no file yet.

    Raises:
        ConfigError: what is there is not a history that this version can use.
    """
    if not path.exists():
        return LengthHistory()
    with path.open("rb") as file:
        head = file.readline(_HEADER_BYTES)
        body = file.readline(MOST_BYTES + 2)
    header = _parse(path, head)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _unusable(path, "is not a length history")
    if header.get("version") not in READABLE:
        raise _unusable(path, f"has version {header.get('version')!r}, not one of {READABLE}")
    if len(body) > MOST_BYTES + 1:
        raise _unusable(path, f"is larger than {MOST_BYTES} bytes")
    if hashlib.sha256(body.removesuffix(b"\n")).hexdigest() != header.get("sha256"):
        raise _unusable(path, "is damaged (its checksum differs)")
    try:
        return _from_json(_parse(path, body))
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(path, f"has content that cannot be read ({error!r})") from error


def _to_json(history: LengthHistory) -> dict[str, Any]:
    return {
        "fit": asdict(history.fit),
        "num_rollouts": history.num_rollouts,
        "judged": history.judged,
        "error_predicted": history.error_predicted,
        "error_mean": history.error_mean,
        "prompts": [astuple(prompt) for prompt in history.prompts],
    }


def _from_json(body: Any) -> LengthHistory:
    return LengthHistory(
        prompts=tuple(
            PromptPast(str(key), *map(_finite, numbers)) for key, *numbers in body["prompts"]
        ),
        fit=LengthFit(**{name: _finite(value) for name, value in body["fit"].items()}),
        num_rollouts=int(body["num_rollouts"]),
        judged=_finite(body["judged"]),
        error_predicted=_finite(body["error_predicted"]),
        error_mean=_finite(body["error_mean"]),
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _parse(path: Path, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _unusable(path, f"is not a length history ({error})") from error


def _unusable(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} {what}; move it away to start without what was learned, or restore a copy",
        field="length history",
    )
