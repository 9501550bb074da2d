"""Names, places, disks, streams and variables of the environment: a run works there, or one message says why not.

No case may end in a traceback of ours.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autolaunch import cli
from autolaunch.jobs import start
from tests.support.ranks import environment
from tests.support.ranks import start as run_to_end

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
""")


def does(code: str) -> str:
    return f"trainer.callbacks.does={{_target_: own.Does, code: \"{code}\"}}"


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
        ("a-fraction", ["output_dir=1.50"], None, ["output_dir=1.5", "output_dir=./1.50"]),
        ("a-truth", ["output_dir=true"], None, ["output_dir=true", "output_dir=./true"]),
        ("a-list", ["output_dir=[a]"], None, ["output_dir=[a]", "a directory"]),
        ("empty", ["output_dir="], None, ["output_dir=", "names nothing"]),
        ("blanks", ["output_dir=' '"], None, ["names nothing"]),
        ("a-quote", ["output_dir=it's"], None, ["output_dir=it's", "output_dir=\"it's\""]),
        ("a-comma", ["output_dir=a,b"], None, ["several values", "-m"]),
        ("an-equals-sign", ["output_dir=a=b"], None, None),
        ("nobodys-home", ["output_dir=~nobody_of_this_name/x"], None, ["no home directory"]),
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
        ("metrics-are-a-directory", ["output_dir=run"], _directory("run/metrics.csv"),
         ["run/metrics.csv", "is a directory"]),
        ("no-such-checkpoint", ["ckpt_path=~/nowhere.ckpt"], None, ["nowhere.ckpt"]),
        ("name-with-a-slash-up", ["name=../../x"], None, None),
        ("interval", ["-m", "optimizer.lr=interval(0.001,0.1)"], None, ["interval", "hydra/sweeper=optuna"]),
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
