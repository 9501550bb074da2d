"""The batch script of a job of Slurm, as text: what is asked for, and what each of its starts does."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from autolaunch.config.slurm import gpus_per_node, ranks_per_node, warning_seconds
from autolaunch.job import ResolvedJob
from autolaunch.launch.local import source_roots

MODULE = "autolaunch.jobs.slurm_job"
"""What the script runs on every rank, and at the end of every start."""


def script_file(job: ResolvedJob) -> Path:
    """Where the script lies."""
    return job.output_dir / "job.sbatch"


def slurm_log(job: ResolvedJob) -> Path:
    """Where the job writes, start after start."""
    return job.logs / "slurm.log"


def script(job: ResolvedJob) -> str:
    """The batch script of a job, for sbatch; the job's file has to be there when it runs."""
    launch = job.config["launch"]
    options = {
        "job-name": job.config["name"],
        "nodes": launch["nodes"],
        "ntasks-per-node": ranks_per_node(job.config, job.world_size),
        "gpus-per-node": gpus_per_node(job.config, job.world_size) or None,
        "cpus-per-task": launch["cpus_per_task"],
        "time": launch["time"],
        "partition": launch["partition"],
        "account": launch["account"],
        "qos": launch["qos"],
        "chdir": Path.cwd(),
        # Slurm replaces %j and the like in this name, and in no other.
        "output": str(slurm_log(job)).replace("%", "%%"),
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={_quoted(str(value))}" for name, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue")
    if (seconds := warning_seconds(job.config)) is not None:
        lines.append(f"#SBATCH --signal=USR1@{seconds}  # to the ranks: save, and leave")
    lines += [f"#SBATCH {option}" for option in launch["sbatch"]]

    python, file = shlex.quote(sys.executable), shlex.quote(str(job.path))
    # Since Slurm 22.05 srun does not take this from sbatch.
    cpus = f" --cpus-per-task={launch['cpus_per_task']}" if launch["cpus_per_task"] else ""
    body = ["", "trap : TERM  # the ranks save when the job is preempted, and the last line has to come after that"]
    if launch["setup"]:
        body += [
            "",
            "trap 'echo \"launch.setup failed: $BASH_COMMAND\" >&2' ERR",
            "set -e",
            *launch["setup"],
            "set +e",
            "trap - ERR",
        ]
    if roots := source_roots():
        path = shlex.quote(os.pathsep.join(roots))
        body += ["", f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{path}']
    body += [
        "",
        # -P: a file in the working directory must not shadow an installed package.
        f"srun --kill-on-bad-exit=1{cpus} {python} -P -u -m {MODULE} ranks {file}",
        f"{python} -P -m {MODULE} end {file} $?  # requeues the job, if it is to go on",
        "",
    ]
    typed = shlex.join(["autolaunch", *job.overrides]).replace("\n", " ")
    return "\n".join(["#!/bin/bash", f"# {typed}", *lines, *body])


def _quoted(value: str) -> str:
    """A value as sbatch reads it in a script: bare, or in quotes that keep spaces."""
    if value and all(letter.isalnum() or letter in "._-/,:@+%" for letter in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
