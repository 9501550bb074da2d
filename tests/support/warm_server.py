"""One process that has imported what ranks and commands import, and forks them: `python -m tests.support.warm_server`.

A fork is as clean as a new process where a run can see it: environment, working directory, streams, arguments, session,
random numbers and exit code are its own; no thread and no process group existed before it. It shares the imports (which
take 5 to 8 seconds of processor time) and the seed of hashes with all other forks. It dies with whoever asked for it:
the connection over which it was asked for tells when that process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
FIRST_SPARE = 200
"""Descriptors from here on are free while those of a fork are put where they belong."""

PRELOADED = [
    "numpy", "torch", "torch.distributed", "torch.distributed.run", "torch._dynamo", "torch.distributed.pipelining",
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel",
    "torch.distributed._composable.replicate", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.tensor.experimental", "torch.optim", "torch.testing", "torch.utils.flop_counter",
    "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "lightning.pytorch",
    "lightning.pytorch.callbacks", "lightning.pytorch.demos.boring_classes", "lightning.fabric", "torchmetrics",
    "transformers", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto", "safetensors.torch",
    "hydra", "hydra._internal.hydra", "hydra.core.override_parser.overrides_parser", "omegaconf", "rich.live",
    "rich.progress", "rich.table",
]  # fmt: skip
"""What is imported beside every module of the two packages."""


def main(listener: socket.socket) -> None:
    """Serve until the process that started this one is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.select()
    _preload()
    ended: dict[int, tuple[int, socket.socket]] = {}
    """By descriptor of a fork: its id, and the connection over which it was asked for."""
    asked: dict[int, int] = {}
    """By descriptor of a connection: that of the fork."""
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) is not key:
                continue  # closed by what came before it in the same list; its number may be another's by now
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request = _receive(connection)
                if request is None:
                    connection.close()
                    continue
                words, descriptors = request
                pid = os.fork()
                if pid == 0:
                    _be(words, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                fork = os.pidfd_open(pid)
                ended[fork] = pid, connection
                asked[connection.fileno()] = fork
                selector.register(fork, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ)
                _send(connection, pid)
            elif key.fd in ended:
                pid, connection = ended.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                _send(connection, os.waitstatus_to_exitcode(status))
                if connection.fileno() in asked:
                    del asked[connection.fileno()]
                    selector.unregister(connection)
                connection.close()
            elif key.fd in asked:  # nobody waits for it any more
                pid, _ = ended[asked.pop(key.fd)]
                selector.unregister(key.fileobj)
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:  # it has not come to a session of its own
                    os.kill(pid, signal.SIGKILL)


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked is gone
        connection.sendall(struct.pack("!i", number))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """(what to run, its open files), or None if the other side went away."""
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
        (size,) = struct.unpack("!i", head)
        text = b""
        while len(text) < size:
            part = connection.recv(size - len(text))
            if not part:
                return None
            text += part
        return json.loads(text), descriptors
    except (OSError, struct.error):
        return None


def _preload() -> None:
    gc.disable()
    for name in (*sys.argv[2:], *PRELOADED):
        with contextlib.suppress(ImportError):  # this version has none, or it is not installed
            importlib.import_module(name)
    for package in ("autolaunch", "autolaunch_strategies"):
        package_directory = Path(importlib.import_module(package).__file__ or "").parent
        for file in sorted(package_directory.rglob("*.py")):
            parts = file.relative_to(package_directory.parent).with_suffix("").parts
            if parts[-1] != "__main__":
                importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all of it
    gc.enable()
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads: a fork would have one of them"


def _be(words: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become what was asked for, and end with its exit code."""
    try:
        _take_place(words, descriptors)
        code = _run(words)
    except BaseException:
        traceback.print_exc()
        code = 70
    _leave(code)


def _take_place(words: dict[str, Any], descriptors: list[int]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts
    spare = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE) for descriptor in descriptors]
    os.closerange(0, FIRST_SPARE)
    for descriptor, target in zip(spare, words["descriptors"], strict=True):
        os.dup2(descriptor, target)
    os.closerange(FIRST_SPARE, FIRST_SPARE + 200)
    unbuffered = "-u" in words["flags"]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process lives
    imported_with = sys.stderr
    sys.stdout = sys.__stdout__ = _stream(1, unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, True)
    for logger in (logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)):
        for handler in logger.handlers:
            if getattr(handler, "stream", None) is imported_with:  # Lightning's, of when it was imported
                handler.setStream(sys.stderr)
    os.chdir(words["cwd"])
    os.environ.clear()
    os.environ.update(words["environment"])
    import random

    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _stream(descriptor: int, unbuffered: bool) -> Any:
    lines = unbuffered or os.isatty(descriptor)
    return open(
        descriptor, "w", encoding="utf-8", errors="strict" if descriptor == 1 else "backslashreplace",
        buffering=1 if lines else -1, closefd=False,
    )  # fmt: skip


def _run(words: dict[str, Any]) -> int:
    arguments: list[str] = words["arguments"]
    kind, what = words["kind"], words["what"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"script": str(Path(what).parent), "module": words["cwd"], "code": ""}[kind]
    sys.path[:] = list(dict.fromkeys([*([] if "-P" in words["flags"] else [first]), *paths, *sys.path]))
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    _keep_warm(words)
    try:
        if kind == "script":
            main.__file__ = what
            sys.argv = [what, *arguments]
            code: Any = compile(Path(what).read_bytes(), what, "exec")
        elif kind == "module":
            spec = importlib.util.find_spec(what)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{what}.__main__")
            assert spec is not None and spec.origin is not None, f"no module {what}"
            main.__file__, main.__spec__, main.__package__ = spec.origin, spec, spec.name.rpartition(".")[0]
            sys.argv = [spec.origin, *arguments]
            code = compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
        else:
            sys.argv = ["-c", *arguments]
            code = compile(what, "<string>", "exec")
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _keep_warm(words: dict[str, Any]) -> None:
    """What this process starts of this kind is forked, too: the ranks of a command."""
    from autolaunch.launch import local
    from tests.support.warm import start_worker

    local.start_worker = start_worker


def _leave(code: int) -> NoReturn:
    """As the interpreter's own way out, without taking the imports apart."""
    import atexit

    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)


if __name__ == "__main__":
    from tests.support.warm_server import main as serve  # `__main__` is somebody else's in a fork

    serve(socket.socket(fileno=int(sys.argv[1])))
