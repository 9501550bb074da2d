"""What a command leaves behind: directories, the resolved job, exit codes, and the table of a sweep.

The jobs themselves are stand-ins here: what is tested is everything around `autolaunch.jobs.start.run`.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from rich.console import Console

from autolaunch import cli
from autolaunch.config import across_keys, arithmetic
from autolaunch.job import ResolvedJob
from autolaunch.jobs import start
from autolaunch.jobs.ends import JobEnd, print_table
from autolaunch.launch import lock
from autolaunch.launch.end import RunEnd
from autolaunch.report.terminal import Terminal
from autolaunch_strategies.checkpoint.files import write_manifest
from autolaunch_strategies.config import ConfigError
from tests.support.messages import Told, assert_only_told, assert_told

Outcome = tuple[int, str, str]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ResolvedJob, bool]]:
    """The jobs that were launched, and whether each was to be isolated; `seed` says how a job ends."""
    jobs: list[tuple[ResolvedJob, bool]] = []

    def run(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
        jobs.append((job, isolated))
        match job.config["seed"]:
            case 1:
                return RunEnd("failed", 1, message="rank 0 of 1 failed: ValueError: unlucky")
            case 2:
                raise KeyboardInterrupt
            case 3:
                return RunEnd("interrupted", 143, message="interrupted")
            case 4:
                raise ZeroDivisionError("a mistake of ours")
            case 6:
                save(str(job.output_dir))
                return RunEnd("failed", 1, message="rank 1 of 2 failed: killed by SIGKILL")
            case 8:
                save(str(job.output_dir))
                return RunEnd("interrupted", 130, message="stopped by Ctrl-C; every rank has ended")
            case 7:
                job.path.unlink()
                return RunEnd("failed", 1, message="rank 1 of 2 failed: killed by SIGKILL")
        (job.output_dir / "summary.json").write_text(json.dumps({"loss": 1.25, "step_time_s": 0.5}))
        return RunEnd("finished", 0)

    monkeypatch.setattr(start, "run", run)
    return jobs


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `autolaunch ...` in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (across_keys, arithmetic):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.setenv("COLUMNS", "150")

    def run(*argv: str) -> Outcome:
        code = cli.run(argv)
        return code, *capfd.readouterr()

    return run


def rows(out: str) -> list[list[str]]:
    """The cells of the table that a sweep prints, without its heading."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]


def test_a_run_gets_what_was_checked(command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]) -> None:
    own_logger = ["+logger.own._target_=collections.OrderedDict", "+logger.own.save_dir=${output_dir}"]
    assert command("fit", "mesh=2", "name=first", *own_logger) == (0, "", "")
    ((job, isolated),) = ran
    assert (job.config["task"], job.world_size, isolated) == ("fit", 2, False)
    assert job.overrides == ["task=fit", "mesh=2", "name=first", *own_logger]
    assert job.output_dir.parent == Path("outputs/first").absolute()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", job.output_dir.name)
    assert job.config["output_dir"] == str(job.output_dir) == job.config["logger"]["own"]["save_dir"]
    assert ResolvedJob.read(job.path) == job
    assert (job.output_dir / ".hydra" / "overrides.yaml").is_file()


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        pytest.param(["mesh=2x2x2", "mp=seq_parallel", "data.seq_len=64"], 1, id="run"),
        pytest.param(["experiment=smoke"], 1, id="experiment"),
        pytest.param(["plan", "mesh=2"], 1, id="plan"),
        pytest.param(["mesh=2", "--cfg", "job"], 1, id="cfg"),
        # Ours to check what was typed, Hydra's of the sweep, and two of each job: to check it, and to run it.
        pytest.param(["-m", "optimizer.lr=0.1,0.2,0.3"], 8, id="sweep"),
    ],
)
def test_a_run_is_composed_once(
    argv: list[str],
    count: int,
    command: Callable[..., Outcome],
    ran: list[tuple[ResolvedJob, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compositions = []
    compose = ConfigLoaderImpl._load_configuration_impl

    def counted(self: ConfigLoaderImpl, *arguments: object, **options: object) -> object:
        compositions.append(options)
        return compose(self, *arguments, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
    assert command(*argv)[0] == 0
    assert len(compositions) == count


def test_a_plan_needs_one_process(command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]) -> None:
    assert command("plan", "mesh=2")[0] == 0
    assert (ran[0][0].config["task"], ran[0][0].config["mesh"]["dp"], ran[0][0].world_size) == ("plan", 2, 1)


def test_open_axis_is_filled(command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]) -> None:
    assert command("mesh=-1", "launch.devices=4")[0] == 0
    assert (ran[0][0].config["mesh"]["dp"], ran[0][0].world_size) == (4, 4)


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        pytest.param(["hydra.run.dir=outputs/${now:%Y}"], ["{year}", "{year}_2", "{year}_3"], id="named-by-time"),
        pytest.param(["output_dir=outputs/mine"], ["mine"], id="named-by-the-person"),
    ],
)
def test_runs_of_one_moment_share_no_directory(
    argv: list[str], names: list[str], command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    for _ in range(3):
        assert command(*argv)[0] == 0
    year = ran[0][0].output_dir.name
    assert sorted({job.output_dir.name for job, _ in ran}) == [name.format(year=year) for name in names]
    assert sorted(path.name for path in Path("outputs").iterdir()) == [name.format(year=year) for name in names]


@pytest.mark.parametrize(
    ("seed", "code", "err"),
    [
        pytest.param(0, 0, "", id="finished"),
        pytest.param(1, 1, "rank 0 of 1 failed: ValueError: unlucky\n", id="failed"),
        pytest.param(2, 130, "autolaunch: ended by Ctrl-C\n", id="ctrl-c"),
        pytest.param(3, 143, "interrupted\n", id="sigterm"),
    ],
)
def test_exit_codes(
    seed: int, code: int, err: str, command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    assert command(f"seed={seed}") == (code, "", err)


def test_a_mistake_of_ours_shows_its_traceback(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    code, _, err = command("seed=4")
    assert code == 1
    assert err.startswith("Traceback") and err.endswith("ZeroDivisionError: a mistake of ours\n")


def test_a_sweep_hides_and_stops_nothing(command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]) -> None:
    code, out, err = command("-m", "dp=fsdp,zero1", "mesh=1,3", "seed=0,1", "name=both", "output_dir=outputs/sweep")
    assert code == 1
    assert [(job.config["dp"]["sharding_level"], job.world_size, isolated) for job, isolated in ran] == [
        (3, 1, True),
        (3, 1, True),
        (1, 1, True),
        (1, 1, True),
    ]
    assert [job.output_dir for job, _ in ran] == [Path("outputs/sweep").absolute() / name for name in "0145"]
    assert_told(
        err,
        "data.batch_size=16",
        "16 sequences",
        "3 data parallel ranks",
        write="data.batch_size=15 or data.batch_size=18",
    )
    assert err.count("data.batch_size=16: ") == 4
    assert "job 1 (dp=fsdp mesh=1 seed=1 name=both output_dir=outputs/sweep) failed:\nrank 0 of 1 failed: " in err
    assert "\n8 jobs, 6 failed, in outputs/sweep\n" in out
    assert rows(out) == [
        ["0", "dp=fsdp mesh=1 seed=0", "finished", "1.2500", "0.500 s", "0"],
        ["1", "dp=fsdp mesh=1 seed=1", "failed", "-", "-", "1"],
        ["2", "dp=fsdp mesh=3 seed=0", "misconfigured", "-", "-", "2"],
        ["3", "dp=fsdp mesh=3 seed=1", "misconfigured", "-", "-", "3"],
        ["4", "dp=zero1 mesh=1 seed=0", "finished", "1.2500", "0.500 s", "4"],
        ["5", "dp=zero1 mesh=1 seed=1", "failed", "-", "-", "5"],
        ["6", "dp=zero1 mesh=3 seed=0", "misconfigured", "-", "-", "6"],
        ["7", "dp=zero1 mesh=3 seed=1", "misconfigured", "-", "-", "7"],
    ]


def test_a_sweep_where_all_is_well(command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]) -> None:
    code, out, err = command("optimizer.lr=0.1,0.2", "-m", "mesh=2")
    assert (code, err) == (0, "")
    assert [row[1] for row in rows(out)] == ["optimizer.lr=0.1", "optimizer.lr=0.2"]
    assert len({job.output_dir.parent for job, _ in ran}) == 1


def test_a_second_sweep_into_a_directory_shows_its_own_jobs(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    command("-m", "optimizer.lr=0.1,0.2,0.3", "output_dir=here")
    _, out, _ = command("-m", "optimizer.lr=0.4,0.5", "output_dir=here")
    assert [row[1] for row in rows(out)] == ["optimizer.lr=0.4", "optimizer.lr=0.5"]


@pytest.mark.parametrize("argv", [[], ["-m", "optimizer.lr=0.1,0.2"]], ids=["run", "sweep"])
def test_what_lies_below_a_directory_is_left_alone(
    argv: list[str], command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    """It may be of another run, which may be running, or of somebody else."""
    others = [JobEnd(number, ["a=1"], "finished", 0, str(Path(f"here/of_others/{number}"))) for number in (0, 7)]
    for end in others:
        end.write()
    Path("here/nobodys/.hydra/end.json").mkdir(parents=True)  # cannot be removed, nor read
    Path("here/.hydra").mkdir()
    Path("here/.hydra/end.json").touch()
    code, out, err = command(*argv, "output_dir=here")
    assert (code, err, [row[1] for row in rows(out)]) == (0, "", argv and ["optimizer.lr=0.1", "optimizer.lr=0.2"])
    assert [end for end in others if not Path(end.directory, ".hydra", "end.json").is_file()] == []


def test_an_end_that_cannot_be_removed_is_told(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    Path("here/.hydra/end.json").mkdir(parents=True)
    Path("swept/.ends/0.json").mkdir(parents=True)
    for directory, typed, name in (("here", [], ".hydra/end.json"), ("swept", ["-m", "seed=0,5"], ".ends/0.json")):
        code, _, err = command(*typed, f"output_dir={directory}")
        assert (code, ran) == (2, [])
        assert_only_told(err, Told(f"{directory}/{name}", "cannot be removed"))


@pytest.mark.parametrize(
    ("seed", "code", "err"),
    [
        pytest.param(2, 130, "autolaunch: ended by Ctrl-C\n", id="ctrl-c"),
        pytest.param(3, 143, "job 1 (seed=3) interrupted:\ninterrupted\n", id="sigterm"),
    ],
)
def test_a_signal_ends_the_sweep(
    seed: int, code: int, err: str, command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    outcome = command("-m", f"seed=0,{seed},5")
    assert (outcome[0], outcome[2]) == (code, err)
    assert [row[2] for row in rows(outcome[1])] == ["finished", "interrupted"]
    assert len(ran) == 2


def test_modules_of_the_working_directory_come_last(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    Path("my_net.py").write_text("class Net: ...\n")
    assert command("model=custom", "model._target_=my_net.Net")[0] == 0
    assert sys.path[-1] == str(Path.cwd())


@pytest.mark.parametrize(
    ("started", "argv", "told"),
    [
        pytest.param(2, ["mesh=2"], None, id="as-started"),
        pytest.param(6, ["mesh=-1", "data.batch_size=12"], None, id="what-was-started"),
        pytest.param(
            2,
            ["mesh=4"],
            Told("mesh=4", "4 ranks", "2 were started", allowed=("2 ranks", "-1"), write="mesh=2"),
            id="not-as-started",
        ),
        pytest.param(
            2,
            ["mesh=2", "launch.max_restarts=3"],
            Told(
                "launch.max_restarts=3",
                "torchrun or srun",
                allowed=("--max-restarts", "--requeue", "ckpt_path=last"),
                write="torchrun --max-restarts=3 ... -m autolaunch ... output_dir=outputs/one ckpt_path=last",
            ),
            id="restarts-by-somebody-else",
        ),
    ],
)
def test_ranks_of_torchrun(started: int, argv: list[str], told: Told | None, tmp_path: Path) -> None:
    from autolaunch.config.command_line import parse
    from autolaunch.config.compose import compose
    from autolaunch.jobs.run import resolve_job

    composed = compose(parse(argv))
    try:
        job = resolve_job(composed.config, composed.config.hydra, tmp_path, started, composed.origin)
        assert (job.world_size, told) == (started, None)
    except ConfigError as error:
        assert told is not None
        assert_only_told(error, told)


@pytest.mark.parametrize(
    ("seed", "status", "error"),
    [
        pytest.param(1, "failed", "rank 0 of 1 failed: ValueError: unlucky", id="failed"),
        pytest.param(3, "interrupted", "interrupted", id="interrupted"),
    ],
)
def test_a_run_that_cannot_say_how_it_ended_has_a_summary(
    seed: int, status: str, error: str, command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    Path("out").mkdir()
    Path("out/summary.json").write_text('{"status": "finished"}')  # of an earlier run
    command(f"seed={seed}", "output_dir=out", "mesh=2")
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["status"], summary["error"], summary["mesh"], summary["world_size"]) == (status, error, "2", 2)


def test_a_plan_is_repeated_except_for_what_is_chosen_anew(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    from autolaunch.report.plan_file import write_plan

    assert command("mesh=4", "dp=zero1", "optimizer.lr=0.5")[0] == 0
    first = ran[0][0]
    plan = write_plan(Path.cwd(), first.config, {"order": []}, first.choices)
    assert command(f"experiment={plan}", "dp=ddp", "mesh=2")[0] == 0
    again = ran[1][0]
    assert again.world_size == 2
    assert again.config["dp"]["sharding_level"] == 0
    assert again.config["optimizer"]["lr"] == 0.5
    assert command(f"experiment={plan}")[0] == 0
    assert {**ran[2][0].config, "output_dir": ""} == {**first.config, "output_dir": ""}


@pytest.mark.parametrize("argv", [[], ["launch=slurm"], ["-m", "seed=1,2"]], ids=["run", "slurm", "sweep"])
def test_a_directory_is_one_runs(
    argv: list[str], command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As long as it lasts."""
    sbatch = tmp_path / "bin" / "sbatch"  # whether or not this machine submits jobs
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/false\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    refused: list[str] = []

    def run(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
        with pytest.raises(ConfigError) as told:
            lock.take(Path("out"), "output_dir=out")
        refused.append(told.value.problem)
        return RunEnd("finished", 0)

    monkeypatch.setattr(start, "run", run)
    assert command(*argv, "output_dir=out", "trainer.accelerator=cpu")[0] == 0
    assert refused and all(f"process {os.getpid()} on" in problem for problem in refused)
    with lock.locked(Path("out"), "output_dir=out"):
        before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
        code, _, err = command(*argv, "output_dir=out", "trainer.accelerator=cpu")
        assert (code, len(refused)) == (2, 2 if "-m" in argv else 1)
        assert_told(
            err, "output_dir=out", "another run is in this directory", f"process {os.getpid()} on",
            allowed=("a directory of its own", "launch.wait=true, which starts when that run has ended"),
            write="launch.wait=true",
        )  # fmt: skip
        # Who only looks changes nothing.
        assert "another run" not in command("checkpoint", "verify", "out")[2]
        assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def save(directory: str) -> Path:
    """A whole checkpoint of an earlier run."""
    path = Path(directory, "checkpoints", "step_0000004.ckpt")
    path.mkdir(parents=True)
    write_manifest(path, 4, "1")
    return path


def log(directory: str, rows: str = "4,1.0\n", status: str = "finished") -> None:
    """What an earlier run has measured."""
    Path(directory).mkdir(exist_ok=True)
    Path(directory, "summary.json").write_text(json.dumps({"status": status}))
    Path(directory, "metrics.csv").write_text(f"step,loss\n{rows}")


@pytest.mark.parametrize(
    ("leave", "left", "write"),
    [
        (save, "checkpoints/step_0000004.ckpt", "autolaunch fit mesh=2 'output_dir=my run' 'name=a b' ckpt_path=last"),
        (log, "metrics.csv", "rm 'my run/metrics.csv'"),
    ],
)
def test_a_training_writes_over_no_other(
    leave: Callable[[str], object],
    left: str,
    write: str,
    command: Callable[..., Outcome],
    ran: list[tuple[ResolvedJob, bool]],
) -> None:
    leave("my run")
    before = {path: path.stat().st_mtime_ns for path in Path("my run").rglob("*")}
    elsewhere = save("elsewhere")
    for typed in ([], [f"ckpt_path={elsewhere}"]):
        code, _, err = command("fit", "mesh=2", *typed, "output_dir=my run", "name=a b")
        assert (code, ran) == (2, [])
        assert_told(err, "output_dir=my run", left, allowed=("another directory", "rm "), write="" if typed else write)
    after = {path: path.stat().st_mtime_ns for path in Path("my run").rglob("*") if path.name != lock.LOCK_FILE}
    assert after == before


def test_trainings_that_write_over_nothing(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    """They go on with what is there, or nothing is there that is worth something."""
    checkpoint = save("out")
    log("out")
    for typed in (["ckpt_path=last"], ["ckpt_path=out"], [f"ckpt_path={checkpoint}"], ["plan"]):
        assert command(*typed, "output_dir=out") == (0, "", "")
    log("begun", rows="")
    assert command("output_dir=begun") == (0, "", "")
    log("failed", status="failed")
    assert command("output_dir=failed") == (0, "", "")
    save("swept/0")
    assert command("-m", "seed=0,5", "output_dir=swept", "ckpt_path=last")[0] == 0
    assert len(ran) == 8


def test_a_run_that_is_killed_says_what_it_has_saved(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]], tmp_path: Path
) -> None:
    code, _, err = command("seed=6", "output_dir=out")
    assert code == 1
    killed, saved, line = err.splitlines()[-3:]
    assert killed.endswith("killed by SIGKILL") and saved.endswith("out/checkpoints/step_0000004.ckpt")
    assert line == f"to go on: the same command with output_dir={tmp_path}/out ckpt_path=last"
    assert "to go on" not in command("seed=1", "output_dir=other")[2]
    assert "to go on" not in command("seed=3", "output_dir=stopped")[2]
    assert command("seed=7", "output_dir=deleted")[2].splitlines()[-1].endswith("killed by SIGKILL")


def test_so_does_one_that_a_second_signal_ends_at_once(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]], tmp_path: Path
) -> None:
    code, _, err = command("seed=8", "output_dir=out")
    stopped, saved, line = err.splitlines()[:3]
    assert code == 130 and stopped == "stopped by Ctrl-C; every rank has ended"
    assert saved.endswith("out/checkpoints/step_0000004.ckpt")
    assert line == f"to go on: the same command with output_dir={tmp_path}/out ckpt_path=last"


def test_a_sweep_writes_over_no_other(command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]) -> None:
    save("swept/1")
    code, _, err = command("-m", "seed=0,5", "output_dir=swept")
    assert (code, ran) == (2, [])
    assert_told(
        err,
        "output_dir=swept/1",
        "checkpoints/step_0000004.ckpt",
        allowed=("another directory", "rm -r swept/1"),
        write="autolaunch -m seed=0,5 output_dir=swept ckpt_path=last",
    )
    assert command("-m", "seed=0", "output_dir=swept")[0] == 0  # a job fewer


def test_the_table_has_what_evaluations_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = []
    for number, summary in enumerate(({"loss": 2.5, "metrics": {}}, {"loss": None, "metrics": {"val_loss": 1.25}}, {})):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "summary.json").write_text(json.dumps(summary))
        ends.append(JobEnd(number, [f"seed={number}"], "finished", 0, str(directory)))
    print_table(ends, tmp_path, Terminal())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[3] for row in rows if row] == ["2.5000", "val_loss 1.2500", "-"]


def test_random_weights_are_said_where_figures_of_trained_ones_are_expected(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    checkpoint = save("run")
    said = "runs on random weights"
    for words, expected in ((["validate"], True), (["validate", f"ckpt_path={checkpoint}"], False), (["fit"], False)):
        code, _, err = command(*words, f"output_dir=out_{len(ran)}")
        assert code == 0 and (said in err) == expected, err


def test_predictions_of_two_runs_are_not_mixed(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    checkpoint = save("run")
    Path("out/predictions").mkdir(parents=True)
    assert command("predict", f"ckpt_path={checkpoint}", "output_dir=out")[0] == 0
    Path("out/predictions/batch_000000_part_00000.pt").touch()
    code, _, err = command("predict", f"ckpt_path={checkpoint}", "output_dir=out")
    assert (code, len(ran)) == (2, 1)
    told = Told("output_dir=out", "predictions", allowed=("another directory",), write="rm -r out/predictions")
    assert_only_told(err, told)


def test_the_jobs_of_a_sweep_have_their_directories_to_themselves(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]]
) -> None:
    Path("out/1").mkdir(parents=True)
    with lock.locked(Path("out/1"), "output_dir=out/1"):
        code, out, err = command("-m", "optimizer.lr=0.1,0.2,0.3", "output_dir=out")
        assert not Path("out/1/.hydra/end.json").exists()
    assert (code, [row[2] for row in rows(out)]) == (1, ["finished", "misconfigured", "finished"])
    assert_told(err, "output_dir=out/1", "another run", write="launch.wait=true", allowed=("a directory of its own",))


@pytest.mark.parametrize(("swept", "expected"), [("mesh=3,5", 2), ("mesh=1,3", 1)])
def test_a_sweep_of_nothing_but_mistakes_ends_as_one_mistake(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]], swept: str, expected: int
) -> None:
    assert command("-m", swept, "trainer.accelerator=cpu", "output_dir=out")[0] == expected


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (("optimizer.lr=0.5",), 2),
        (("optimizer.lr=0.5", "+module.rate=${optimizer.lr}"), 0),
        (("optimizer.lr=0.5", "+data.rate=${optimizer.lr}", "data=custom", "data._target_=json.JSONDecoder"), 0),
        (("optimizer.lr=0.5", "+module.rate=${oc.select:optimizer.lr}"), 0),
        (("optimizer.lr=0.5", "+module.rate=${optimizer.weight_decay}"), 2),
        (("model.size=1b", "+module.model=3", "+module.rate=${module.model}"), 2),
    ],
)
def test_what_a_module_refers_to_has_an_effect(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]], typed: tuple[str, ...], code: int
) -> None:
    assert command("module._target_=json.JSONDecoder", "output_dir=out", *typed)[0] == code
    assert len(ran) == (code == 0)


def test_waiting_for_a_directory(
    command: Callable[..., Outcome], ran: list[tuple[ResolvedJob, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("out").mkdir()
    held = lock.take(Path("out"), "output_dir=out")
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: lock.release(held))
    code, _, err = command("output_dir=out", "launch.wait=true")
    assert (code, len(ran)) == (0, 1)
    assert err.startswith(f"output_dir=out: waiting for process {os.getpid()} on ")


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_a_summary_says_finished_only_when_the_exit_code_is_0(
    status: str, command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names the failure that was the first, not what the first rank saw of it."""

    def run(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
        summary = {"status": status, "loss": 1.25, "error": "Connection closed by peer"}
        (job.output_dir / "summary.json").write_text(json.dumps(summary))
        return RunEnd("failed", 1, message="rank 1 of 2 failed: exit code 3")

    monkeypatch.setattr(start, "run", run)
    assert command("output_dir=out")[0] == 1
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary == {"status": "failed", "loss": 1.25, "error": "rank 1 of 2 failed: exit code 3"}


def test_a_job_that_was_interrupted_has_not_failed(tmp_path: Path) -> None:
    console = Console(file=(shown := io.StringIO()))
    print_table([JobEnd(0, [], "interrupted", 130, str(tmp_path))], tmp_path, console)
    assert "1 job, 0 failed, 1 interrupted, in" in shown.getvalue()


def test_the_table_has_whole_overrides_in_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(file=(shown := io.StringIO()), width=60)
    swept = [["mesh=2x2", "optimizer.lr=0.001"], ["mesh=1", "optimizer.lr=0.001"]]
    print_table(
        [JobEnd(n, items, "finished", 0, str(tmp_path / str(n))) for n, items in enumerate(swept)], tmp_path, console
    )
    print_table([JobEnd(0, swept[0], "finished", 0, str(tmp_path))], tmp_path, console)
    assert "mesh=2x2" in shown.getvalue() and "optimizer.lr=0.001" in shown.getvalue()
    assert all(len(line) <= 60 for line in shown.getvalue().splitlines()[2:5])
