"""A run as a job of Slurm: its script written, submitted, and its log shown until it has ended."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping

from autolaunch.job import ResolvedJob, write_beside
from autolaunch.launch.end import RunEnd
from autolaunch.launch.lock import hand_over
from autolaunch.launch.phase import forget_reports
from autolaunch.launch.requeue import forget_ends_of_starts, job_state, read_ends_of_starts
from autolaunch.launch.slurm_script import script, script_file, slurm_log
from autolaunch_strategies.config import ConfigError

LOG_SECONDS = 0.5
STATE_SECONDS = 3.0
"""How often Slurm is asked how the job is; its controller has other things to do."""

WAITS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED",
         "SIGNALING", "STAGE_OUT", "RESIZING", "RESV_DEL_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")  # fmt: skip
"""States of a job that has not ended, or is about to begin again."""


def run_on_slurm(job: ResolvedJob) -> RunEnd:
    """Write the script of a job into its directory, submit it, and show its log until it has ended.

    Ctrl-C ends the showing, not the job.

    Raises:
        ConfigError: Slurm refuses the job.
    """
    launch = job.config["launch"]
    forget_reports(job.logs)
    forget_ends_of_starts(job)
    job.write()
    file, log = script_file(job), slurm_log(job)
    write_beside(file, text := script(job))
    if not launch["submit"]:
        print(text, end="", flush=True)
        return RunEnd("written", 0, message=f"nothing was submitted (launch.submit=false); to do it: {_sbatch(job)}")
    shown = log.stat().st_size if log.exists() else 0
    number = _submit(job)
    hand_over(job.output_dir)
    follow = f"to follow it: tail -F {shlex.quote(str(log))}; to cancel it: scancel {number}"
    print(f"submitted as job {number} of Slurm; {file}", file=sys.stderr, flush=True)
    if not launch["follow"]:
        return RunEnd("submitted", 0, message=follow)
    try:
        return _Follower(job, number, shown).until_the_end()
    except KeyboardInterrupt:
        return RunEnd("submitted", 130, message=f"\njob {number} goes on without this command; {follow}")


def _sbatch(job: ResolvedJob) -> str:
    return f"sbatch {shlex.quote(str(script_file(job)))}"


def _submit(job: ResolvedJob) -> str:
    """Submit the script and return the job's number."""
    done = subprocess.run(
        ["sbatch", "--parsable", str(script_file(job))], capture_output=True, text=True, env=environment(os.environ)
    )
    if done.returncode:
        reason = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
        raise ConfigError("launch=slurm", f"Slurm refused the job: {reason}", write=_sbatch(job))
    return done.stdout.strip().split(";")[0]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What sbatch is given of the environment: inside another job nothing of what that one asked for."""
    inside = "SLURM_JOB_ID" in variables
    return {
        name: value
        for name, value in variables.items()
        if not (inside and name.startswith(("SLURM_", "SRUN_")) and name != "SLURM_CONF")
    }


class _Follower:
    """Shows what a job writes, says when it waits, and knows how it ended."""

    def __init__(self, job: ResolvedJob, number: str, shown: int) -> None:
        self.job, self.number = job, number
        self.shown = shown
        """How much of the log was shown."""
        self.said = ""

    def until_the_end(self) -> RunEnd:
        ended = False  # seen twice: between two starts a job may look as if it had ended
        while True:
            state = job_state(self.number)
            self._say(state)
            over = state is not None and state.get("JobState", "") not in WAITS
            until = time.monotonic() + STATE_SECONDS
            while time.monotonic() < until:
                self._show()
                time.sleep(LOG_SECONDS)
            if over and ended:
                assert state is not None
                return self._end(state)
            ended = over

    def _say(self, state: Mapping[str, str] | None) -> None:
        waits = state is not None and state.get("JobState") in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT")
        if state is None or not waits or state.get("Reason") == "None":
            self.said = ""
            return
        begins = f", not before {state['StartTime']}" if state.get("Reason") == "BeginTime" else ""
        text = f"job {self.number} waits: {state.get('Reason', 'no reason given')}{begins}"
        if text != self.said:
            print(text, file=sys.stderr, flush=True)
        self.said = text

    def _show(self) -> None:
        log = slurm_log(self.job)
        if not log.exists() or log.stat().st_size <= self.shown:
            return
        with log.open("rb") as file:
            file.seek(self.shown)
            text = file.read()
        self.shown += len(text)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()

    def _end(self, state: Mapping[str, str]) -> RunEnd:
        self._show()
        ends = read_ends_of_starts(self.job)
        name = state.get("JobState", "")
        if name == "COMPLETED" or (not name and ends and ends[-1]["code"] == 0):
            return RunEnd("finished", 0)
        code = int(state.get("ExitCode", "0").split(":")[0]) or (ends[-1]["code"] if ends and not name else 1)
        log = f"log: {slurm_log(self.job)}"
        if name == "CANCELLED":
            return RunEnd("interrupted", 143, message=f"job {self.number} was cancelled\n{log}")
        if name == "FAILED" and code == os.EX_TEMPFAIL:
            return RunEnd("interrupted", code, message=f"job {self.number} has saved and ended\n{log}")
        how = {"FAILED": f"failed with exit code {code}", "TIMEOUT": "was ended at its time limit"}
        how |= {"NODE_FAIL": "lost a node", "OUT_OF_MEMORY": "was killed for its memory", "": "is not known any more"}
        told = how.get(name, f"ended as {name}")
        return RunEnd("failed", code, message=f"job {self.number} {told}\n{log}")
