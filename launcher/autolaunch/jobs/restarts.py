"""A local run that starts again by itself after a rank has failed, with fewer ranks where one is gone for good.

A loop around `jobs.start.run`: it looks at how the run ended and at what it left in its directory, nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from autolaunch.config.schema import IN_ONE_PROCESS
from autolaunch.directories import shown
from autolaunch.job import ResolvedJob
from autolaunch.jobs import start
from autolaunch.jobs.ends import SUMMARY, last_row, metrics_state, read_summary
from autolaunch.jobs.fewer_ranks import on_fewer_ranks
from autolaunch.launch.end import RunEnd, Stop
from autolaunch.launch.failure import failure_file
from autolaunch.launch.signals import Signals
from autolaunch.machine.devices import gpus_that_answer, visible_devices, visible_gpus, visible_variable
from autolaunch_strategies.checkpoint.files import MANIFEST, complete_checkpoints, read_manifest

FAILED = 1
"""The exit code after which a run is started again; not 2, a wrong config, nor any of what a signal asks for."""

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first restart, doubled for each one after it, and the most that they become."""

POLL_SECONDS = 0.05


def run(job: ResolvedJob, *, isolated: bool = False) -> tuple[ResolvedJob, RunEnd]:
    """Run a job as `start.run` does, again and again after failures while `launch.max_restarts` allows it.

    A restart goes on from the newest whole checkpoint that the run has written, in the same directory. Two failures at
    the same step end it: what a restart does not heal is a bug. Where `launch.min_devices` is set, a rank that is gone
    for good is left out: one whose GPU does not answer, or whose process was lost twice at the same step without an
    error of its own.

    Args:
        job: the job.
        isolated: as for `start.run`; a job that may be started again has processes of its own anyway.

    Returns:
        the job as it was started last, and how that ended.
    """
    local, task = job.config["launch"]["name"] == "local", job.config["task"]
    if not local or task in IN_ONE_PROCESS or job.config["launch"]["max_restarts"] == 0:
        return job, start.run(job, isolated=isolated)
    return _Starts(job).until_the_end()


class _GivenUp(Exception):
    """Why a run that has failed is not started again."""


@dataclass(frozen=True)
class _Failed:
    """Where a run failed."""

    step: int
    """Optimizer steps that were done, as far as is known."""
    rank: int | None
    """The rank that failed first; None if none is to blame."""
    lost: bool
    """Its process ended, or was ended, without an error of its own."""


class _Starts:
    """The starts of one job, one after the other."""

    def __init__(self, job: ResolvedJob) -> None:
        self.first = self.job = job
        self.most: int = job.config["launch"]["max_restarts"]
        self.least: int | None = job.config["launch"]["min_devices"]
        self.signals = Signals()
        self.before: _Failed | None = None
        """The failure before this one."""
        self.left_out_at: int | None = None
        """The step after which a rank was left out last because its process was lost there."""
        self.earlier = self._checkpoints()
        """What another run has left in the directory: not this one's to go on from."""

    def until_the_end(self) -> tuple[ResolvedJob, RunEnd]:
        with self.signals.caught():
            while True:
                before = metrics_state(self.job.output_dir)
                end = start.run(self.job, isolated=True)
                if end.exit_code != FAILED or self.signals.received:
                    return self.job, end
                failed = self._where(end, before)
                try:
                    again, changed = self._next(failed)
                except _GivenUp as reason:
                    return self.job, replace(end, message=f"{end.message}\nnot started again: {reason}")
                self.before, self.job = failed, again
                (again.output_dir / SUMMARY).unlink(missing_ok=True)  # says how the last start failed
                seconds = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (again.restarts - 1))
                lines = [end.message, *changed, self._announcement(seconds)]
                print("\n".join(lines), file=sys.stderr, flush=True)
                if (signum := self._wait(seconds)) is not None:
                    stop = Stop(signum, self._step_of_checkpoint(), self._own_checkpoint())
                    return again, RunEnd("interrupted", stop.exit_code, message=stop.render(again.output_dir))

    def _where(self, end: RunEnd, before: tuple[int, int, int] | None) -> _Failed:
        row, summary = last_row(self.job.output_dir, before), read_summary(self.job.output_dir)
        step = max(self._step_of_checkpoint(), int(row.get("step") or 0), summary.get("steps") or 0)
        if end.failure is None:
            return _Failed(step, None, False)
        rank = end.failure.rank
        return _Failed(step, rank, not failure_file(self.job.logs, rank).exists())

    def _next(self, failed: _Failed) -> tuple[ResolvedJob, list[str]]:
        """(the job to start, what is said of how it differs).

        Raises:
            _GivenUp: it is not to be started again.
        """
        gone, why = self._gone(failed)
        if self.job.restarts == self.most:
            raise _GivenUp(f"{self._restarts()} (launch.max_restarts) {'is' if self.most == 1 else 'are'} used up")
        job, changed = self.job, []
        if why:
            job = self._without(gone, why)
            fewer = f"{job.world_size} of {self.job.world_size} ranks: mesh={job.choices['mesh']}"
            changed = [why if job is self.job else f"{why}; going on with {fewer}"]
        checkpoint = self._newest_checkpoint()
        config = {**job.config, "ckpt_path": self.first.config["ckpt_path"] if checkpoint is None else str(checkpoint)}
        resumes_last = self.first.resumes_last or checkpoint is not None
        return replace(job, config=config, resumes_last=resumes_last, restarts=job.restarts + 1), changed

    def _gone(self, failed: _Failed) -> tuple[int, str]:
        """(how many ranks of the mesh have no device any more, why they are left out); empty if all are there.

        GPUs that are gone are taken from what processes started from now on can see.

        Raises:
            _GivenUp: the failure repeats, and no rank is to be left out for it.
        """
        ranks = self.job.world_size
        gpus = visible_gpus() if visible_devices(self.job.config["trainer"]["accelerator"])[0] == "gpu" else []
        answering = gpus_that_answer(gpus)
        if len(answering) < len(gpus):
            silent = [gpu for gpu in gpus if gpu not in answering]
            os.environ[visible_variable()] = ",".join(answering)
            self.before = None  # where it failed before says nothing of the devices that are left
            return max(0, ranks - len(answering)), f"no answer from GPU {', '.join(silent)}"
        if self.before is None or failed.step != self.before.step:
            return 0, ""
        if self.left_out_at == failed.step:
            raise _GivenUp(f"it fails after step {failed.step} without the rank that was left out, too")
        if failed.rank is None or not failed.lost or (failed.rank, True) != (self.before.rank, self.before.lost):
            raise _GivenUp(f"the second failure in a row after step {failed.step} is a bug that no restart heals")
        lost = f"rank {failed.rank} was lost for the second time after step {failed.step}"
        if ranks == 1:
            raise _GivenUp(lost)
        if self.least is None:
            raise _GivenUp(f"{lost}; launch.min_devices={ranks - 1} lets a run go on without such a rank")
        self.left_out_at = failed.step
        if gpus:
            del gpus[failed.rank % len(gpus)]  # as workers choose theirs
            os.environ[visible_variable()] = ",".join(gpus)
        return max(0, ranks - len(gpus)) if gpus else 1, lost

    def _without(self, gone: int, why: str) -> ResolvedJob:
        """The job on the ranks that are left.

        Raises:
            _GivenUp: `launch.min_devices` wants more, or no mesh of as few fits.
        """
        left = self.job.world_size - gone
        if gone == 0:
            return self.job  # there are more devices than ranks
        least = self.job.world_size if self.least is None else self.least
        if left < least:
            hint = f"; launch.min_devices={left} lets a run go on with them" if left and self.least is None else ""
            raise _GivenUp(f"{why}, so {left} of {self.job.world_size} ranks are left (launch.min_devices){hint}")
        smaller = on_fewer_ranks(self.job, left, least)
        if smaller is None:
            raise _GivenUp(
                f"{why}, and no mesh of {least} (launch.min_devices) to {left} ranks fits the batch and the model"
            )
        return smaller

    def _announcement(self, seconds: float) -> str:
        source = self.job.config["ckpt_path"]
        if source is None:
            where = "from the start: no checkpoint has been written"
        else:
            where = f"from {shown(Path(source))}" + ("" if self._own_checkpoint() else ": none has been written since")
        return f"starting again in {seconds:g} s (restart {self.job.restarts} of {self.most}), {where}"

    def _restarts(self) -> str:
        return "the restart" if self.most == 1 else f"all {self.most} restarts"

    def _wait(self, seconds: float) -> int | None:
        """Wait, and return the signal that came meanwhile."""
        end = time.monotonic() + seconds
        while not self.signals.received and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return self.signals.received[0] if self.signals.received else None

    def _checkpoints(self) -> dict[Path, int]:
        """Whole checkpoints in the run's directory, and when they were written; the furthest trained is the last."""
        whole = complete_checkpoints(self.job.output_dir / "checkpoints")
        return {item: (item / MANIFEST).stat().st_mtime_ns for item in whole}

    def _newest_checkpoint(self) -> Path | None:
        own = [item for item, written in self._checkpoints().items() if self.earlier.get(item) != written]
        return own[-1] if own else None

    def _own_checkpoint(self) -> str | None:
        """The checkpoint from which the job goes on, if this run has written it."""
        source: str | None = self.job.config["ckpt_path"]
        return None if source == self.first.config["ckpt_path"] else source

    def _step_of_checkpoint(self) -> int:
        source = self.job.config["ckpt_path"]
        return read_manifest(Path(source)).get("step", 0) if source else 0
