"""Processes that are forked by `warm_server.py` instead of started anew, with what is needed of `subprocess.Popen`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests import ROOT

SERVER = "AUTOLAUNCH_TESTS_WARM"
"""The environment variable that says where the server is: `<process id>:<path of its socket>`."""


def start_server(*modules: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that forks; it imports nothing until somebody connects, then `modules`, too. Sets `SERVER`."""
    directory = tempfile.mkdtemp(prefix="warm")
    listener = socket.socket(socket.AF_UNIX)
    path = Path(directory) / "socket"
    listener.bind(str(path))
    listener.listen(64)
    paths = [str(ROOT / "launcher"), str(ROOT / "strategies"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_server", str(listener.fileno()), *modules],
        pass_fds=[listener.fileno()], env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.environ[SERVER] = f"{process.pid}:{path}"
    return process, listener


class Process:
    """A fork that runs a Python command line; killed when this process ends.

    Args:
        command: `[python, flags..., script | -m module | -c code, arguments...]`.
        env: all of its environment.
        stdin, stdout, stderr: files, descriptors, `subprocess.DEVNULL`, or None for this process's own.
        pass_fds: descriptors that it has under the same number.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        cwd: str | Path | None = None,
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.args, self.returncode = list(command), None
        words = {**_words(list(command)), "environment": env, "cwd": str(cwd or Path.cwd())}
        words["descriptors"] = [0, 1, 2, *pass_fds]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[SERVER].partition(":")[2])
        text = json.dumps(words).encode()
        with contextlib.ExitStack() as opened:
            descriptors: list[int] = []
            for number, stream in enumerate((stdin, stdout, stderr)):
                if stream == subprocess.DEVNULL:
                    descriptors.append(opened.enter_context(Path(os.devnull).open("r+b")).fileno())
                elif stream == subprocess.STDOUT:
                    descriptors.append(descriptors[1])
                elif stream is None or isinstance(stream, int):
                    descriptors.append(number if stream is None else stream)
                else:
                    descriptors.append(stream.fileno())
            head = struct.pack("!i", len(text))
            socket.send_fds(self._connection, [head], [*descriptors, *pass_fds])
            self._connection.sendall(text)
        pid = self._number(None)
        assert pid is not None, "the process that forks is gone"
        self.pid = pid

    returncode: int | None

    def _number(self, timeout: float | None) -> int | None:
        ready, _, _ = select.select([self._connection], [], [], timeout)
        if not ready:
            return None
        found = self._connection.recv(4, socket.MSG_WAITALL)
        return struct.unpack("!i", found)[0] if found else -signal.SIGKILL.value

    def poll(self) -> int | None:
        return self._ended(0)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._number(timeout)
            if self.returncode is not None:
                self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill it and all that it started in its session."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def _words(command: list[str]) -> dict[str, Any]:
    assert command[0] == sys.executable, command
    flags, rest = [], command[1:]
    while rest[0] in ("-P", "-u"):
        flags.append(rest.pop(0))
    if rest[0] in ("-m", "-c"):
        kind = {"-m": "module", "-c": "code"}[rest.pop(0)]
    else:
        kind = "script"
        assert not rest[0].startswith("-"), command
    return {"flags": flags, "kind": kind, "what": rest[0], "arguments": rest[1:]}


def start_worker(
    arguments: list[str], environment: dict[str, str], output: IO[bytes] | None, descriptors: tuple[int, ...]
) -> Any:
    """What `autolaunch.launch.local.start_worker` does, by a fork; the rank dies with the process that forks."""
    server = os.environ[SERVER].partition(":")[0]
    return Process(
        [sys.executable, "-P", "-u", "-m", "autolaunch.worker", *arguments, "--parent", server],
        env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=descriptors,
    )  # fmt: skip
