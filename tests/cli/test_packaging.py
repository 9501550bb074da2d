"""What people install: the wheel's files, and the command in an environment that has never seen the source tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import autolaunch
from tests import ROOT

WHEEL = f"autolaunch-{autolaunch.__version__}-py3-none-any.whl"
pytestmark = pytest.mark.timeout(240)


def call(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    """Run a command that sees no source tree; returns what it printed. It must succeed, or fail if `fails`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert (ended.returncode != 0) == fails, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that is built from it."""
    directory = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT, cwd=directory)
    return directory


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a virtual environment with `pip install <arguments>` of autolaunch, over the packages of this one."""

    def make(*arguments: str | Path) -> Path:
        directory = tmp_path_factory.mktemp("venv")
        venv.create(directory, with_pip=False, symlinks=True)
        python = directory / "bin" / "python"
        site_packages = Path(
            call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory).strip()
        )
        below = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (site_packages / "packages_of_the_tests.pth").write_text("\n".join(below))
        offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        call(
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            *offline,
            "--ignore-installed",
            *arguments,
            cwd=directory,
        )
        return directory / "bin"

    return make


@pytest.fixture(scope="module")
def installed(built: Path, environment: Callable[..., Path]) -> Path:
    """The bin directory of an environment in which the wheel is installed."""
    return environment(built / WHEEL)


def test_wheel_holds_the_packages_and_conf(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {}
    for source, target in (
        ("launcher", ""),
        ("strategies", ""),
        ("conf", "autolaunch/conf/"),
    ):
        for file in (ROOT / source).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                expected[target + file.relative_to(ROOT / source).as_posix()] = file
    assert packed == set(expected)
    assert {"autolaunch/py.typed", "autolaunch_strategies/py.typed", "autolaunch/conf/config.yaml"} <= packed
    assert "hydra_plugins/__init__.py" not in packed  # a namespace shared with other packages


def test_wheel_says_what_it_needs(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        info = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(info).decode()
        scripts = wheel.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "autolaunch = autolaunch.__main__:main" in scripts
    assert re.search(r"^Requires-Dist: torch<2\.16,>=2\.11$", metadata, re.MULTILINE)
    assert "# autolaunch" in metadata  # the README


def test_sdist_and_source_tree_build_the_same_wheel(built: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    contents = []
    for directory in (built, tmp_path):
        with zipfile.ZipFile(directory / WHEEL) as wheel:
            contents.append({name: wheel.read(name) for name in wheel.namelist()})
    assert contents[0] == contents[1]


def test_sdist_can_be_tested(built: Path) -> None:
    top = f"autolaunch-{autolaunch.__version__}"
    with tarfile.open(built / f"{top}.tar.gz") as sdist:
        packed = set(sdist.getnames())
    assert {
        f"{top}/{name}" for name in ("tests/cli/test_packaging.py", "examples/lightning_module.py", "LICENSE")
    } <= packed
    assert [name for name in packed if "outputs" in name or "__pycache__" in name] == []


def test_installed_command(installed: Path, tmp_path: Path) -> None:
    home = call(installed / "python", "-c", "import autolaunch; print(autolaunch.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(installed.parent)
    assert call(installed / "autolaunch", "--version", cwd=tmp_path).strip() == f"autolaunch {autolaunch.__version__}"
    assert call(installed / "python", "-m", "autolaunch", "--version", cwd=tmp_path).split()[0] == "autolaunch"
    assert "pretrain_small" in call(installed / "autolaunch", "--help", cwd=tmp_path)
    assert "max_steps: null" in call(installed / "autolaunch", "--cfg", "job", cwd=tmp_path)
    assert "did you mean" in call(installed / "autolaunch", "modle=llama", cwd=tmp_path, fails=True)
    assert list(tmp_path.iterdir()) == []  # asking leaves nothing behind


@pytest.mark.full
def test_installed_run_of_two_ranks(installed: Path, tmp_path: Path) -> None:
    call(installed / "autolaunch", "experiment=smoke", "mesh=2", "output_dir=run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["steps"]) == ("finished", 2, 10)


def test_editable_install(environment: Callable[..., Path], tmp_path: Path) -> None:
    commands = environment("--editable", ROOT)
    home = call(commands / "python", "-c", "import autolaunch; print(autolaunch.__file__)", cwd=tmp_path)
    assert Path(home.strip()) == ROOT / "launcher" / "autolaunch" / "__init__.py"
    assert "max_steps: null" in call(commands / "autolaunch", "--cfg", "job", cwd=tmp_path)
