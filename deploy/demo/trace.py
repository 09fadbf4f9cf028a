"""The recorded response lengths that the demo replays, and those that it may know before; both
scaled to a tiny model.

Source and licence: ``benchmarks/traces/README.md``. The file is part of a checkout, not of a
wheel, and is checked against its sha256: a result names its trace by it.
"""

import csv
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from placement.errors import ConfigError

_TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
TRACE_PATH = _TRACES / "epoch_gpqa_run28_16x4.csv"
TRACE_SHA256 = "8ceeab5305968886557f469409bfec3bf0a8ecdbd7ea7379ef7fc264c821f159"
PAST_PATH = _TRACES / "epoch_gpqa_run38_16x4.csv"
"""Another model's answers to the same prompts: what is known of them before the demo."""
PAST_SHA256 = "838e44433f5c4f52eb935e1c8f9fe63896ffec8f75ec0a9a369cb972df3c3177"


@dataclass(frozen=True, slots=True)
class Trace:
    """Response lengths in tokens: per prompt one length per sample, as many for each prompt."""

    lengths_tokens: tuple[tuple[int, ...], ...]
    sha256: str

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return len(self.lengths_tokens[0])

    @property
    def total_tokens(self) -> int:
        return sum(sum(lengths) for lengths in self.lengths_tokens)

    @property
    def longest_tokens(self) -> int:
        return max(max(lengths) for lengths in self.lengths_tokens)

    def scaled(self, longest_tokens: int) -> "Trace":
        """All lengths in proportion, so that the longest is ``longest_tokens``; at least 1."""
        return self.scaled_as(self.longest_tokens, longest_tokens)

    def scaled_as(self, recorded_tokens: int, scaled_tokens: int) -> "Trace":
        """All lengths in this proportion; at least 1."""
        return Trace(
            tuple(
                tuple(max(1, round(n * scaled_tokens / recorded_tokens)) for n in lengths)
                for lengths in self.lengths_tokens
            ),
            self.sha256,
        )

    def first(self, num_prompts: int, num_samples: int) -> "Trace":
        """The first samples of the first prompts."""
        return Trace(
            tuple(lengths[:num_samples] for lengths in self.lengths_tokens[:num_prompts]),
            self.sha256,
        )

    def capped(self, max_tokens: int) -> "Trace":
        """No length above ``max_tokens``; the others as they are."""
        return Trace(
            tuple(tuple(min(n, max_tokens) for n in lengths) for lengths in self.lengths_tokens),
            self.sha256,
        )


def load_trace(path: Path = TRACE_PATH, sha256: str = TRACE_SHA256) -> Trace:
    """Read a trace as it was recorded (unscaled).

    Raises:
        ConfigError: there is no such file, it is another one, or its prompts have different
            numbers of samples.
    """
    if not path.is_file():
        raise ConfigError(
            f"no trace at {path}; run the demo from a checkout, which has benchmarks/traces",
            field="trace",
        )
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{path.name} has sha256 {found}, expected {sha256}; restore the file",
            field="trace",
        )
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in csv.DictReader(content.decode().splitlines()):
        lengths[row["prompt_id"]].append(int(row["response_tokens"]))
    counts = {len(group) for group in lengths.values()}
    if len(counts) != 1:
        raise ConfigError(
            f"{path.name} has prompts with {sorted(counts)} samples; each needs as many",
            field="trace",
        )
    return Trace(tuple(tuple(group) for group in lengths.values()), found)
