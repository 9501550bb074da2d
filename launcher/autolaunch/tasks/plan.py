"""plan: what a run would do, shown and written to plan.yaml, without starting it and without memory for the model."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from autolaunch.job import ResolvedJob
from autolaunch.launch.place import Place
from autolaunch.models import build_module
from autolaunch.report.pipeline import foreseen_timeline, pipeline_summary, with_expectation
from autolaunch.report.plan_file import write_plan
from autolaunch.report.schedule_picture import write_schedule_svg
from autolaunch.report.screen import show_plan
from autolaunch.report.summary import write_summary
from autolaunch.tasks.run_parts import own_plan
from autolaunch_strategies.apply import foresee
from autolaunch_strategies.config import parallel_config
from autolaunch_strategies.construction import Construction


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Write `<output_dir>/plan.yaml` for the mesh that the job names, in this one process; returns the summary.

    With a pipeline also `<output_dir>/schedule.svg`; where the planner chose the mesh, pictures of its choice.
    """
    started = time.time()
    config = job.config
    parallel = parallel_config(
        config["mesh"],
        config["dp"],
        config["mp"],
        config["pp"],
        config["cp"],
        config["recompute"],
        config["recompute_save"],
        config["compile"],
    )
    with Construction(config["seed"]).recording():
        module = build_module(config)
    account = foresee(module, parallel, own_plan(config))
    schedule = foreseen_timeline(account, config)
    picture = None
    if schedule is not None:
        account = with_expectation(account, config, schedule)
        picture = write_schedule_svg(schedule, job.output_dir / "schedule.svg", account["pp"]["loss"] == "exact")
    if job.choice is not None:
        account = {"choice": job.choice, **account}
    path = write_plan(job.output_dir, config, account, job.choices)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    summary = {
        "task": "plan",
        "status": "finished",
        "world_size": parallel.mesh.size,
        "mesh": parallel.mesh.name,
        "parameters": parameters,
        "plan": str(path),
        **({"pipeline": pipeline_summary(account)} if schedule is not None else {}),
        **({"predicted_step_time_s": job.choice["chosen"]["seconds"]} if job.choice is not None else {}),
        "seconds": time.time() - started,
    }
    write_summary(job.output_dir, summary)
    if job.choice is None:
        show_plan(account, config, Console(), parameters, path, schedule, picture)
    else:
        from autolaunch.report.choice_html import write_choice
        from autolaunch.report.choice_screen import show_choice, show_why

        pages = write_choice(job.output_dir, job.choice)
        show_choice(job.choice, Console(), path, pages)
        if job.choice.get("why") is not None:
            show_why(job.choice["why"], Console())
    return summary
