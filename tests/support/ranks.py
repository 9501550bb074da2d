"""Starts processes for tests, most of them as forks of one that is warm, and reads what the ranks of a start wrote."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from tests import ROOT
from tests.support import warm

SOURCES = [str(ROOT / "launcher"), str(ROOT / "strategies"), str(ROOT)]
"""What a process needs on its path: the two packages and the tests."""

FATAL = "Fatal Python error"
"""How faulthandler begins."""
CRASH_WORDS = 600
"""Characters in front of that: what C++ wrote of an exception that nobody caught."""
STACK_SIGNAL = signal.SIGUSR2
"""Ranks of cases write their stacks when they get it."""
STACK_SECONDS = 1.0
INNERMOST = 13

STRANGERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
POLL_SECONDS = 0.02
FAREWELL_SECONDS = 0.5
"""How long the others of a group may still write what they have when a case has ended one of its ranks."""


def environment(**extra: str) -> dict[str, str]:
    """An environment without any other run's ranks in it."""
    kept = {key: value for key, value in os.environ.items() if key not in STRANGERS}
    path = os.pathsep.join([*SOURCES, kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


@dataclass(frozen=True)
class Ranks:
    """As many processes of one command line as torchrun starts with `--nproc-per-node`."""

    count: int
    command: tuple[str, ...]


def torchrun(count: int, *command: str) -> Ranks:
    """`count` ranks of a script, in the environment that torchrun gives them."""
    return Ranks(count, command)


def real_torchrun(count: int, *command: str) -> list[str]:
    """The command line that starts them by torchrun itself: seconds more for each rank and for torchrun."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *command]


def python(*command: str, count: int = 1) -> Ranks | list[str]:
    """A script on `count` ranks; on one it is a plain process, no rank of anything."""
    return torchrun(count, *command) if count > 1 else [sys.executable, *command]


def start(
    command: Sequence[str] | Ranks,
    timeout: float = 240,
    *,
    cold: bool = False,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python command lines to their end; whatever is left of them after `timeout` seconds is killed.

    Args:
        command: one line, or those of several ranks, of which one that fails ends all, as under torchrun.
        cold: in new processes, with all their imports.
        env: the environment instead of `environment(**extra)`.

    Raises:
        AssertionError: they took too long.
    """
    env = environment(**extra) if env is None else env
    with tempfile.TemporaryFile() as output:
        if isinstance(command, Ranks) and not (cold or warm.SERVER not in os.environ):
            code = _watch(*_ranks(command, env, cwd, output), timeout)
            words: Sequence[str] = command.command
        else:
            words = real_torchrun(command.count, *command.command) if isinstance(command, Ranks) else command
            code = _watch([_process(words, env, cwd, output, cold)], None, timeout)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code is None:
        raise AssertionError(f"not done after {timeout} s:\n{text[-4000:]}")
    return subprocess.CompletedProcess(list(words), code, text)


def _process(words: Sequence[str], env: dict[str, str], cwd: Path | None, output: IO[bytes], cold: bool) -> Any:
    if cold or warm.SERVER not in os.environ or words[0] != sys.executable:
        return subprocess.Popen(
            words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return warm.Process(words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _meeting(count: int) -> tuple[Any, dict[str, str]]:
    """(the store at which ranks meet, the variables that all of them have), as torchrun's agent would have it."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    size = str(count)
    return store, {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def _of_rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}


def _ranks(ranks: Ranks, env: dict[str, str], cwd: Path | None, output: IO[bytes]) -> tuple[list[Any], Any]:
    """(the processes, the store at which they meet)."""
    store, shared = _meeting(ranks.count)
    command = [sys.executable, "-u", *ranks.command]
    processes = [
        warm.Process(
            command, env={**env, **shared, **_of_rank(rank)}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output,
        )
        for rank in range(ranks.count)
    ]  # fmt: skip
    return processes, store


def _watch(processes: list[Any], store: Any, timeout: float) -> int | None:
    """The exit code of what failed first, 0 if nothing did, None after `timeout` seconds; nothing is left."""
    end = time.monotonic() + timeout
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed:
                return failed[0] if len(processes) == 1 else 1
            if all(code == 0 for code in codes):
                return 0
            if time.monotonic() > end:
                return None
            time.sleep(POLL_SECONDS)
    finally:
        _end(processes)
        del store  # until here: it ends with its last reference


def _end(processes: list[Any]) -> None:
    living = [process for process in processes if process.poll() is None]
    for process in living:  # all before any is waited for: the others would tell of connections that were closed
        process.kill() if isinstance(process, warm.Process) else os.killpg(process.pid, signal.SIGKILL)
    for process in living:
        process.wait()


class Group:
    """Cases of a script on some ranks: started when the first case is asked for, each case run when it is asked for.

    The script ends in `tests.support.cases.serve`. A case that raises may leave its ranks at different places: they
    end, and the next case runs in a new start.

    Args:
        script: the file of the cases.
        directory: where ranks write; made here.
        name: which of its groups.
        count: how many ranks; on one it is a plain process, no rank of anything.
        timeout: of one case, the start included, in seconds.
        farewell: how long the others may still write when a case has ended one of them, in seconds.
        cold: in new processes, with all their imports.
        extra: variables of the environment.
    """

    def __init__(
        self,
        script: Path,
        directory: Path,
        name: str,
        count: int,
        timeout: float = 270,
        farewell: float = FAREWELL_SECONDS,
        cold: bool = False,
        **extra: str,
    ) -> None:
        self.cold = cold
        self.script, self.directory, self.name, self.count = script, directory, name, count
        self.timeout, self.farewell, self.extra = timeout, farewell, extra
        directory.mkdir(parents=True)
        self._log = (directory / "log").open("w+b")
        self._processes: list[Any] = []
        self._orders: list[IO[str]] = []
        self._store: Any = None
        self._done: set[str] = set()
        self._broken_off: dict[str, list[str]] = {}
        """By case what ended it before all ranks had written."""

    def read(self, case: str, rank: int = 0) -> Any:
        """What the case returned on a rank. Fails with the traceback of the first rank on which it raised."""
        written = self._written(case)
        raised = {number: item for number, item in written.items() if "error" in item}
        if raised:  # what was raised first: tracebacks are long, and logs are cut
            errors = [f"rank {number}: {item['error']}" for number, item in raised.items()]
            silent = sorted({*range(self.count)} - {*written})
            came = f"nothing came from ranks {silent}:\n{self._last_words(case)}" if silent else "every rank answered"
            traces = [f"rank {number}:\n{item['traceback']}" for number, item in raised.items()]
            raise AssertionError("\n".join([*errors, came, *traces]))
        assert rank in written, f"{case} has no result on rank {rank}:\n{self._last_words(case)}"
        return written[rank]["result"]

    def read_all(self, case: str) -> list[Any]:
        """What the case returned on each rank."""
        return [self.read(case, rank) for rank in range(self.count)]

    def message(self, case: str, rank: int = 0) -> str:
        """The exception that the case raised on a rank: its type and message."""
        written = self._written(case)
        assert rank in written, f"{case} has no result on rank {rank}:\n{self._last_words(case)}"
        assert "error" in written[rank], f"{case} raised nothing on rank {rank}"
        return written[rank]["error"]

    def outcome(self, case: str) -> dict[int, dict[str, Any]]:
        """What each rank wrote that came to an end: `result`, or `error` and `traceback`."""
        return self._written(case)

    def close(self) -> None:
        """End the ranks."""
        for stream in self._orders:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        _end(self._processes)
        self._processes, self._orders, self._store = [], [], None

    def _written(self, case: str) -> dict[int, dict[str, Any]]:
        if case not in self._done:
            self._done.add(case)
            self._run(case)
        return self._results(case)

    def _results(self, case: str) -> dict[int, dict[str, Any]]:
        """By rank, that of the one that wrote first in front: what it says is the cause of what the others say."""
        files = [(rank, file) for rank in range(self.count) if (file := self._file(case, rank)).exists()]
        files.sort(key=lambda item: item[1].stat().st_mtime_ns)
        return {rank: _read(file) for rank, file in files}

    def _file(self, case: str, rank: int) -> Path:
        return self.directory / f"{case}.{rank}.json"

    def _last_words(self, case: str) -> str:
        """What ended a case before all ranks had come to an end, and what they have printed last."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        # of a crash faulthandler says where each thread stood, C++ why before it; tracebacks of the others come later
        before, *stacks = text.split(FATAL)
        crashes = []
        for stack in stacks:
            crashes.append(before[-CRASH_WORDS:] + FATAL + stack.partition("Extension modules")[0][:2000])
            before = stack
        crashes = crashes[-3:]
        return "\n".join([*self._broken_off.get(case, []), *crashes, "...", text[-4000:]])

    def _where_all_stand(self) -> list[str]:
        """The innermost frames of ranks that are not done in time, before they are killed."""
        for process in self._processes:
            process.send_signal(STACK_SIGNAL)
        time.sleep(STACK_SECONDS)
        lines = []
        for rank in range(self.count):
            file = self.directory / f".stack.{rank}"
            frames = file.read_text(errors="replace").splitlines() if file.exists() else []
            lines += [f"rank {rank} stands at", *frames[1:INNERMOST]]
        return lines

    def _run(self, case: str) -> None:
        if any(process.poll() is not None for process in self._processes):
            self.close()
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for stream in self._orders:
            stream.write(f"{case}\n")
            stream.flush()
        end = time.monotonic() + self.timeout
        while not all(self._file(case, rank).exists() for rank in range(self.count)):
            if self._ended():
                time.sleep(self.farewell)
                self._broken_off[case] = [
                    f"rank {rank} ended with {_end_of(code)}" for rank, code in self._ended().items()
                ]
                self.close()
                break
            if time.monotonic() > end:
                self._broken_off[case] = [f"not done after {self.timeout} s, so killed", *self._where_all_stand()]
                self.close()
                break
            time.sleep(POLL_SECONDS / 4)
        if any("error" in item for item in self._results(case).values()):
            self.close()
        self._signal(signal.SIGSTOP)  # gloo's threads would wake a hundred times a second until the next case

    def _ended(self) -> dict[int, int]:
        return {rank: code for rank, each in enumerate(self._processes) if (code := each.poll()) is not None}

    def _signal(self, signum: int) -> None:
        for process in self._processes if self.count > 1 else ():
            if isinstance(process, warm.Process):  # it ends with this process, stopped or not
                process.send_signal(signum)

    def _start(self) -> None:
        command = [sys.executable, "-u", str(self.script), str(self.directory), self.name]
        env, shared = environment(**self.extra), {}
        if self.count > 1:
            self._store, shared = _meeting(self.count)
        start: Any = functools.partial(subprocess.Popen, start_new_session=True)
        if warm.SERVER in os.environ and not self.cold:
            start = warm.Process
        for rank in range(self.count):
            own = _of_rank(rank) if self.count > 1 else {}
            reading, writing = os.pipe()
            self._processes.append(
                start(command, env={**env, **shared, **own}, stdin=reading, stdout=self._log, stderr=self._log)
            )
            os.close(reading)
            self._orders.append(os.fdopen(writing, "w"))


GroupOf = Callable[..., Group]
"""The fixture `group_of`: (script, name of the group, ranks, **environment) -> Group."""


def _end_of(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _read(file: Path) -> dict[str, Any]:
    if file.read_bytes()[:2] != b"PK":
        return json.loads(file.read_text())
    import torch

    return torch.load(file, weights_only=False)


def differences(expected: Any, found: Any, tolerance: float, where: str = "") -> list[str]:
    """Where two JSON values differ: numbers by more than `tolerance` (relative above 1, absolute below)."""
    if isinstance(expected, dict) and isinstance(found, dict):
        both = [(f"{where}.{key}", expected[key], found[key]) for key in expected if key in found]
        lines = [f"{where}.{key} is only on one side" for key in expected.keys() ^ found.keys()]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        both = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(expected, found, strict=True))]
        lines = []
    elif isinstance(expected, float) and isinstance(found, float | int):
        close = math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
        return [] if close else [f"{where}: {expected} and {found}"]
    else:
        return [] if expected == found else [f"{where}: {expected!r} and {found!r}"]
    return lines + [line for place, mine, theirs in both for line in differences(mine, theirs, tolerance, place)]


def problems(expected: Group, found: Group, case: str, other: str, tolerance: float) -> list[str]:
    """Where a case on several ranks differs from the one process: what all ranks know, and what only rank 0 does."""
    one, lines = expected.read(case), []
    for rank, result in enumerate(found.read_all(other)):
        for part in ("everywhere", "first") if rank == 0 else ("everywhere",):
            there = differences(one.get(part), result.get(part), tolerance, f" {part}")
            lines += [f"rank {rank} {line}" for line in there]
    return lines


def went_on(expected: Any, resumed: Group, case: str, tolerance: float) -> list[str]:
    """Where a resumed second epoch differs from that of the run that nobody interrupted, on any rank.

    Args:
        expected: what `pipeline.cases.table` said of both epochs.
    """
    steps = len(expected["first"]["losses"]) // 2
    lines = []
    for rank, found in enumerate(resumed.read_all(case)):
        for name in ("norms", "reported", "rates"):
            lines += differences(expected["everywhere"][name][steps:], found["everywhere"][name], tolerance, name)
        for name in ("weights", "metrics", "step"):
            lines += differences(expected["everywhere"][name], found["everywhere"][name], tolerance, name)
        if rank == 0:
            lines += differences(expected["first"]["losses"][steps:], found["first"]["losses"], tolerance, "losses")
    return lines
