"""Local runs end as they should: by themselves, by a failure, by a person, by a kill; and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autolaunch.job import ResolvedJob
from autolaunch.launch.end import RunEnd
from autolaunch.launch.failure import Exit, describe, first_failure, is_peer_lost, write_failure
from autolaunch_strategies.config import ConfigError
from tests import ROOT
from tests.support import warm

pytestmark = pytest.mark.timeout(180)

TASKS = textwrap.dedent("""
    import logging, os, signal, sys, threading, time
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    def say(job, place):
        logging.getLogger("autolaunch.test").info("record of rank %d", place.rank)
        print(f"line of rank {place.rank}, tty {sys.stdout.isatty()}", flush=True)
        print(f"error line of rank {place.rank}", file=sys.stderr, flush=True)

    def boom(job, place):
        dist.barrier()
        if place.rank == 2:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))

    def wrong_config(job, place):
        from autolaunch_strategies.config import ConfigError
        raise ConfigError("model.size=9b", "there is no such size")

    def segfault(job, place):
        dist.barrier()
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.all_reduce(torch.ones(1))

    def killed(job, place):
        dist.barrier()
        if place.rank == 1:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    def exit_3(job, place):
        dist.barrier()
        if place.rank == 1:
            sys.exit(3)
        dist.all_reduce(torch.ones(1))

    def leave_early(job, place):
        dist.barrier()
        if place.rank == 1:
            os._exit(0)
        time.sleep(600)

    def stubborn(job, place):
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        dist.barrier()
        if place.rank == 1:
            raise ValueError("boom")
        time.sleep(600)

    def hang(job, place):
        dist.barrier()
        if place.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    class Slow(Dataset):
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            if index > 2:
                time.sleep(600)
            return index

    def load(job, place):
        data = iter(DataLoader(Slow(), batch_size=1, num_workers=1))
        next(data)
        dist.barrier()
        if place.rank == 0:
            (job.output_dir / "loading").touch()
        for _ in data:
            pass

    def stubborn_wait(job, place):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        dist.barrier()
        if place.rank == 0:
            (job.output_dir / "loading").touch()
        time.sleep(600)

    def alone(job, place):
        assert not dist.is_initialized()
        (job.output_dir / "parent").write_text(str(os.getppid()))

    def alone_wait(job, place):
        (job.output_dir / "loading").touch()
        time.sleep(600)

    def alone_boom(job, place):
        raise ValueError("boom")
""")

DRIVER = textwrap.dedent("""
    import dataclasses, json, sys
    from pathlib import Path
    from autolaunch.job import ResolvedJob
    from autolaunch.jobs.start import run

    end = run(ResolvedJob.read(sys.argv[1]), isolated=bool(sys.argv[2:]))
    Path(sys.argv[1]).with_name("end.json").write_text(json.dumps(dataclasses.asdict(end)))
    sys.exit(end.exit_code)
""")


def working_in(directory: Path) -> list[int]:
    """The processes whose working directory is this one, or below it: all of a run, its loaders included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(directory):
                    found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Launcher:
    """Starts runs of the tasks above through a small program of its own."""

    def __init__(self, directory: Path) -> None:
        self.out = directory / "out"
        self.directory = directory
        (directory / "launch_tasks.py").write_text(TASKS)
        (directory / "driver.py").write_text(DRIVER)
        path = os.pathsep.join([str(ROOT / "launcher"), str(ROOT / "strategies"), str(directory)])
        self.env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def command(self, task: str, ranks: int, *, isolated: bool = False, **launch: object) -> list[str]:
        settings = {
            "name": "local",
            "max_restarts": 0,
            "min_devices": None,
            "logs": "rank0",
            "start_timeout": 60.0,
            "stop_timeout": 5.0,
            "hang_timeout": 60.0,
        }
        settings |= {"first_step_timeout": 60.0} | launch
        config = {
            "task": task if ":" in task else f"launch_tasks:{task}",
            "trainer": {"accelerator": "cpu"},
            "launch": settings,
        }
        job = ResolvedJob(config, self.out, ranks, [], "0").write()
        return [sys.executable, str(self.directory / "driver.py"), str(job), *(["isolated"] if isolated else [])]

    def run(self, task: str, ranks: int, *, cold: bool = False, **launch: object) -> subprocess.CompletedProcess[str]:
        """Run a task to its end, by processes that are warm where they can be."""
        command = self.command(task, ranks, **launch)
        start: Any = warm.Process if warm.SERVER in os.environ and not cold else subprocess.Popen
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = start(command, env=self.env, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            try:
                code = process.wait(150)
            finally:
                process.kill()
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode())
        return subprocess.CompletedProcess(command, code, *texts)

    def start(self, task: str, ranks: int, **launch: object) -> subprocess.Popen[bytes]:
        command = self.command(task, ranks, **launch)
        # A process group of its own, so that a signal meant for it reaches no one else.
        process = subprocess.Popen(command, env=self.env, cwd=self.directory, start_new_session=True)
        assert wait_until((self.out / "loading").exists), "the task did not begin"
        return process

    def end(self) -> RunEnd:
        return RunEnd(**json.loads((self.out / ".hydra" / "end.json").read_text()))

    def log(self, rank: int) -> str:
        return (self.out / "logs" / f"rank_{rank}.log").read_text()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    wait_until(lambda: not working_in(tmp_path), 3)
    left = working_in(tmp_path)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"still alive after the test: {left}"


def test_rank_that_failed_first_is_named(launcher: Launcher) -> None:
    for _ in range(3):
        assert launcher.run("boom", 4).returncode == 1
        message = re.sub(r"\n\d more ranks? failed after it$", "", launcher.end().message)
        assert message == (
            "rank 2 of 4 failed: ValueError: boom\n"
            "Traceback (most recent call last):\n"
            f'  File "{launcher.directory}/launch_tasks.py", line 15, in boom\n'
            '    raise ValueError("boom")\n'
            "ValueError: boom\n"
            f"log: {launcher.out}/logs/rank_2.log"
        )
    assert "autolaunch/worker.py" in launcher.log(2), "the log has the whole traceback"


def test_wrong_config_found_by_a_rank_is_one_message(launcher: Launcher) -> None:
    assert launcher.run("wrong_config", 2).returncode == 2
    assert launcher.end().message == "model.size=9b: there is no such size"


@pytest.mark.parametrize(
    ("task", "error", "details"),
    [
        pytest.param("segfault", "killed by SIGSEGV", "Fatal Python error: Segmentation fault", id="segfault"),
        pytest.param("killed", "killed by SIGKILL (out of memory?)", "last words", id="SIGKILL"),
        pytest.param("exit_3", "SystemExit: 3", "in exit_3\n    sys.exit(3)", id="sys.exit"),
        pytest.param("leave_early", "it left with exit code 0 before its task was done", "", id="leaves early"),
        pytest.param("stubborn", "ValueError: boom", "in stubborn", id="another ignores signals"),
    ],
)
def test_ways_to_fail(launcher: Launcher, task: str, error: str, details: str) -> None:
    assert launcher.run(task, 2, stop_timeout=2.0).returncode == 1
    end = launcher.end()
    assert end.status == "failed"
    assert end.message.splitlines()[0] == f"rank 1 of 2 failed: {error}"
    assert details in end.message


def test_lost_contact_shows_where_the_others_are(launcher: Launcher) -> None:
    assert launcher.run("hang", 2, first_step_timeout=2.0).returncode == 1
    message = launcher.end().message
    assert message.startswith("rank 0 of 2 failed: another rank did not come to a collective within 2 s (launch.coll")
    assert "this rank only lost contact with another; no rank wrote down an error of its own" in message
    assert re.search(r"where the ranks are:\n  rank 1 \(starting\), busy: .*/launch_tasks\.py:\d+ in hang\n", message)
    assert re.search(r'stack of rank 1 .*\n  File ".*/launch_tasks\.py", line \d+ in hang\n', message)


def test_hung_start_says_who_and_where(launcher: Launcher) -> None:
    # A module that never finishes importing stands for a file server that hangs.
    (launcher.directory / "torch.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n    print('waiting', flush=True)\n    time.sleep(600)\n"
        f"sys.path.remove({str(launcher.directory)!r})\ndel sys.modules['torch']\nimport torch\n"
    )
    assert launcher.run("say", 2, cold=True, start_timeout=6.0).returncode == 1
    end = launcher.end()
    assert end.status == "timed_out"
    assert end.message.startswith(
        "2 of 2 ranks had not begun the task after 6 s (launch.start_timeout):\n"
        "  rank 0: connected\n"
        "  rank 1: started\n"
        "where rank 1 is:\n"
    )
    assert f'File "{launcher.directory}/torch.py", line 4 in <module>' in end.message
    assert end.message.endswith(f"the end of its log:\nwaiting\nlog: {launcher.out}/logs/rank_1.log")


@pytest.mark.parametrize(
    ("task", "ranks", "signum", "code"),
    [
        pytest.param("load", 2, signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param("alone_wait", 1, signal.SIGTERM, 143, id="SIGTERM alone"),
        pytest.param("load", 2, signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.full),
        pytest.param("alone_wait", 1, signal.SIGINT, 130, id="Ctrl-C alone", marks=pytest.mark.full),
    ],
)
def test_signal_ends_everything(launcher: Launcher, task: str, ranks: int, signum: signal.Signals, code: int) -> None:
    process = launcher.start(task, ranks)
    os.killpg(process.pid, signum)
    assert process.wait(15) == code
    assert launcher.end().status == "interrupted"
    assert not working_in(launcher.directory)


def test_second_ctrl_c_does_not_wait(launcher: Launcher) -> None:
    process = launcher.start("stubborn_wait", 2, stop_timeout=600.0)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(15) == 130


def test_kill_of_the_parent_leaves_no_orphan(launcher: Launcher) -> None:
    process = launcher.start("load", 2)
    assert wait_until(lambda: len(working_in(launcher.directory)) >= 5), "a parent, two ranks and a loader each"
    process.kill()
    process.wait()
    assert wait_until(lambda: not working_in(launcher.directory), 15), "ranks or their loaders outlive the parent"


def test_user_code_in_the_working_directory(launcher: Launcher) -> None:
    project = launcher.directory / "project"
    project.mkdir()
    (project / "project_task.py").write_text("def work(job, place):\n    print('found', flush=True)\n")
    (project / "json.py").write_text("raise SystemExit('a file of the user shadows a package')\n")
    command = launcher.command("project_task:work", 2)
    run = subprocess.run(command, env=launcher.env, cwd=project, capture_output=True, text=True, timeout=150)
    assert (run.returncode, run.stdout, launcher.log(1)) == (0, "found\n", "found\n")


def test_logs(launcher: Launcher) -> None:
    run = launcher.run("say", 2)
    assert run.returncode == 0, run.stderr
    assert launcher.end() == RunEnd("finished", 0)
    assert run.stdout.splitlines() == ["line of rank 0, tty False"]
    assert run.stderr.splitlines() == ["record of rank 0", "error line of rank 0"]
    assert re.fullmatch(r"\S+ \S+ INFO autolaunch\.test: record of rank 0\n", launcher.log(0))
    assert launcher.log(1).splitlines() == ["record of rank 1", "line of rank 1, tty False", "error line of rank 1"]


def test_logs_of_all_ranks(launcher: Launcher) -> None:
    run = launcher.run("say", 2, logs="all")
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        lines = [f"record of rank {rank}", f"line of rank {rank}, tty False", f"error line of rank {rank}"]
        shown = [line for line in run.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert shown == [f"[rank {rank}] {line}" for line in lines]
        assert launcher.log(rank).splitlines() == lines


def test_rank_0_keeps_the_terminal(launcher: Launcher) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        launcher.command("say", 2), env=launcher.env, cwd=launcher.directory, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # what a terminal says when nobody has it open any more
        while part := os.read(ours, 4096):
            text += part
    os.close(ours)
    assert process.wait() == 0
    assert b"line of rank 0, tty True" in text


@pytest.mark.parametrize("isolated", [False, True])
def test_single_rank(launcher: Launcher, isolated: bool) -> None:
    """In a fork, which has no start-up, or in a process of its own."""
    if isolated:
        command = launcher.command("say", 1, isolated=True)
    else:
        command = launcher.command("alone", 1)
    process = subprocess.Popen(command, env=launcher.env, cwd=launcher.directory)
    assert process.wait() == 0
    assert isolated or (launcher.out / "parent").read_text() == str(process.pid)
    assert (launcher.out / "logs" / "phase_0").exists() == isolated


def test_failure_of_a_single_rank(launcher: Launcher) -> None:
    assert launcher.run("alone_boom", 1).returncode == 1
    assert launcher.end().message.splitlines()[0] == "the run failed: ValueError: boom"


# --- who failed first, without processes --------------------------------------------------------------------------


def raised(error: BaseException, during: BaseException | None = None) -> BaseException:
    try:
        if during is None:
            raise error
        try:
            raise during
        finally:
            raise error
    except BaseException as caught:
        return caught


def peer() -> RuntimeError:
    return RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:48521")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(raised(peer()), True, id="gloo"),
        pytest.param(raised(RuntimeError("NCCL error: ncclRemoteError: remote process exited")), True, id="nccl"),
        pytest.param(raised(RuntimeError("wait timeout after 50ms, keys: /a/x")), True, id="store"),
        pytest.param(
            raised(RuntimeError("training_step failed on the last pipeline stage: KeyError: 'x'")), True, id="a stage"
        ),
        pytest.param(raised(ConnectionResetError("Connection reset by peer")), False, id="a download of the user's"),
        pytest.param(raised(RuntimeError("shapes differ")), False, id="any other"),
        pytest.param(raised(peer(), ValueError("boom")), False, id="while cleaning up after its own"),
        pytest.param(raised(KeyError("x"), peer()), True, id="an error that follows from it"),
    ],
)
def test_peer_lost(error: BaseException, expected: bool) -> None:
    assert is_peer_lost(error) == expected


def test_first_failure_order(tmp_path: Path) -> None:
    def exited(code: int, time_ns: int, *, stopped: bool = False, done: bool = False) -> Exit:
        return Exit(code, pid=1, time_ns=time_ns, stopped=stopped, done=done)

    assert first_failure(tmp_path, {0: exited(0, 1, done=True), 1: exited(-1, 1, stopped=True)}, 2) is None
    write_failure(describe(peer(), tmp_path, 0, 4), tmp_path)
    late = time.time_ns() + 10**9
    found = first_failure(tmp_path, {2: exited(-11, late), 3: exited(-1, 1, stopped=True)}, 4)
    assert found is not None
    assert (found.rank, found.error, found.others) == (2, "killed by SIGSEGV", 1)
    write_failure(describe(ConfigError("a=1", "is wrong", write="a=2"), tmp_path, 1, 4), tmp_path)
    found = first_failure(tmp_path, {2: exited(-11, late)}, 4)
    assert found is not None and found.exit_code == 2
    assert found.render() == "a=1: is wrong\n  write:   a=2"
