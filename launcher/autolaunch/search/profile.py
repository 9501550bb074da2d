"""The model of a job as the planner sees it, in a process of its own.

Building a model runs code of the user's: in the process that goes on to start trials it could take a GPU's memory that
the trials then lack, and end the search by a crash. That process needs no torch either.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autolaunch.job import ResolvedJob
from autolaunch.launch.local import source_roots
from autolaunch_strategies.config import ConfigError, ConfigErrors, raise_all

if TYPE_CHECKING:
    from autolaunch_strategies.planner.profile import ModelProfile, Recipe

SECONDS = 600.0


def profile_apart(job: ResolvedJob, device: str) -> tuple[ModelProfile, Recipe]:
    """The profile and the recipe of a job, found out by a process of its own.

    Args:
        job: its file is written, and what is found beside it.
        device: cuda or cpu.

    Raises:
        ConfigError: what is wrong with the job; or the process failed: then with the end of what it said.
    """
    from autolaunch_strategies.planner.profile import ModelProfile, Recipe

    answer = job.write().with_name("profile.json")
    answer.unlink(missing_ok=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *source_roots()])}
    command = [sys.executable, "-P", "-m", "autolaunch.search.profile", str(job.path), str(answer), device]
    try:
        ended = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError("model", f"its profile was not there after {SECONDS:g} s") from None
    if not answer.is_file():
        said = ended.stderr.decode(errors="replace").strip().splitlines()[-20:]
        raise ConfigError("model", "it could not be profiled:\n" + "\n".join(said))
    values = json.loads(answer.read_text(encoding="utf-8"))
    raise_all([ConfigError(*error) for error in values.get("errors", ())])
    return ModelProfile.from_json(values["profile"]), Recipe(**values["recipe"])


def main() -> None:
    """Profile the model of the job file of the first argument into the file of the second one."""
    from autolaunch.instantiate import let_imports_see_the_working_directory
    from autolaunch.planning.choice import profile_of

    let_imports_see_the_working_directory()
    job, answer, device = ResolvedJob.read(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    values: dict[str, Any]
    try:
        profile, recipe = profile_of(job.config, device)
        values = {"profile": profile.to_json(), "recipe": dataclasses.asdict(recipe)}
    except (ConfigError, ConfigErrors) as error:
        errors = error.errors if isinstance(error, ConfigErrors) else [error]
        values = {"errors": [(item.where, item.problem, item.allowed, item.write) for item in errors]}
    answer.write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main()
