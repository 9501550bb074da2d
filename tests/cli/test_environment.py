"""Names, places, disks, streams and variables of the environment: a run works there, or one message says why not.

No case may end in a traceback of ours.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autolaunch import cli
from autolaunch.jobs import start
from autolaunch.launch import lock
from tests.support.ranks import environment, torchrun
from tests.support.ranks import start as run_to_end
from tests.support.tiers import tiered

pytestmark = pytest.mark.timeout(240)

TINY = (
    *("model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=32", "model.num_heads=2"),
    *("model.num_kv_heads=2", "data=synthetic", "data.seq_len=8", "data.batch_size=2", "trainer.max_steps=2"),
    *("trainer.accelerator=cpu", "mesh=1"),
)
OWN = textwrap.dedent("""
    import os
    import shutil
    import lightning as L


    class Does(L.Callback):
        "Runs code after the first step."

        def __init__(self, code):
            self.code = code

        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 1:
                exec(self.code, {"os": os, "shutil": shutil, "trainer": trainer})


    class Fills(Does):
        "Fills a disk, with code that ends in an error."

        def on_train_batch_end(self, *args):
            try:
                super().on_train_batch_end(*args)
            except OSError:
                pass
""")


def does(code: str) -> str:
    return f'callbacks.does={{_target_: own.Does, code: "{code}"}}'


WITHOUT_CAPABILITIES = """
import ctypes, os
if os.geteuid() == 0:  # root may write everywhere
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, data) == 0
"""


def _file(name: str) -> Callable[[Path], None]:
    return lambda here: (here / name).write_text("")


def _directory(name: str, mode: int = 0o755) -> Callable[[Path], None]:
    def make(here: Path) -> None:
        (here / name).mkdir(parents=True)
        (here / name).chmod(mode)

    return make


def _link(name: str, target: str) -> Callable[[Path], None]:
    return lambda here: (here / name).symlink_to(target)


# --- refused before anything starts --------------------------------------------------------------------------------

REFUSED = [
    pytest.param(arguments, prepare, says, id=name)
    for name, arguments, prepare, says in (
        ("a-number", ["output_dir=123"], None, ["output_dir=123", "output_dir=./123"]),
        ("a-fraction", ["output_dir=1.50"], None, ["output_dir=1.50", "output_dir=./1.50"]),
        ("a-truth", ["output_dir=true"], None, ["output_dir=true", "output_dir=./true"]),
        ("a-list", ["output_dir=[a]"], None, ["output_dir=[a]", "a directory"]),
        ("empty", ["output_dir="], None, ["output_dir=", "names nothing"]),
        ("blanks", ["output_dir=' '"], None, ["names nothing"]),
        ("a-quote", ["output_dir=it's"], None, ["output_dir=it's", shlex.quote("output_dir=\"it's\"")]),
        ("a-comma", ["output_dir=a,b"], None, ["several values", "-m"]),
        ("an-equals-sign", ["output_dir=a=b"], None, None),
        ("nobodys-home", ['output_dir="~nobody_of_this_name/x"'], None, ["no home directory"]),
        ("a-file", ["output_dir=there"], _file("there"), ["output_dir=there", "is a file"]),
        ("below-a-file", ["output_dir=there/x"], _file("there"), ["output_dir=there/x"]),
        ("too-long", [f"output_dir={'x' * 300}"], None, ["File name too long"]),
        ("a-device", ["output_dir=/dev/null"], None, ["output_dir=/dev/null"]),
        ("no-disk", ["output_dir=/proc/x"], None, ["output_dir=/proc/x"]),
        ("a-link-to-nothing", ["output_dir=there"], _link("there", "away/x"), None),
        ("logs-are-a-file", ["output_dir=run"], lambda here: (_directory("run")(here), _file("run/logs")(here)),
         ["run/logs", "is a file"]),
        ("checkpoints-are-a-file", ["output_dir=run"],
         lambda here: (_directory("run")(here), _file("run/checkpoints")(here)), ["run/checkpoints", "is a file"]),
        ("ends-of-jobs-are-a-file", ["-m", "output_dir=run", "seed=0,5"],
         lambda here: (_directory("run")(here), _file("run/.ends")(here)), ["run/.ends", "is a file"]),
        ("metrics-are-a-directory", ["output_dir=run"], _directory("run/metrics.csv"),
         ["run/metrics.csv", "is a directory"]),
        ("no-such-checkpoint", ["ckpt_path=~/nowhere.ckpt"], None, ["nowhere.ckpt"]),
        ("interval", ["-m", "optimizer.lr=interval(0.001,0.1)"], None, ["interval", "-m search=optuna"]),
    )
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "prepare", "says"), REFUSED)
def test_refused(
    arguments: list[str],
    prepare: Callable[[Path], object] | None,
    says: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`says` None: it works, or one message says why not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "run", lambda job, isolated=False: start.RunEnd("finished", 0))
    if prepare is not None:
        prepare(tmp_path)
    code = cli.run([*arguments, *TINY]) if arguments[0] != "-m" else cli.run(["-m", *arguments[1:], *TINY])
    screen = capfd.readouterr().err
    print(screen)
    assert "Traceback" not in screen
    assert code in ((2,) if says is not None else (0, 2)), screen
    for fact in says or []:
        assert fact in screen


# --- run in a process of their own ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A command, the environment that it meets, and what becomes of it."""

    arguments: tuple[str, ...] = ("output_dir=run",)
    before: str = ""
    """Code of the process before the command."""
    prepare: Callable[[Path], object] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Variables that are not there."""
    code: int = 0
    says: tuple[str, ...] = ()
    leaves: str | None = "run/summary.json"
    disk: int | None = None
    """Size of the disk on which `run` is, in bytes."""
    status: str = "finished"
    """What the file that it leaves says."""


def closed(*numbers: int) -> str:
    """As `>&-` does: Python then has None for the stream."""
    names = ("stdin", "stdout", "stderr")
    return "".join(f"os.close({number}); sys.{names[number]} = sys.__{names[number]}__ = None\n" for number in numbers)


def onto(path: str, *numbers: int) -> str:
    return "".join(f"os.dup2(os.open({path!r}, os.O_WRONLY), {number})\n" for number in numbers)


def limited(size: int) -> str:
    """As a disk of this size for every file."""
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"


def works(name: str) -> Case:
    return Case((f'output_dir="{name}"',), leaves=f"{name}/summary.json")


RUN = ("output_dir=run",)
LONG = (*RUN, "trainer.max_steps=100000")
FILLS = does("open('run/filler', 'wb').write(b'x' * 10_000_000)").replace("own.Does", "own.Fills")
HANGS_UP = does("import json; trainer.is_global_zero and os.kill(json.load(open('run/.lock'))['pid'], 1)")
"""Sends a signal to the process that holds the lock: the command's own."""

CASES = {
    "home": Case(('output_dir="~/x y"',), variables={"HOME": "."}, leaves="x y/summary.json"),
    "unicode": works("größe_训练_🚀"),
    "spaces": works("a b  c"),
    "single-quote": works("it's"),
    "double-quote": Case(("output_dir='say \"x\"'",), leaves='say "x"/summary.json'),
    "brackets": works("a[1](2){3}"),
    "a-dollar": works("a$HOME"),
    "dashes": works("--x"),
    "dots": Case(("output_dir=a/../b",), leaves="b/summary.json"),
    "deep": Case(("output_dir=a/b/c/d",), leaves="a/b/c/d/summary.json"),
    "hydra-home": Case(('hydra.run.dir="~/x"',), variables={"HOME": "."}, leaves="x/summary.json"),
    "read-only": Case(
        before=WITHOUT_CAPABILITIES, prepare=_directory("run", 0o555), code=2, says=("output_dir=run", "Permission"),
        leaves=None,
    ),
    "read-only-parent": Case(
        ("output_dir=there/run",), before=WITHOUT_CAPABILITIES, prepare=_directory("there", 0o555), code=2,
        says=("output_dir=there/run", "Permission denied"), leaves=None,
    ),
    "read-only-logs": Case(
        before=WITHOUT_CAPABILITIES, prepare=_directory("run/logs", 0o555), code=2, says=("run/logs",), leaves=None
    ),
    "full-at-the-start": Case(disk=0, code=2, says=("output_dir=run", "No space left on device"), leaves=None),
    "too-small-for-two": Case(disk=280_000, code=2, says=("two checkpoints", "are free"), status="failed"),
    "too-small-for-two-two-ranks": Case((*RUN, "mesh=2"), disk=280_000, code=2, says=("two checkpoints", "are free"),
                                        status="failed"),
    "full-while-saving": Case((*RUN, FILLS), disk=1_000_000, code=1, says=("no space is left", "output_dir="),
                              leaves=None),
    "full-while-saving-two-ranks": Case((*RUN, FILLS, "mesh=2"), disk=1_000_000, code=1, says=("no space is left",),
                                        leaves=None),
    "limit-of-file-sizes": Case(before=limited(12_000), code=1, says=("ulimit -f", "output_dir="), status="failed"),
    "deleted": Case((*RUN, does("shutil.rmtree(trainer.default_root_dir)")), leaves="run/metrics.csv"),
    "deleted-two-ranks": Case((*RUN, "mesh=2", does("shutil.rmtree(trainer.default_root_dir, True)"))),
    "no-stdin": Case(before=closed(0)),
    "no-stdout": Case(before=closed(1)),
    "no-stderr": Case(before=closed(2)),
    "no-streams": Case(before=closed(0, 1, 2)),
    "no-streams-two-ranks": Case((*RUN, "mesh=2"), before=closed(0, 1, 2)),
    "full-stdout": Case(before=onto("/dev/full", 1)),
    "full-streams": Case(before=onto("/dev/full", 1, 2)),
    "full-streams-two-ranks": Case((*RUN, "mesh=2"), before=onto("/dev/full", 1, 2)),
    "reader-gone": Case(before="r, w = os.pipe(); os.dup2(w, 1); os.close(r)\n"),
    "page-into-a-full-disk": Case(("--cfg", "job"), before=onto("/dev/full", 1), code=1, says=("No space left",),
                                  leaves=None),
    "ascii": Case(('output_dir="größe"',), variables={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
                  leaves="größe/summary.json"),
    "home-unset": Case(without=("HOME", "XDG_CACHE_HOME"), arguments=(*RUN, "data=text")),
    "home-empty": Case(variables={"HOME": ""}, arguments=(*RUN, "data=text")),
    "home-of-nobody": Case((*RUN, "data=text"), before="import pwd; pwd.getpwuid = lambda number: {}[number]\n",
                           without=("HOME", "XDG_CACHE_HOME")),
    "home-of-nobody-typed": Case(('output_dir="~/x"',), before="import pwd; pwd.getpwuid = lambda number: {}[number]\n",
                                 without=("HOME",), code=2, says=("no home directory",), leaves=None),
    "home-absent": Case(variables={"HOME": "/proc/x"}, without=("XDG_CACHE_HOME",),
                        arguments=(*RUN, "data=text")),
    "no-temporary-directory": Case(variables={"TMPDIR": "/nonexistent"}),
    "narrow": Case(variables={"COLUMNS": "1"}),
    "dumb": Case(variables={"TERM": "dumb", "COLUMNS": "0"}),
    "working-directory-gone": Case(before="os.mkdir('w'); os.chdir('w'); os.rmdir('../w')\n", code=2,
                                   says=("working directory",), leaves=None),
    "working-directory-read-only": Case((), before=WITHOUT_CAPABILITIES, prepare=lambda here: here.chmod(0o555),
                                        code=2, says=("Permission denied",), leaves=None),
    "left-with-0": Case((*RUN, does("os._exit(0)")), code=1, says=("exit code 0",), status="failed"),
    "left-with-3": Case((*RUN, does("os._exit(3)")), code=1, says=("exit code 3",), status="failed"),
    "segfault": Case((*RUN, does("import ctypes; ctypes.string_at(0)")), code=1,
                     says=("SIGSEGV", "string_at"), status="failed"),
    "killed": Case((*RUN, does("os.kill(os.getpid(), 9)")), code=1, says=("SIGKILL",), status="failed"),
    "hung-up": Case((*LONG, HANGS_UP), code=75, says=("stopped by SIGHUP", "saved"), status="interrupted"),
    "hung-up-two-ranks": Case((*LONG, "mesh=2", HANGS_UP), code=75, says=("stopped by SIGHUP", "saved"),
                              status="interrupted"),
    "hung-up-with-nohup": Case(
        (*RUN, HANGS_UP), before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    ),
    "terminated": Case((*LONG, HANGS_UP.replace(", 1)", ", 15)")), code=75, says=("stopped by SIGTERM", "saved"),
                       status="interrupted"),
    "fails-behind-the-end": Case(
        (*RUN, "mesh=2", does("import atexit; trainer.global_rank and atexit.register(os._exit, 3)")), code=1,
        says=("rank 1", "exit code 3"), status="failed",
    ),
}  # fmt: skip


ALIKE = {
    "spaces", "single-quote", "dots", "deep", "read-only-parent", "too-small-for-two-two-ranks",
    "full-while-saving-two-ranks", "deleted-two-ranks", "no-stdin", "no-stdout", "no-stderr", "no-streams-two-ranks",
    "full-stdout", "full-streams-two-ranks", "home-empty", "home-of-nobody", "home-absent", "dumb",
    "working-directory-read-only", "left-with-3", "hung-up-two-ranks", "terminated",
}  # fmt: skip
"""Cases beside another of their kind."""


@pytest.mark.parametrize("name", tiered(CASES, [], ALIKE))
def test_in_a_process(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = CASES[name]
    here = tmp_path_factory.mktemp("here")
    with disk_at(here / "run", case.disk):
        ended = run_case(case, here)
        left = (here / case.leaves).read_text() if case.leaves is not None and (here / case.leaves).exists() else None
    assert ended.returncode == case.code, ended.stdout
    assert "Traceback" not in ended.stdout, ended.stdout
    for fact in case.says:
        assert fact in ended.stdout, ended.stdout
    assert (left is None) == (case.leaves is None), ended.stdout
    if left is not None and case.leaves is not None and case.leaves.endswith(".json"):
        assert json.loads(left)["status"] == case.status, ended.stdout
    assert not (here / "~").exists()


@pytest.mark.full
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    """They lock their directory, and leave no `finished` of an earlier run there when they fail."""
    (tmp_path / "own.py").write_text(OWN)
    run = tmp_path / "run"
    run.mkdir()

    def ranks(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [*TINY[:-1], "mesh=2", "output_dir=run", *arguments]
        return run_to_end(torchrun(2, "-m", "autolaunch", *words), 120, cwd=tmp_path, env=environment())

    with lock.locked(run, "output_dir=run"):
        refused = ranks()
    assert refused.returncode != 0 and "Traceback" not in refused.stdout, refused.stdout
    assert refused.stdout.count("output_dir=run: another run is in this directory: process") == 1, refused.stdout
    assert [path.name for path in run.iterdir()] == [lock.LOCK_FILE]

    (run / "summary.json").write_text('{"status": "finished"}')
    failed = ranks(does("trainer.global_rank and 1 / 0"))
    assert failed.returncode != 0 and "ZeroDivisionError" in failed.stdout, failed.stdout
    summary = run / "summary.json"
    assert not summary.exists() or json.loads(summary.read_text())["status"] == "failed"

    finished = ranks()
    assert finished.returncode == 0, finished.stdout
    assert json.loads(summary.read_text())["status"] == "finished"


@contextlib.contextmanager
def disk_at(path: Path, size: int | None) -> Iterator[None]:
    """A disk of so many bytes at `path`; none if the size is None. Skips the test where none can be mounted."""
    if size is None:
        yield
        return
    path.mkdir()
    options = f"size={max(size, 4096)}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        if size == 0:
            (path / "filler").write_bytes(b"x" * 4096)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def run_case(case: Case, here: Path) -> subprocess.CompletedProcess[str]:
    (here / "own.py").write_text(OWN)
    if case.prepare is not None:
        case.prepare(here)
    env = {name: value for name, value in environment(**case.variables).items() if name not in case.without}
    own = list(case.arguments)
    chosen = {word.partition("=")[0] for word in own}  # one group is chosen once in a line
    tiny = [word for word in TINY if word.partition("=")[0] not in chosen]
    words = [*own, *tiny] if own[:1] == ["--cfg"] else [*tiny, *own]
    code = f"import os, sys\n{case.before}\nfrom autolaunch.__main__ import main\nmain()"
    return run_to_end([sys.executable, "-c", code, *words], 120, cwd=here, env=env)
