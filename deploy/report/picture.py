"""Timelines as a picture: rollouts one above the other, a row per slot, active samples below."""

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from deploy.report.timeline import Activity, Origin, RolloutTimeline, Timelines

COLOURS = {
    Activity.DECODING: "#2f6db5",
    Activity.IDLE: "#d9a441",
    Activity.RECONFIGURING: "#7b3f98",
    Activity.FREED: "#e6e6e6",
    Activity.BORROWED: "#3a9a5b",
}
"""Idle is the colour of a warning: it is what the service is there to remove."""

RECONFIGURING_HEIGHT = 0.22
"""A change is prepared while decoding goes on, so its bar covers only part of the row."""

ROLLOUT_INCHES = 3.75
SLOT_INCHES = 0.2
LABEL_CHARACTERS = 120


def draw(timelines: Timelines, path: Path) -> None:
    """Write the picture as PNG; one that was simulated says so."""
    rollouts = timelines.rollouts
    most_slots = max(len(rollout.slots) for rollout in rollouts)
    rollout_inches = max(ROLLOUT_INCHES, 1.5 + SLOT_INCHES * most_slots)
    figure = Figure(figsize=(11, rollout_inches * len(rollouts)), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = (3, 1) * len(rollouts)
    axes = figure.subplots(2 * len(rollouts), 1, sharex=True, height_ratios=ratios)
    for rollout, (rows, samples) in zip(rollouts, axes.reshape(-1, 2), strict=True):
        _draw_rows(rows, rollout)
        rows.set_title(_title(rollout), loc="left", fontsize=10)
        _draw_samples(samples, rollout)
    axes[-1].set_xlabel("seconds since the rollout was accepted")
    axes[0].set_xlim(0, max(rollout.figures.makespan_s for rollout in rollouts))
    shown = {span.activity for r in rollouts for spans in r.slots.values() for span in spans}
    legend = [Patch(color=COLOURS[a], label=a) for a in COLOURS if a in shown]
    figure.legend(
        handles=legend,
        loc="outside upper center",
        ncols=len(legend),
        frameon=False,
        title=_label(timelines),
    )
    figure.savefig(path, dpi=130)


def _label(timelines: Timelines) -> str | None:
    """A measured one is explained where it is shown; a simulated one might be taken for it."""
    if timelines.origin is not Origin.SIMULATED:
        return None
    return textwrap.fill(f"SIMULATED: {timelines.note}", LABEL_CHARACTERS)


def _draw_rows(axes: Axes, rollout: RolloutTimeline) -> None:
    for row, spans in enumerate(rollout.slots.values()):
        for span in spans:
            thin = span.activity is Activity.RECONFIGURING
            height = RECONFIGURING_HEIGHT if thin else 0.8
            axes.broken_barh(
                [(span.start_s, span.end_s - span.start_s)],
                (row - 0.4, height),
                facecolors=COLOURS[span.activity],
            )
    axes.set_yticks(range(len(rollout.slots)), list(rollout.slots))
    axes.invert_yaxis()


def _draw_samples(axes: Axes, rollout: RolloutTimeline) -> None:
    times_s, counts = zip(*rollout.active_samples, strict=True)
    axes.step(times_s, counts, where="post", color="#444444")
    axes.fill_between(times_s, counts, step="post", color="#444444", alpha=0.15)
    axes.set_ylabel("active\nsamples", fontsize=8)
    axes.set_ylim(bottom=0)


def _title(rollout: RolloutTimeline) -> str:
    figures = rollout.figures
    return (
        f"{rollout.name}: {figures.response_tokens} tokens in {figures.occupied_worker_steps} "
        f"occupied worker-steps, {figures.freed_worker_s:.0f} worker-seconds freed"
    )
