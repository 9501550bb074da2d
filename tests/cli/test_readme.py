"""README.md and docs/ say what is so: their commands run, in their order, and their links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.support.ranks import environment, start, torchrun
from tests.support.tiers import tiered

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""In this order: checkpoints.md exports what models_and_data.md trains."""

GUIDES = sorted((ROOT / "docs").glob("*/*.md"))
"""Pages of the site alone; `mkdocs build --strict` follows their links, of which some lead to pages that it makes."""

README = PAGES[0].read_text(encoding="utf-8")
pytestmark = pytest.mark.timeout(330)


def blocks(language: str) -> list[str]:
    """The fenced blocks of all pages in one language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [block for page in [*PAGES, *GUIDES] for block in pattern.findall(page.read_text(encoding="utf-8"))]


_LINES = [
    # CI runs the two lines with `pip install`; here the package is there already.
    line.partition(" && ")[2] if line.startswith("pip install") else line
    for block in blocks("bash")
    for line in block.replace("\\\n", " ").splitlines()
]
COMMANDS = list(dict.fromkeys(_LINES))  # some stand on two pages
FIRST = COMMANDS[0]
IN_A_SHELL = ("autolaunch --help", "autolaunch plan mesh=1x2 'mp.plan=")
"""Beginnings of commands that are read by a shell and run in new processes: a simple one, and one with quotes.
The others are given as the same words to warm processes."""

DAILY = ("autolaunch --", "autolaunch plan mesh=", "autolaunch plan model=llama model.size=8b mesh=", "cd ")
"""Beginnings of commands of every day. What the others show with models of their size, and together, other tests show
with small ones, and one by one."""
SELDOM = (
    "autolaunch calibrate ", "autolaunch -m search=auto ", "autolaunch -m dp=fsdp,zero1 mesh=1,2 ",
    "autolaunch dryrun mesh=dp2xmp2xpp2 ",
    # Keys of which test_around_training.py and test_adapters.py have smaller ones.
    "autolaunch trainer.max_steps=3 'optimizer.groups=", "autolaunch trainer.max_steps=6 trainer.val_check_interval=2 ",
    "autolaunch name=tune model=hf model.path=exported adapter=lora mesh=1x2 ",
    # As other lines, but for a mesh or a number.
    "autolaunch mesh=1x1x2x2 ", "autolaunch mesh=2x2 ", "autolaunch mesh=1x2 ", "autolaunch mesh=1x1x2 data.",
    "autolaunch mesh=2 data.", "autolaunch model=hf model.path=exported mesh=2 ",
    "autolaunch plan model=llama model.size=8b cluster=h100x64 ",
)  # fmt: skip
"""Up to a minute each. Of the first four test_calibrate.py, test_runs.py, test_jobs.py and test_command.py have smaller
ones. Nothing that stands below needs what they leave."""


def commands() -> list[Any]:
    """The parameters of `test_command`, in the order of the pages: some need what those before them have left."""
    mine = [command for command in COMMANDS if not command.startswith("pytest")]
    return tiered(mine, lambda command: command.startswith(DAILY), lambda command: command.startswith(SELDOM))


Clone = tuple[Path, dict[str, str]]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A directory with what the commands expect of a clone, and an environment in which `autolaunch` is this source."""
    directory = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", directory / "examples", ignore=shutil.ignore_patterns("outputs", "__pycache__"))
    programs = directory / "bin"
    programs.mkdir()
    for name, words in {"autolaunch": "-m autolaunch ", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (programs / name).chmod(0o755)
    return directory, environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", COLUMNS="80")


def in_a_shell(command: str, clone: Clone) -> subprocess.CompletedProcess[str]:
    return start(["bash", "-euc", command], timeout=300, cold=True, cwd=clone[0], env=clone[1])


def run(command: str, clone: Clone) -> subprocess.CompletedProcess[str]:
    """Run a line of a page."""
    if command.startswith(IN_A_SHELL):
        return in_a_shell(command, clone)
    changed, directory, command = re.fullmatch(r"(cd (\S+) && )?(.*)", command).groups()
    program, *words = shlex.split(command)
    where = clone[0] / directory if changed else clone[0]
    if program == "torchrun":
        option, count, *words = words
        assert option == "--nproc-per-node"
        return start(torchrun(int(count), *words), timeout=300, cwd=where, env=clone[1])
    assert program in ("autolaunch", "python") and not {"&&", "||", "|", ";", ">"} & set(words), command
    module = ["-m", program] if program == "autolaunch" else []
    return start([sys.executable, *module, *words], timeout=300, cwd=where, env=clone[1])


@pytest.mark.parametrize("command", commands())
def test_command(command: str, clone: Clone) -> None:
    in_ci = os.environ.get("CI") == "true" and os.environ.get("AUTOLAUNCH_CI_RAN_README_COMMAND") == "1"
    if command == FIRST and in_ci:
        pytest.skip("CI has run this line of README.md itself, just before")
    ended = run(command, clone)
    assert ended.returncode == 0, ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize("script", blocks("python"))
def test_script(script: str, clone: Clone) -> None:
    (clone[0] / "script.py").write_text(script)
    ended = start([sys.executable, "script.py"], timeout=300, cwd=clone[0], env=clone[1])
    assert ended.returncode == 0, ended.stdout


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["2", "1"])
def test_example_of_a_lightning_module(ranks: str, clone: Clone) -> None:
    ended = start([sys.executable, "examples/lightning_module.py", ranks], timeout=300, cwd=clone[0], env=clone[1])
    assert ended.returncode == 0, ended.stdout
    accuracy = re.search(r"^accuracy (.*)$", ended.stdout, re.MULTILINE)
    assert accuracy and float(accuracy[1]) > 0.9, ended.stdout


def session(text: str, clone: Clone) -> int:
    """The exit code of a command that shows what the page says, by a shell, in a new process."""
    command, _, shown = text.partition("\n")
    ended = in_a_shell(command.removeprefix("$ "), clone)
    assert ended.stdout.strip() == shown.strip()
    return ended.returncode


SESSIONS = blocks("console")
SCRIPTS = [text for text in SESSIONS if text.startswith("$ python ")]


@pytest.mark.parametrize("text", [text for text in SESSIONS if text not in SCRIPTS])
def test_message(text: str, clone: Clone) -> None:
    assert session(text, clone) == 2


@pytest.mark.full  # shows what the commands above have trained
@pytest.mark.parametrize("text", SCRIPTS)
def test_output_of_a_script(text: str, clone: Clone) -> None:
    assert session(text, clone) == 0


def test_ci_runs_the_two_commands() -> None:
    installing = re.findall(r"^pip install .*$", README, re.MULTILINE)
    assert [line.partition(" && ")[2].split()[0] for line in installing] == ["autolaunch", "pytest"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))  # code such as rows[0](x) is no link
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if "://" not in link and not _leads_somewhere(page, *link.partition("#")[::2])] == []


def _leads_somewhere(page: Path, file: str, heading: str) -> bool:
    goal = page.parent / file if file else page
    if not heading:
        return goal.exists()
    headings = re.findall(r"^#+ (.+)$", goal.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", item.lower()).replace(" ", "-") for item in headings}


def test_readme_leads_to_every_page() -> None:
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in README] == []
