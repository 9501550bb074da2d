"""After each start of a job of Slurm: whether it is queued again, and from where it goes on then. Torch-free."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from autolaunch.job import ResolvedJob, write_beside
from autolaunch.launch.end import PREEMPTED, read_stop
from autolaunch_strategies.checkpoint.files import MANIFEST, complete_checkpoints
from autolaunch_strategies.config import as_typed

MISCONFIGURED = 2

_UNKNOWN = "Invalid job id"


def job_state(number: str) -> dict[str, str] | None:
    """What Slurm knows of a job: `JobState`, `Reason`, `ExitCode`, `Restarts` ...; None if it does not answer now.

    An empty dict if Slurm knows the job no more.
    """
    done = _scontrol("-o", "show", "job", number)
    if done is None or done.returncode:
        return {} if done is not None and _UNKNOWN in done.stderr else None
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", done.stdout))


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        # In a session of its own: Ctrl-C is not meant for it.
        return subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=60, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def this_start(path: Path) -> ResolvedJob:
    """The job of a file that `ResolvedJob.write` left, as this start of it runs it.

    A start after the first goes on from the furthest whole checkpoint that a start before it has written; whether Slurm
    has queued the job again or a person has submitted its script once more.
    """
    job = ResolvedJob.read(path)
    newest = newest_checkpoint(job)
    if newest is None:
        return job
    return replace(job, config={**job.config, "ckpt_path": str(newest)}, resumes_last=True)


def newest_checkpoint(job: ResolvedJob) -> Path | None:
    """The furthest whole checkpoint that this job has written; those that were there before it are not its own."""
    if job.config["task"] != "fit":
        return None
    submitted = job.path.stat().st_mtime_ns
    own = [
        item
        for item in complete_checkpoints(job.output_dir / "checkpoints")
        if (item / MANIFEST).stat().st_mtime_ns >= submitted
    ]
    return own[-1] if own else None


def after_a_start(job: ResolvedJob, code: int, number: str) -> int:
    """Note how a start of the job ended, and have Slurm queue it again if it is to go on; what is done is told.

    Args:
        job: the job.
        code: what srun ended with.
        number: of the job in Slurm.

    Returns:
        What the batch script is to end with.
    """
    stop = read_stop(job.logs)
    if stop is not None:
        code = stop.exit_code  # srun kills ranks that leave a moment later, and tells of those
    earlier = read_ends_of_starts(job)
    step = stop.step if stop is not None else _last_step(job)
    _write_ends(job, [*earlier, {"code": code, "step": step}])
    if code in (0, MISCONFIGURED):
        return code
    state = (job_state(number) or {}).get("JobState", "")
    if state != "RUNNING":
        return code  # cancelled; or preempted, and Slurm queues it again itself
    if reason := _stays_ended(job, earlier, code, step):
        _tell(f"job {number} is not queued again: {reason}")
        return code
    newest = newest_checkpoint(job)
    # Said before: Slurm may end the script, and this with it, in the middle of its answer.
    _tell(f"job {number} is queued again, to go on from {newest}" if newest else f"job {number} is queued again")
    done = _scontrol("requeue", number)
    if done is None or done.returncode:
        why = "scontrol does not answer" if done is None else done.stderr.strip()
        there = as_typed("output_dir", job.output_dir)
        _tell(f"that is refused: {why}\nto go on: the same command with {there} ckpt_path=last")
    return code


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stays_ended(job: ResolvedJob, earlier: list[dict[str, Any]], code: int, step: int | None) -> str:
    """Why the job is not queued again, or an empty string."""
    saved = code == PREEMPTED
    alike = [end for end in earlier if (end["code"] == PREEMPTED) == saved]
    if saved:
        return f"no step was made since the last time (step {step})" if alike and alike[-1]["step"] == step else ""
    limit = job.config["launch"]["max_restarts"]
    if len(alike) >= limit:
        times = f"{len(alike)} restart{'' if len(alike) == 1 else 's'}"
        return f"it failed after {times} (launch.max_restarts={limit})" if limit else "launch.max_restarts=0"
    # Three times: a node that comes back may end the first start that it gets.
    if len(alike) > 1 and all(end["step"] == step for end in alike[-2:]):
        return f"it failed three times {f'after step {step}' if step is not None else 'before its first step'}"
    return ""


def _last_step(job: ResolvedJob) -> int | None:
    """The last step that metrics.csv of this job has."""
    path = job.output_dir / "metrics.csv"
    if not path.is_file() or path.stat().st_mtime_ns < job.path.stat().st_mtime_ns:
        return None
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # a killed process leaves half a row behind
    rows = [row for row in csv.DictReader(whole.splitlines()) if (row.get("step") or "").isdecimal()]
    return int(rows[-1]["step"]) if rows else None


def _ends_file(job: ResolvedJob) -> Path:
    return job.output_dir / ".hydra" / "starts.json"


def read_ends_of_starts(job: ResolvedJob) -> list[dict[str, Any]]:
    """`{code, step}` of every start of the job that has ended, in their order."""
    try:
        ends = json.loads(_ends_file(job).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [{"code": int(end["code"]), "step": end["step"]} for end in ends]


def _write_ends(job: ResolvedJob, ends: list[dict[str, Any]]) -> None:
    write_beside(_ends_file(job), json.dumps(ends))


def forget_ends_of_starts(job: ResolvedJob) -> None:
    """Remove what an earlier job in this directory has noted."""
    _ends_file(job).unlink(missing_ok=True)
