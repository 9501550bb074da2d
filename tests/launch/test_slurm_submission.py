"""launch=slurm without a Slurm: what is refused before submission, the script, and which starts are followed by one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autolaunch import cli
from autolaunch.config.slurm import seconds_of
from autolaunch.job import ResolvedJob
from autolaunch.launch.end import Stop, write_stop
from autolaunch.launch.requeue import after_a_start, this_start
from autolaunch.launch.slurm import environment
from autolaunch_strategies.checkpoint.files import write_manifest
from tests.support.messages import Told, assert_only_told

BASE = ("launch=slurm", "launch.submit=false", "trainer.accelerator=cpu", "output_dir=out")

WRONG = [
    pytest.param(
        ["mesh=6", "launch.nodes=4", "data.batch_size=6"],
        Told("mesh=6 with launch.nodes=4", "6 ranks", "4 nodes", allowed="launch.nodes=1, 2, 3, 6", write=None),
        id="uneven",
    ),
    pytest.param(
        ["mesh=8", "launch.gpus_per_node=4"],
        Told("mesh=8 with launch.gpus_per_node=4", "8 ranks", allowed=None, write="launch.gpus_per_node=8"),
        id="fewer-gpus-than-ranks",
    ),
    pytest.param(
        ["mesh=-1", "launch.nodes=2"],
        Told("mesh=-1", "a node", allowed=("launch.gpus_per_node",), write="mesh=-1 launch.gpus_per_node=8"),
        id="devices-unknown",
    ),
    pytest.param(
        ["launch.time=240"],
        Told("launch.time=240", "two ways", allowed=("H:M:S", "D-H"), write="launch.time=4:00:00"),
        id="time-in-what",
    ),
    pytest.param(
        ["launch.time=1:00"],
        Told("launch.time=1:00", "90 s", allowed=("more than 1:30",), write="launch.time=1:00:00"),
        id="no-time-to-save",
    ),
    pytest.param(
        ["launch.partition='a b'"],
        Told("launch.partition='a b'", "name", allowed=("spaces",)),
        id="partition-of-two-words",
    ),
    pytest.param(
        ["launch.sbatch=[--exclusive,'--nodes=3']"],
        Told("launch.sbatch: --nodes=3", "launch.nodes", allowed="launch.nodes=", write="launch.nodes=3"),
        id="option-that-is-a-key",
    ),
    pytest.param(
        ["launch.sbatch=['-t5']"],
        Told("launch.sbatch: -t5", "launch.time", allowed="launch.time=", write=None),
        id="short-option-that-is-a-key",
    ),
    pytest.param(
        ["launch.sbatch=['--array=1-3']"], Told("launch.sbatch: --array=1-3", "one job", allowed=None), id="array"
    ),
    pytest.param(
        ["launch.sbatch=[exclusive]"],
        Told("launch.sbatch: exclusive", "no option", allowed=None, write="'launch.sbatch=[--exclusive]'"),
        id="no-option",
    ),
    pytest.param(
        ["launch.sbatch=--mem=0"],
        Told("launch.sbatch=--mem=0", "list of texts", write="'launch.sbatch=[\"--mem=0\"]'"),
        id="one-option-without-a-list",
    ),
    pytest.param(
        ["compare", "mesh=1,2"],
        Told("launch.submit=False", "wait", allowed=None, write="launch.submit=true"),
        id="compare-without-jobs",
    ),
    pytest.param(
        ["launch.devices=2"],
        Told("launch.devices=2", "launch=local", "launch=slurm", write="launch=local launch.devices=2"),
        id="key-of-local",
    ),
    pytest.param(
        ["launch.sbatch=[--mem=0,--exclusive]"],
        Told(
            "launch.sbatch=[--mem=0,--exclusive]",
            "Hydra",
            allowed=("list", "quotes"),
            write="""'launch.sbatch=["--mem=0","--exclusive"]'""",
        ),
        id="list-that-hydra-cannot-read",
    ),
    pytest.param(
        ["calibrate"],
        Told("launch=slurm", "calibrate", allowed=("launch=local",), write="launch=local"),
        id="task-of-one-process",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG)
def test_wrong_values_are_refused(
    arguments: list[str],
    expected: Told,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    task = [item for item in arguments if "=" not in item]
    assert cli.run([*task, *BASE, *(item for item in arguments if "=" in item)]) == 2
    assert_only_told(capsys.readouterr().err, expected)
    assert list(tmp_path.iterdir()) == []


def test_without_sbatch(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.run(["launch=slurm", "trainer.accelerator=cpu"]) == 2
    assert_only_told(
        capsys.readouterr().err,
        Told("launch=slurm", "no sbatch", allowed=("launch.submit=false",), write="launch.submit=false"),
    )


def test_auto_needs_a_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.run(["mesh=auto", *BASE]) == 2
    assert_only_told(capsys.readouterr().err, Told("mesh=auto", "launch=slurm", allowed=("cluster",), write=None))


def test_the_script(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed, written, and bash can read it; nothing is asked for that nobody asked for."""
    directory = tmp_path / "a 100% run"
    directory.mkdir()
    monkeypatch.chdir(directory)
    keys = ["launch.nodes=2", "mesh=4", "launch.time=4:00:00", "launch.account=me", "launch.cpus_per_task=3"]
    keys += ["launch.sbatch=[--exclusive]", "launch.setup=['module load x','export Y=1']", "checkpoint.enabled=true"]
    assert cli.run(["launch=slurm", "launch.submit=false", "name=my run", *keys, "output_dir=out"]) == 0
    out, err = capfd.readouterr()
    script = (directory / "out" / "job.sbatch").read_text()
    assert out == script
    assert "sbatch '" in err and "launch.submit=false" in err
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        '--job-name="my run"',
        "--nodes=2",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "--cpus-per-task=3",
        "--time=4:00:00",
        "--account=me",
        f'--chdir="{directory}"',
        f'--output="{tmp_path}/a 100%% run/out/logs/slurm.log"',
        "--open-mode=append",
        "--requeue",
        "--signal=USR1@90  # to the ranks: save, and leave",
        "--exclusive",
    ]
    srun = next(line for line in script.splitlines() if line.startswith("srun "))
    assert srun.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=3 ")
    assert script.index("module load x") < script.index("export Y=1") < script.index("srun ")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert ResolvedJob.read(directory / "out" / ".hydra" / "job.json").world_size == 4
    assert not (directory / "out" / "summary.json").exists()


def test_without_checkpoints_nothing_warns(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run([*BASE[:3], "checkpoint.enabled=false", f"output_dir={tmp_path / 'out'}"]) == 0
    out = capfd.readouterr().out
    assert "--signal" not in out and "--gpus-per-node" not in out


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("4:00:00", 14400),
        ("1:30", 90),
        ("2-0", 172800),
        ("1-2:03", 93780),
        ("1-0:0:5", 86405),
        ("5", None),
        ("x", None),
    ],
)
def test_time_limits(limit: str, seconds: int | None) -> None:
    assert seconds_of(limit) == seconds


def test_a_job_submitted_inside_another_asks_for_what_is_its_own() -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "5", "SLURM_CONF": "c", "HOME": "h"}
    assert environment(inside) == {"SLURM_CONF": "c", "HOME": "h"}
    assert environment({"SLURM_PARTITION": "p"}) == {"SLURM_PARTITION": "p"}


@pytest.fixture
def job(tmp_path: Path) -> ResolvedJob:
    config = {"task": "fit", "ckpt_path": "first.ckpt", "launch": {"max_restarts": 2}}
    job = ResolvedJob(config, tmp_path / "out", 2, [], "0")
    job.logs.mkdir(parents=True)
    job.write()
    return job


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a scontrol on the path that knows the job in a state; gives the file of what it was asked to do."""

    def make(state: str, refusal: str = "") -> Path:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        program = tmp_path / "bin" / "scontrol"
        program.parent.mkdir(exist_ok=True)
        refuse = f"echo '{refusal}' >&2; exit 1" if refusal else f"echo $@ >> {calls}"
        program.write_text(
            f'#!/bin/sh\n[ "$1" = requeue ] && {{ {refuse}; }}\n[ "$1" = requeue ] || echo "JobId=7 JobState={state}"\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return calls

    return make


def checkpoint(job: ResolvedJob, step: int) -> Path:
    path = job.output_dir / "checkpoints" / f"step_{step:07d}.ckpt"
    path.mkdir(parents=True)
    write_manifest(path, step, "2")
    return path


def at_step(job: ResolvedJob, step: int) -> None:
    (job.output_dir / "metrics.csv").write_text(f"step,loss\n{step},1.0\n{step + 1},")


def test_a_job_that_saved_in_time_is_queued_again(job: ResolvedJob, scontrol: Callable[..., Path], capfd) -> None:
    """However often, as long as steps are made; and whatever srun says of ranks that it killed."""
    calls = scontrol("RUNNING")
    for start, step in enumerate((5, 9, 12), 1):
        write_stop(Stop(10, step, str(checkpoint(job, step))), job.logs)
        assert after_a_start(job, 137, "7") == 75
        assert calls.read_text() == "requeue 7\n" * start
    assert "step_0000012.ckpt" in capfd.readouterr().err
    assert after_a_start(job, 75, "7") == 75  # again at step 12
    assert calls.read_text() == "requeue 7\n" * 3
    assert "no step was made" in capfd.readouterr().err


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PREEMPTED", ""])
def test_a_job_that_was_cancelled_is_not(state: str, job: ResolvedJob, scontrol: Callable[..., Path]) -> None:
    calls = scontrol(state)
    write_stop(Stop(15, 5, "x"), job.logs)
    assert after_a_start(job, 75, "7") == 75
    assert not calls.exists()


@pytest.mark.parametrize("code", [0, 2])
def test_a_job_that_is_done_or_wrong_is_not(code: int, job: ResolvedJob, scontrol: Callable[..., Path]) -> None:
    calls = scontrol("RUNNING")
    assert after_a_start(job, code, "7") == code
    assert not calls.exists()


def test_failures_are_counted(job: ResolvedJob, scontrol: Callable[..., Path], capfd) -> None:
    calls = scontrol("RUNNING")
    for step in (3, 5, 8):
        at_step(job, step)
        assert after_a_start(job, 137, "7") == 137
    assert calls.read_text() == "requeue 7\n" * 2
    assert "launch.max_restarts=2" in capfd.readouterr().err
    assert [end["step"] for end in json.loads((job.output_dir / ".hydra" / "starts.json").read_text())] == [3, 5, 8]


def test_a_failure_that_repeats_ends_it(job: ResolvedJob, scontrol: Callable[..., Path], capfd) -> None:
    calls = scontrol("RUNNING")
    job.config["launch"]["max_restarts"] = 9
    at_step(job, 3)
    assert [after_a_start(job, 1, "7") for _ in range(3)] == [1, 1, 1]
    assert calls.read_text() == "requeue 7\n" * 2
    assert "three times after step 3" in capfd.readouterr().err


def test_where_requeue_is_not_allowed_the_line_that_goes_on_is_told(
    job: ResolvedJob, scontrol: Callable[..., Path], capfd
) -> None:
    scontrol("RUNNING", refusal="Job has Requeue=0")
    write_stop(Stop(10, 5, "x"), job.logs)
    assert after_a_start(job, 75, "7") == 75
    told = capfd.readouterr().err
    assert "Requeue=0" in told and f"output_dir={job.output_dir} ckpt_path=last" in told


@pytest.mark.parametrize("count", [None, "1"])
def test_a_start_goes_on_from_what_the_job_wrote(
    job: ResolvedJob, count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued again by Slurm, or submitted once more by a person: then Slurm counts nothing."""
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    older = checkpoint(job, 90)  # of a run that was here before
    os.utime(older / "checkpoint.json", ns=(0, 0))
    assert this_start(job.path).config["ckpt_path"] == "first.ckpt"
    newest = checkpoint(job, 20)
    (checkpoint(job, 30) / "checkpoint.json").unlink()
    restarted = this_start(job.path)
    assert (restarted.config["ckpt_path"], restarted.resumes_last) == (str(newest), True)
    (newest / "checkpoint.json").unlink()
    assert this_start(job.path).config["ckpt_path"] == "first.ckpt"
