"""Results as files: strict JSON, in folders that need not be there yet."""

import json
from pathlib import Path
from typing import Any


def write_json(content: Any, path: Path) -> None:
    """Raises: ValueError: a number in it is not finite; the result would not be JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
