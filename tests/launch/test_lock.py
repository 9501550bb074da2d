"""One directory, one run: who holds it is told, the kernel drops the lock of the dead, and nobody guesses without."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autolaunch.launch import lock
from autolaunch_strategies.config import ConfigError
from tests.support.messages import assert_told

NAME = "output_dir=there"


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)


def holder_of(directory: Path, **changed: object) -> None:
    """Leave the file of a holder that is not this process."""
    descriptor = lock.take(directory, NAME)
    holder = json.loads((directory / lock.LOCK_FILE).read_text()) | changed
    lock.release(descriptor)
    (directory / lock.LOCK_FILE).write_text(json.dumps(holder))


def test_a_second_run_is_told_who_is_there(tmp_path: Path) -> None:
    with lock.locked(tmp_path, NAME):
        with pytest.raises(ConfigError) as told:
            lock.take(tmp_path, NAME)
        assert_told(
            told.value, NAME, f"process {os.getpid()} on {socket.gethostname()}", "since",
            write="launch.wait=true", allowed=("a directory of its own",),
        )  # fmt: skip
    with lock.locked(tmp_path, NAME):
        pass


def test_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = lock.take(tmp_path, NAME)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: lock.release(first))
    with lock.locked(tmp_path, NAME, wait=60.0):
        assert capsys.readouterr().err.count(f"waiting for process {os.getpid()}") == 1


def test_the_kernel_drops_the_lock_of_the_dead(tmp_path: Path) -> None:
    """Killed, and with a child of its own that lives on."""
    code = (
        "import os, sys, time; from pathlib import Path; from autolaunch.launch import lock\n"
        f"lock.take(Path({str(tmp_path)!r}), 'x')\n"
        "if not os.fork(): print(os.getpid(), flush=True)  # only now the child has let go of what it was born with\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} "):
            lock.take(tmp_path, NAME)
        process.kill()
        process.wait()
        os.kill(child, 0)  # it lives
        with lock.locked(tmp_path, NAME):
            pass
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_left_by_another_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel of the file system says that it is free."""
    holder_of(tmp_path, host="elsewhere", pid=7)
    with lock.locked(tmp_path, NAME):
        assert "taken over from process 7 on elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "free"),
    [
        pytest.param({}, False, id="alive"),
        pytest.param({"process": "another boot 1"}, True, id="a-later-process-of-its-number"),
        pytest.param({"pid": 2**22 + 1}, True, id="dead"),
        pytest.param({"host": "elsewhere", "pid": 2**22 + 1}, False, id="elsewhere"),
        pytest.param({"host": "elsewhere", "slurm_job": "7"}, True, id="elsewhere-before-this-start-of-the-job"),
        pytest.param({"host": "elsewhere", "slurm_job": "8"}, False, id="elsewhere-in-another-job"),
    ],
)
def test_without_locks_of_the_kernel(
    changed: dict[str, object], free: bool, tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder_of(tmp_path, **changed)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if free:
        lock.release(lock.take(tmp_path, NAME))
        return
    with pytest.raises(ConfigError) as told:
        lock.take(tmp_path, NAME)
    if "host" in changed:
        assert_told(
            told.value, NAME, "elsewhere", "can't be seen from here", write="launch.wait=true",
            allowed=(f"remove {tmp_path / lock.LOCK_FILE}",),
        )  # fmt: skip


def test_handed_over(tmp_path: Path) -> None:
    """By the process that submits a job, to the one that is its first rank; other directories stay locked."""
    (tmp_path / "other").mkdir()
    with lock.locked(tmp_path / "other", NAME), lock.locked(tmp_path, NAME):
        lock.hand_over(tmp_path)
        taken = lock.take(tmp_path, NAME)
        with pytest.raises(ConfigError):
            lock.take(tmp_path / "other", NAME)
    with pytest.raises(ConfigError):  # the end of the block lets go of nothing that is another's
        lock.take(tmp_path, NAME)
    lock.release(taken)


def test_a_directory_that_is_deleted_between_opening_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, seen = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        seen.append(descriptor)
        if len(seen) == 1:
            (tmp_path / lock.LOCK_FILE).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.locked(tmp_path, NAME), pytest.raises(ConfigError):
        lock.take(tmp_path, NAME)


def test_a_half_written_file_is_nobody(tmp_path: Path) -> None:
    (tmp_path / lock.LOCK_FILE).write_text('{"pid": 1')
    start = time.time()
    with lock.locked(tmp_path, NAME):
        holder = json.loads((tmp_path / lock.LOCK_FILE).read_text())
        assert holder["pid"] == os.getpid() and start - 1 < holder["started"] < start + 60
    assert (tmp_path / lock.LOCK_FILE).read_text() == ""
