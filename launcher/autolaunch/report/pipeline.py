"""What is expected of a pipeline: its stages as a table, its schedule over time, and the share of time it idles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autolaunch.report.page import rows_shown
from autolaunch.report.readable import readable_count
from autolaunch_strategies.config import PipelineParallel
from autolaunch_strategies.schedules.schedule import Timeline, schedule_for_batch, timeline

MOST_SHARED = 4
"""Parameters of several stages that are named."""


def foreseen_timeline(account: Mapping[str, Any], job: Mapping[str, Any]) -> Timeline | None:
    """How a training step of a job is expected to go, its stages as unequal as their shares of work; None without pp.

    Args:
        account: what is applied (`MeshStrategy.describe()`).
        job: the resolved job as plain dicts.
    """
    if not account.get("pp"):
        return None
    stages, options = account["pp"]["stages"], PipelineParallel(**job["pp"])
    ranks = 1 + max(stage["pipe_rank"] for stage in stages)
    # A data module of one's own alone knows its batch: one of which the pipeline gets as many parts as it wants.
    batch = batch_of_rank(job) or options.microbatches or 4 * ranks
    schedule = schedule_for_batch(options, [stage["pipe_rank"] for stage in stages], batch)
    if options.loss == "exact":
        schedule = replace(schedule, name="exact")
    costs = [stage["share_of_work"] for stage in stages]
    return timeline(schedule, backward=_backward(account), stage_costs=costs)


def with_expectation(account: Mapping[str, Any], job: Mapping[str, Any], expected: Timeline) -> dict[str, Any]:
    """The account with what is expected of its pipeline."""
    equal = timeline(expected.schedule, backward=_backward(account))
    figures = {
        "batch_of_rank": batch_of_rank(job),
        "microbatches": expected.schedule.microbatches,
        "expected_idle_share": round(expected.idle_share, 6),
        "idle_share_of_equal_stages": round(equal.idle_share, 6),
    }
    parts = dict(account["pp"])
    lists = {key: parts.pop(key) for key in ("cuts", "stages", "shared") if key in parts}
    return {**account, "pp": {**parts, **figures, **lists}}


def pipeline_summary(account: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a pipeline for summary.json, from an account with what is expected of it."""
    pp = account["pp"]
    return {
        "schedule": Path(pp["schedule"]).name,
        "loss": pp["loss"],
        "stages": len(pp["stages"]),
        "microbatches": pp["microbatches"],
        "expected_idle_share": pp["expected_idle_share"],
    }


def stage_table(pp: Mapping[str, Any]) -> RenderableType:
    """What each stage runs and holds, and where, from the part of an account that speaks of the pipeline."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", padding=(0, 1))
    table.add_column("stage", justify="right")
    table.add_column("ranks")
    table.add_column("parts", overflow="fold", ratio=1)
    table.add_column("work", justify="right")
    table.add_column("parameters", justify="right")
    for index in rows_shown(len(pp["stages"]), ends=8, middle=0):
        if index is None:
            table.add_row("...")
            continue
        stage = pp["stages"][index]
        table.add_row(
            str(stage["stage"]),
            stage["ranks"],
            ", ".join(stage["units"]),
            f"{stage['share_of_work']:.1%}",
            readable_count(stage["parameters"]),
        )
    return Group(table, *(Text(line, style="dim") for line in _shared_lines(pp.get("shared", {}))))


def remarks(account: Mapping[str, Any], job: Mapping[str, Any]) -> Iterable[str]:
    """What the picture of a schedule does not say by itself, from an account with what is expected of a pipeline."""
    pp = account["pp"]
    equal, shares = f"{pp['idle_share_of_equal_stages']:.1%}", [stage["share_of_work"] for stage in pp["stages"]]
    if equal != f"{pp['expected_idle_share']:.1%}":
        # A block has less than its share of all work, so one more of them fits between the largest and the smallest.
        uneven = max(shares) - min(shares) > 1 / max(1, len(account["blocks"]["found"]))
        by_count = job["pp"].get("split") == "even" and job["pp"].get("split_spec") is None
        advice = "; pp.split=balanced cuts by work" if uneven and by_count else ""
        yield f"with stages of equal work it would be {equal}{advice}"
    if pp["loss"] == "exact":
        yield "the loss of the whole batch is computed between forwards and backwards"


def batch_of_rank(job: Mapping[str, Any]) -> int | None:
    """Samples of which one rank trains a step of the pipeline; None if the job does not say it."""
    data = job["data"]
    if "_target_" in data or job.get("module") or not data.get("batch_size"):
        return None
    return int(data["batch_size"]) // (job["mesh"].get("dp", 1) * data.get("microbatches", 1))


def _backward(account: Mapping[str, Any]) -> float:
    """The time of a backward in forwards: twice as much to multiply, and what is recomputed."""
    modes = list(account["recompute"].get("blocks", {}).values())
    return 2.0 + modes.count("full") / max(1, len(account["blocks"]["found"]))


def _shared_lines(shared: Mapping[str, Any]) -> Iterable[str]:
    for name, stages in list(shared.items())[:MOST_SHARED]:
        if len(stages) > 4:
            at = f"{len(stages)} stages"
        else:
            at = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
        yield f"{at} share {name} and sum its gradients"
    if len(shared) > MOST_SHARED:
        yield f"shared parameters beyond these: {len(shared) - MOST_SHARED}, named in plan.yaml"
