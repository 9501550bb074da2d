"""README.md says what is so: its commands run, in its order, and its tables agree with the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.timeout(330)


def blocks(language: str) -> list[str]:
    """The fenced blocks of README.md in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [
    # CI runs the two lines with `pip install`; here the package is there already.
    line.partition(" && ")[2] if line.startswith("pip install") else line
    for block in blocks("bash")
    for line in block.replace("\\\n", " ").splitlines()
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory with what the commands expect of a clone, and an environment in which `autolaunch` is this source."""
    directory = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", directory / "examples", ignore=shutil.ignore_patterns("outputs", "__pycache__"))
    commands = directory / "bin"
    commands.mkdir()
    for name, module in (("autolaunch", "autolaunch"), ("torchrun", "torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    paths = [str(ROOT / "launcher"), str(ROOT / "strategies"), os.environ.get("PYTHONPATH", "")]
    yield (
        directory,
        {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
        },
    )


def run(command: list[str], clone: tuple[Path, dict[str, str]]) -> subprocess.CompletedProcess[str]:
    directory, environment = clone
    return subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("pytest")])
def test_command(command: str, clone: tuple[Path, dict[str, str]]) -> None:
    ended = run(["bash", "-euc", command], clone)
    assert ended.returncode == 0, ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize("script", blocks("python"))
def test_script(script: str, clone: tuple[Path, dict[str, str]]) -> None:
    (clone[0] / "script.py").write_text(script)
    ended = run([sys.executable, "script.py"], clone)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_example_of_a_lightning_module(ranks: str, clone: tuple[Path, dict[str, str]]) -> None:
    ended = run([sys.executable, "examples/lightning_module.py", ranks], clone)
    assert ended.returncode == 0, ended.stdout
    accuracy = re.search(r"^accuracy (.*)$", ended.stdout, re.MULTILINE)
    assert accuracy and float(accuracy[1]) > 0.9, ended.stdout


@pytest.mark.parametrize("session", blocks("console"))
def test_message(session: str, clone: tuple[Path, dict[str, str]]) -> None:
    command, _, message = session.partition("\n")
    ended = run(["bash", "-euc", command.removeprefix("$ ")], clone)
    assert (ended.returncode, ended.stdout.strip()) == (2, message.strip())


def test_ci_runs_the_two_commands() -> None:
    installing = re.findall(r"^pip install .*$", README, re.MULTILINE)
    assert [line.partition(" && ")[2].split()[0] for line in installing] == ["autolaunch", "pytest"]


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
