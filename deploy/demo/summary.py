"""The report as the demo prints it at its end."""

from rich.console import Console
from rich.table import Table

from deploy.demo.report import DemoReport, Reconfiguration
from deploy.report.table import ROWS, USED_ROW, compare_figures, steps_cell


def print_summary(report: DemoReport, console: Console) -> None:
    """Both replays side by side, the changes of the group, the promises."""
    console.print(
        compare_figures(
            "The same samples, twice",
            ("static", "elastic"),
            (report.static, report.elastic),
            (*ROWS, USED_ROW),
        )
    )
    console.print(_changes(report))
    if report.median_steps_error_ratio is not None:
        console.print(
            f"Steps left until the rollout's end, as predicted at each release and as they came: "
            f"median error {report.median_steps_error_ratio:.0%}."
        )
    if report.oracle:
        console.print(f"[yellow]{report.oracle}[/yellow]", soft_wrap=True)
    comparison = report.comparison
    console.print(
        f"{comparison.samples_compared} samples compared: tokens "
        f"{'identical' if comparison.identical_tokens else 'DIFFER'}, largest logprob difference "
        f"{comparison.max_abs_logprob_diff}; {report.moved_samples} samples moved, "
        f"{report.uneven_maps} uneven expert maps."
    )
    regrown = report.regrown_comparison
    if regrown is not None:
        console.print(
            f"Grown back to {report.regrown_workers} workers: {regrown.samples_compared} samples "
            f"compared with the static run as far as they go: tokens "
            f"{'identical' if regrown.identical_tokens else 'DIFFER'}, largest logprob difference "
            f"{regrown.max_abs_logprob_diff}."
        )
    console.print(f"Slots: {report.machine.accelerators}. {report.caveat}", soft_wrap=True)
    for promise in report.broken_promises:
        console.print(f"[red]broken promise:[/red] {promise}", highlight=False)
    if not report.broken_promises:
        console.print("Every promise held.")


def _changes(report: DemoReport) -> Table:
    table = Table(title="Changes of the group (pause and gap: what decoding samples felt)")
    for column in (
        "at s",
        "workers",
        "reason",
        "ended before",
        "pause ms",
        "gap ms",
        "moved",
        "experts per worker",
        "steps left",
        "slot borrowed",
    ):
        table.add_column(column, justify="right")
    for change in (*report.reconfigurations, *report.regrowth):
        table.add_row(*_change_row(change))
    return table


def _change_row(change: Reconfiguration) -> tuple[str, ...]:
    borrowed = ", ".join(
        f"{release.slot} after {release.release_to_borrowed_s:.1f} s" for release in change.borrowed
    )
    return (
        f"{change.at_s:.1f}",
        f"{change.workers_from} -> {change.workers_to}",
        change.reason if change.phase == "done" else f"{change.reason} ({change.phase})",
        f"{change.finished_ratio_at_start:.0%}",
        f"{change.pause_ms:.0f}",
        f"{change.gap_ms:.0f}",
        str(change.moved_samples),
        " ".join(map(str, change.experts_per_worker)),
        steps_cell(change.predicted_steps, change.measured_steps),
        borrowed or "-",
    )
