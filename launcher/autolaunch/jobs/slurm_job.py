"""What the batch script of a job runs: `ranks` on every rank that srun starts, `end` when they have ended.

`python -m autolaunch.jobs.slurm_job ranks|end <job.json> [exit code of srun]`. Nothing is composed again: every start
of a job, however often it is queued again, reads the job's file and writes into the same directory.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path

from autolaunch.config.slurm import gpus_per_node
from autolaunch.job import ResolvedJob
from autolaunch.jobs.ends import SUMMARY
from autolaunch.launch.lock import HANDOVER_SECONDS, locked
from autolaunch.launch.phase import forget_reports
from autolaunch.launch.place import place
from autolaunch.launch.requeue import after_a_start, this_start
from autolaunch.machine.devices import visible_devices
from autolaunch_strategies.config import ConfigError, ConfigErrors

FAILED, MISCONFIGURED = 1, 2


def main() -> None:
    """Do what the script asks for, and exit with its code."""
    what, path, *code = sys.argv[1:]
    try:
        sys.exit(_ranks(Path(path)) if what == "ranks" else _end(Path(path), int(code[0])))
    except (ConfigError, ConfigErrors) as error:
        print(error, file=sys.stderr)
        sys.exit(MISCONFIGURED)


def _ranks(path: Path) -> int:
    from autolaunch.worker import leave, run_here, run_rank

    here = place()

    held = contextlib.ExitStack()
    atexit.register(held.close)  # what `leave` calls, too

    def make_job() -> ResolvedJob:
        directory = ResolvedJob.read(path).output_dir
        held.enter_context(locked(directory, f"output_dir={directory}", wait=HANDOVER_SECONDS))
        job = this_start(path)  # not before: the start that holds the lock may still be saving
        (job.output_dir / SUMMARY).unlink(missing_ok=True)  # of an earlier start
        forget_reports(job.logs)
        if job.config["ckpt_path"] is not None:
            print(f"going on from {job.config['ckpt_path']}", file=sys.stderr, flush=True)
        return job

    if here.kind == "alone":
        job = make_job()
        _check_devices(job)
        end = run_here(job)
        if end.message:
            print(end.message, file=sys.stderr, flush=True)
        leave(end.exit_code)
    from autolaunch.launch.rendezvous import RankMissing, connect, share_job

    try:
        timeout = ResolvedJob.read(path).config["launch"]["start_timeout"]
        store = connect(here, timeout)
        job = share_job(store, here, make_job, timeout)
    except RankMissing as error:
        print(error, file=sys.stderr)
        return FAILED
    _check_devices(job)
    leave(run_rank(job, here, store))


def _check_devices(job: ResolvedJob) -> None:
    """Refuse to train on the CPU of a node whose GPUs were asked for."""
    wanted = gpus_per_node(job.config, job.world_size)
    kind, _ = visible_devices(job.config["trainer"]["accelerator"])
    if wanted and kind == "cpu":
        raise ConfigError(
            f"launch.gpus_per_node={wanted}",
            f"{os.environ.get('SLURMD_NODENAME', 'this node')} shows no GPU to the job, or its torch has no CUDA",
            "a partition whose nodes have GPUs; trainer.accelerator=cpu trains without",
            "trainer.accelerator=cpu",
        )


def _end(path: Path, code: int) -> int:
    return after_a_start(ResolvedJob.read(path), code, os.environ["SLURM_JOB_ID"])


if __name__ == "__main__":
    main()
