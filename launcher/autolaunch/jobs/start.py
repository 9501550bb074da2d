"""One job, started: in this process, in one process for each rank, or as a job of Slurm."""

from __future__ import annotations

from autolaunch.config.schema import IN_ONE_PROCESS
from autolaunch.config.slurm import is_slurm
from autolaunch.job import ResolvedJob
from autolaunch.launch.end import RunEnd
from autolaunch.launch.forked import can_fork, run_forked


def run(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
    """Run a job on this machine, one rank in a fork of this process, several in a process each; or where `launch` says.

    Args:
        job: the job.
        isolated: give a single rank a process of its own, too, so that it can neither take this one down nor leave
            anything behind in it; for sweeps.
    """
    if is_slurm(job.config):
        from autolaunch.launch.slurm import run_on_slurm

        return run_on_slurm(job)
    if job.world_size == 1 and not isolated:
        from autolaunch.worker import leave, run_here

        if job.config["task"] in IN_ONE_PROCESS or not can_fork():
            return run_here(job)
        return run_forked(lambda: run_here(job), job, leave)
    from autolaunch.launch.local import run_local

    return run_local(job, job.config["launch"])
