"""What the demo shows while it runs: a bounded live panel, or plain lines without a terminal.

A decision is shown once, when it is first seen, and again when it has ended.
"""

import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from actors.rollout_api import OperationStatus
from deploy.demo.replay import Observation

REFRESHES_PER_S = 2
PLAIN_LINE_EVERY_S = 10.0


class Progress:
    """Prints phases, decisions, and one status line that replaces itself on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self.current_phase = ""
        self._shown: dict[int, bool] = {}
        self._plain_line_due_s = 0.0
        self._live = Live(
            console=console, refresh_per_second=REFRESHES_PER_S, transient=True, screen=False
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def phase(self, what: str) -> None:
        """Say what begins now."""
        self.current_phase = what
        self._plain_line_due_s = 0.0
        self.say(what)

    def say(self, text: str) -> None:
        # Long lines are the terminal's to wrap, and stay whole in a file.
        self._console.print(Text(f"{self._clock()}  {text}"), soft_wrap=True)

    def observe(self, seen: Observation) -> None:
        for operation in seen.operations:
            self._tell(operation)
        states = Counter(worker.state for worker in seen.workers)
        workers = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        samples = f"{seen.num_ended}/{seen.num_samples} samples, " if seen.num_samples else ""
        line = f"{self._clock()}  {self.current_phase}: {samples}workers: {workers or 'none'}"
        if self._console.is_terminal:
            self._live.update(Text(line))
        elif time.monotonic() >= self._plain_line_due_s:
            self._plain_line_due_s = time.monotonic() + PLAIN_LINE_EVERY_S
            self._console.print(Text(line), soft_wrap=True)

    def _tell(self, operation: OperationStatus) -> None:
        ended = operation.ended_at is not None
        if self._shown.get(operation.generation) == ended:
            return
        first_time = operation.generation not in self._shown
        self._shown[operation.generation] = ended
        widths = f"{len(operation.old_members)} -> {len(operation.new_members)} workers"
        if first_time:
            self.say(f"decision: {widths} ({operation.reason}): {operation.explanation}")
        if ended:
            self.say(
                f"  {widths} {operation.phase}: pause {operation.pause_s * 1e3:.0f} ms, "
                f"{len(operation.moved_samples)} samples moved, experts per worker "
                f"{list(operation.experts_per_worker)}"
                + (f", error: {operation.error}" if operation.error else "")
            )

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        return f"{minutes}:{seconds:02d}"
