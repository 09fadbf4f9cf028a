"""What the demo promises, as checks of its report. A promise that breaks fails the demo.

The short demo replays too few tokens for its ratio to mean much and does not wait for the
group to grow back; its other promises are the full ones.
"""

from collections.abc import Iterator
from dataclasses import replace

from deploy.demo.records import DemoRecords
from deploy.demo.report import Comparison, DemoReport, longest_response, make_report
from placement.membership import Phase
from placement.samples import FinishReason

MIN_WORKER_STEP_RATIO = 2.0
"""Tokens per occupied worker-step against static. The trace would allow 2.5 if every release
came at the step that makes it possible and took no time."""

MIN_WORKER_STEP_RATIO_SHORT = 1.0
"""Releasing must at least not lose, however short the batch."""

MAX_STEPS_RATIO = 1.02
"""Lockstep steps against static."""

MAX_STEPS_ERROR_RATIO = 0.25
"""Median, over the releases, of how far the predicted steps are from those that came."""

MAX_KNOWN_STEPS_ERROR_RATIO = 0.10
"""Of every release, where the planner was shown the lengths."""

MIN_RELEASES, MIN_RELEASES_SHORT = 2, 1


def judge(records: DemoRecords) -> DemoReport:
    """The report, with the promises that did not hold."""
    report = make_report(records)
    return replace(report, broken_promises=tuple(_broken(records, report)))


def _broken(records: DemoRecords, report: DemoReport) -> Iterator[str]:
    yield from _broken_completeness(records)
    if records.exact:
        yield from _broken_identity("elastic against static", report.comparison)
    yield from _broken_release(report)
    yield from _broken_economy(report)
    yield from _broken_borrowing(records, report)
    if records.known_lengths:
        yield from _broken_oracle(report)
    if not records.short:
        yield from _broken_foresight(report)
        yield from _broken_regrowth(records, report)


def _broken_completeness(records: DemoRecords) -> Iterator[str]:
    replays = {"static": records.static, "elastic": records.elastic, "regrown": records.regrown}
    for name, replay in replays.items():
        if replay is None:
            continue
        if len(replay.samples) != replay.status.num_samples:
            yield (
                f"every sample ends: {len(replay.samples)} of {replay.status.num_samples} "
                f"came back from the {name} rollout"
            )
        for arrived in replay.samples:
            result = arrived.result
            if result.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                yield (
                    f"every sample finishes: {result.sample_id} of the {name} rollout ended "
                    f"with {result.finish_reason} ({result.error or 'no error text'})"
                )
        steps, longest = replay.status.usage.steps, longest_response(replay)
        if steps < longest:
            yield (
                f"every step counts: {steps} steps of the {name} rollout cannot have made its "
                f"longest response of {longest} tokens"
            )


def _broken_identity(what: str, comparison: Comparison) -> Iterator[str]:
    if comparison.samples_compared == 0:
        yield f"identical tokens, {what}: no sample could be compared"
    if not comparison.identical_tokens:
        yield f"identical tokens, {what}: tokens differ or samples are missing"
    if comparison.max_abs_logprob_diff != 0.0:
        yield f"logprob difference 0.0, {what}: {comparison.max_abs_logprob_diff}"


def _broken_release(report: DemoReport) -> Iterator[str]:
    wanted = MIN_RELEASES_SHORT if report.short else MIN_RELEASES
    shrinks = [c for c in report.reconfigurations if c.workers_to < c.workers_from]
    done = [c for c in shrinks if c.phase == Phase.DONE]
    if len(done) < wanted:
        yield f"at least {wanted} releases: {len(done)} while the rollout ran"
    for change in shrinks:
        if change.finished_ratio_at_start <= 0:
            yield (
                f"no release before the first sample has finished: {change.workers_from} -> "
                f"{change.workers_to} at {change.at_s:.1f} s"
            )
    if report.moved_samples < 1:
        yield "at least one sample moves: none did"
    if report.uneven_maps < 1 and not report.short:
        yield "at least one uneven expert map: all maps were even"


def _broken_economy(report: DemoReport) -> Iterator[str]:
    wanted = MIN_WORKER_STEP_RATIO_SHORT if report.short else MIN_WORKER_STEP_RATIO
    if report.worker_step_ratio < wanted:
        yield (
            f"tokens per occupied worker-step at least {wanted} x static: "
            f"{report.worker_step_ratio:.2f} x"
        )
    if not report.short and report.steps_ratio > MAX_STEPS_RATIO:
        yield (
            f"at most {MAX_STEPS_RATIO} x the lockstep steps of static: {report.steps_ratio:.3f} x"
        )


def _broken_foresight(report: DemoReport) -> Iterator[str]:
    error = report.median_steps_error_ratio
    if error is None or error > MAX_STEPS_ERROR_RATIO:
        yield (
            f"predicted steps within {MAX_STEPS_ERROR_RATIO:.0%} of those that came: "
            f"{'nothing was predicted' if error is None else f'{error:.0%}'}"
        )


def _broken_oracle(report: DemoReport) -> Iterator[str]:
    releases = [c for c in report.reconfigurations if c.predicted_steps is not None]
    if not releases:
        yield "with known lengths every release predicts its steps: none was predicted"
    for change in releases:
        error = change.steps_error_ratio
        if error is None or abs(error) > MAX_KNOWN_STEPS_ERROR_RATIO:
            yield (
                f"with known lengths predicted steps within {MAX_KNOWN_STEPS_ERROR_RATIO:.0%} of "
                f"those that came: {change.workers_from} -> {change.workers_to} at "
                f"{change.at_s:.1f} s predicted {change.predicted_steps:.0f}, and "
                f"{change.measured_steps} came"
            )


def _broken_borrowing(records: DemoRecords, report: DemoReport) -> Iterator[str]:
    seen = [b for c in report.reconfigurations for b in c.borrowed]
    if not any(b.started_before_rollout_end for b in seen):
        yield "another job works on a freed slot before the rollout's end: none did"
    early = [b for b in records.borrowed if b.started_at < records.static.ended_at]
    if early:
        yield f"nobody holds a slot during the static run: {len(early)} were held"
    for slot in records.borrowed:
        if slot.chunks < 1:
            yield f"a borrowed slot is worked on: nothing was done on {slot.slot}"


def _broken_regrowth(records: DemoRecords, report: DemoReport) -> Iterator[str]:
    if report.regrown_workers != records.num_slots:
        yield (
            f"the group grows back to {records.num_slots}: "
            f"{report.regrown_workers} workers in the rollout after it"
        )
    if not any(c.workers_to > c.workers_from and c.phase == Phase.DONE for c in report.regrowth):
        yield "the group grows back: no change made it wider"
    if records.exact and report.regrown_comparison is not None:
        yield from _broken_identity("regrown against static", report.regrown_comparison)
