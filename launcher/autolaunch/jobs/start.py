"""One job, started: in this process, in one process for each rank, or as a job of Slurm."""

from __future__ import annotations

from autolaunch.config.slurm import is_slurm
from autolaunch.job import ResolvedJob
from autolaunch.launch.end import RunEnd


def run(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
    """Run a job on this machine, one rank in this process, several in a process each; or where `launch` says.

    Args:
        job: the job.
        isolated: give a single rank a process of its own, too, so that it can neither take this one down nor leave
            anything behind in it; for sweeps.
    """
    if is_slurm(job.config):
        from autolaunch.launch.slurm import run_on_slurm

        return run_on_slurm(job)
    if job.world_size == 1 and not isolated:
        from autolaunch.worker import run_here

        return run_here(job)
    from autolaunch.launch.local import run_local

    return run_local(job, job.config["launch"])
