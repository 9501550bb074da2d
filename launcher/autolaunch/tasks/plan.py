"""plan: what a run would do, shown and written to plan.yaml, without starting it and without memory for the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autolaunch.job import PARALLEL_KEYS, ResolvedJob
from autolaunch.launch.place import Place
from autolaunch.report.plan_file import write_plan
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch_strategies.config import AXES, MeshShape

if TYPE_CHECKING:
    from autolaunch_strategies.model.counts import Counts
    from autolaunch_strategies.schedules.schedule import Timeline


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Write `<output_dir>/plan.yaml` for the mesh that the job names, in this one process; returns the summary.

    With a pipeline also `<output_dir>/schedule.svg`. Where the planner chose the mesh, its choice and no more, for
    which the model need not be built; with `full` the rest as well, and pictures of the choice.
    """
    started = time.time()
    if job.choice is not None:
        path = _write_choice(job, job.choice)  # which has been shown
        if not job.config["full"]:
            return _written(job, job.choice["model"]["parameters"], path, started)
    from autolaunch.report.screen import show_plan

    config = job.config
    account, counts, schedule = _foreseen(config)
    account |= _by_device(job)
    picture = None
    if schedule is not None:
        from autolaunch.report.pipeline import pipeline_summary, with_expectation
        from autolaunch.report.schedule_svg import write_schedule_svg

        account = with_expectation(account, config, schedule)
        picture = write_schedule_svg(schedule, job.output_dir / "schedule.svg", account["pp"]["loss"] == "exact")
    if job.choice is not None:
        account = {"choice": job.choice, **account}
    path = write_plan(job.output_dir, config, account, job.choices)
    pipeline = {} if schedule is None else {"pipeline": pipeline_summary(account)}
    summary = _written(job, counts.parameters, path, started, pipeline)
    if job.choice is None:
        show_plan(account, config, Terminal(), counts.parameters, path, schedule, picture, counts.trained)
    return summary


def _written(
    job: ResolvedJob, parameters: int, path: Path, started: float, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The summary, which is in its file then."""
    mesh = MeshShape(**{axis: job.config["mesh"][axis] for axis in AXES})
    summary = {
        "task": "plan",
        "status": "finished",
        "world_size": mesh.size,
        "mesh": mesh.name,
        "parameters": parameters,
        "plan": str(path),
        **(more or {}),
        **({"predicted_step_time_s": job.choice["chosen"]["seconds"]} if job.choice is not None else {}),
        "seconds": time.time() - started,
    }
    write_summary(job.output_dir, summary)
    return summary


def _write_choice(job: ResolvedJob, choice: dict[str, Any]) -> Path:
    """Write the choice, with pictures if `full` is set, and say how to run it; the path of the plan."""
    from autolaunch.report.choice_screen import show_written

    written = [write_plan(job.output_dir, job.config, {"choice": choice, **_by_device(job)}, job.choices)]
    if job.config["full"]:
        from autolaunch.report.choice_html import write_choice

        written += write_choice(job.output_dir, choice)
    show_written(choice, Terminal(), written)
    return written[0]


def _by_device(job: ResolvedJob) -> dict[str, Any]:
    return {"by_device": job.by_device} if job.by_device else {}


def _foreseen(config: Mapping[str, Any]) -> tuple[dict[str, Any], Counts, Timeline | None]:
    """(what would be applied, how many parameters there are, the timeline of the pipeline if there is one)."""
    import torch

    from autolaunch.models import build_module
    from autolaunch.models.own_plan import own_plan
    from autolaunch.models.packed_attention import settle
    from autolaunch.report.pipeline import foreseen_timeline
    from autolaunch.tasks.first_batch import step_on_first_batch
    from autolaunch_strategies.apply.order import foresee
    from autolaunch_strategies.config import lightning_precision, parallel_config
    from autolaunch_strategies.model.construction import Construction
    from autolaunch_strategies.model.counts import count_parameters

    parallel = parallel_config(**{key: config[key] for key in PARALLEL_KEYS})
    with Construction(config["seed"]).recording():
        module = build_module(config)
    packed = settle(config, module, None)
    autocast = torch.bfloat16 if lightning_precision(config["precision"]) == "bf16-mixed" else None
    account = foresee(module, parallel, own_plan(config), step_on_first_batch(module, config), autocast)
    account |= {} if packed is None else packed.account()
    return account, count_parameters(module), foreseen_timeline(account, config)
