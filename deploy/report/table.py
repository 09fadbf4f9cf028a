"""Two rollouts' figures side by side, as a table for the terminal."""

from rich.table import Table

from deploy.report.figures import RolloutFigures

ROWS: tuple[tuple[str, str, str], ...] = (
    ("tokens per occupied worker-step", "tokens_per_occupied_worker_step", ".2f"),
    ("tokens per occupied worker-second", "tokens_per_occupied_worker_s", ".1f"),
    ("throughput, tokens/s", "throughput_tokens_per_s", ".1f"),
    ("makespan, s", "makespan_s", ".1f"),
    ("response tokens", "response_tokens", "d"),
    ("lockstep steps", "steps", "d"),
    ("occupied worker-steps", "occupied_worker_steps", "d"),
    ("occupied worker-seconds", "occupied_worker_s", ".1f"),
    ("freed worker-seconds", "freed_worker_s", ".1f"),
)
USED_ROW = ("of them used by the other job", "used_worker_s", ".1f")


def compare_figures(
    title: str,
    names: tuple[str, str],
    figures: tuple[RolloutFigures, RolloutFigures],
    rows: tuple[tuple[str, str, str], ...] = ROWS,
) -> Table:
    """The second over the first in the last column."""
    table = Table(title=title)
    for column in ("", *names, f"{names[1]} / {names[0]}"):
        table.add_column(column, justify="left" if not column else "right")
    for label, field, layout in rows:
        first, second = (_value(one, field) for one in figures)
        ratio = f"{second / first:.2f}" if first else "-"
        table.add_row(label, format(first, layout), format(second, layout), ratio)
    return table


def _value(figures: RolloutFigures, field: str) -> float:
    value: float = getattr(figures, field)
    return value


def steps_cell(predicted: float | None, measured: int | None) -> str:
    """Steps to the end, as predicted and as they came."""
    if predicted is None or measured is None:
        return "-"
    error = f" ({predicted / measured - 1:+.0%})" if measured else ""
    return f"{predicted:.0f}, {measured}{error}"
