"""What a run can do: one module per task, found by the first word of the command line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from autolaunch.garbage import no_garbage_collection
from autolaunch.job import ResolvedJob
from autolaunch.launch.place import Place
from autolaunch_strategies.config import on_command_line

RUNNERS: dict[str, str] = {
    "fit": "autolaunch.tasks.fit:run",
    "validate": "autolaunch.tasks.fit:run",
    "test": "autolaunch.tasks.fit:run",
    "predict": "autolaunch.tasks.fit:run",
    "lr_find": "autolaunch.tasks.lr_find:run",
    "compare": "autolaunch.tasks.compare:run",
    "generate": "autolaunch.tasks.generate:run",
    "plan": "autolaunch.tasks.plan:run",
    "dryrun": "autolaunch.planning.dryrun:run",
    "eval": "autolaunch.tasks.evaluate:run",
    "export": "autolaunch.tasks.export:run",
}
"""Task to the function that runs it on one rank; a task of your own is written `module:function`."""


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Run the job's task on this rank and return what it reports."""
    module, _, function = RUNNERS.get(job.config["task"], job.config["task"]).partition(":")
    with no_garbage_collection():
        runner = getattr(import_module(module), function)
    with on_command_line():
        result: dict[str, Any] = runner(job, place)
    return result
