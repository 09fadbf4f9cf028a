"""The demo's picture: static above elastic, one row per slot, active samples below."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from deploy.demo.records import DemoRecords, Replay
from deploy.demo.timeline import Activity, active_samples, slot_lanes

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


def draw(records: DemoRecords, path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(3, 1, 3, 1))
    pairs = (("static", records.static), ("elastic", records.elastic))
    for (name, replay), (rows, samples) in zip(pairs, axes.reshape(2, 2), strict=True):
        _draw_rows(rows, replay, records)
        rows.set_title(_title(name, replay), loc="left", fontsize=10)
        _draw_samples(samples, replay)
    axes[-1].set_xlabel("seconds since the rollout was accepted")
    axes[0].set_xlim(0, max(replay.status.usage.span_s for _, replay in pairs))
    figure.legend(
        handles=[Patch(color=colour, label=activity) for activity, colour in COLOURS.items()],
        loc="outside upper center",
        ncols=len(COLOURS),
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def _draw_rows(axes: Axes, replay: Replay, records: DemoRecords) -> None:
    lanes = slot_lanes(replay, records.borrowed)
    for row, spans in enumerate(lanes.values()):
        for span in spans:
            thin = span.activity is Activity.RECONFIGURING
            height = RECONFIGURING_HEIGHT if thin else 0.8
            bottom = row - 0.4
            axes.broken_barh(
                [(span.start_s, span.end_s - span.start_s)],
                (bottom, height),
                facecolors=COLOURS[span.activity],
            )
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()


def _draw_samples(axes: Axes, replay: Replay) -> None:
    times_s, counts = zip(*active_samples(replay), strict=True)
    axes.step(times_s, counts, where="post", color="#444444")
    axes.fill_between(times_s, counts, step="post", color="#444444", alpha=0.15)
    axes.set_ylabel("active\nsamples", fontsize=8)
    axes.set_ylim(bottom=0)


def _title(name: str, replay: Replay) -> str:
    usage = replay.status.usage
    return (
        f"{name}: {replay.status.response_tokens} tokens in {usage.occupied_worker_steps} "
        f"occupied worker-steps, {usage.freed_worker_s:.0f} worker-seconds freed"
    )
