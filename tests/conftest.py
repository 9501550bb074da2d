"""What every test relies on."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support.ranks", "tests.support.commands", "tests.support.messages")

from tests.support import warm  # noqa: E402 - behind what rewrites their asserts
from tests.support.ranks import Group, GroupOf  # noqa: E402 - behind what rewrites their asserts

# As torch has it where CI is set: elsewhere, results of an operator that share memory are a warning.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"

# A shell that starts a command in the background has it ignore Ctrl-C, and so would every process that a test starts
# to interrupt it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold", action="store_true", help="start every process anew instead of forking one that has its imports"
    )


SLOW = [
    "cli/test_readme.py", "launch/test_slurm_jobs.py", "context/test_meshes.py", "experts/test_experts.py",
    "search/test_sweeper.py", "lightning/test_features.py", "pipeline/test_lightning.py", "cli/test_adapters.py",
    "pipeline/test_meshes.py", "cli/test_stopping.py", "tensor/test_zoo.py", "context/test_lightning.py",
    "cli/test_restarts.py", "dry_run/test_dry_run.py", "cli/test_hangs.py", "lightning/test_parity.py",
    "cli/test_environment.py", "paddle/test_to_distributed.py", "models/test_adapter_meshes.py",
    "training/test_compiled_meshes.py", "models/test_tasks.py", "cli/test_around_training.py",
    "planner/test_profile.py", "loop/test_parallelize.py", "checkpoint/test_meshes.py", "context/test_zoo.py",
    "cli/test_chat.py", "models/test_packing.py", "search/test_runs.py", "training/test_memory_budget.py",
    "config/test_messages.py", "cli/test_classification.py", "dry_run/test_experts.py", "dry_run/test_command.py",
    "cli/test_jobs.py", "cli/test_first_run.py", "lightning/test_random_numbers.py", "pipeline/test_zoo.py",
    "data_parallel/test_resume.py", "launch/test_local.py", "config/test_schema.py", "tasks/test_calibrate.py",
]  # fmt: skip
"""Files that take longest in either tier, longest first."""

_SERVER = pytest.StashKey[object]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.getoption("--cold") or not hasattr(os, "pidfd_open"):
        return  # xdist's workers share the server of the process that started them
    config.stash[_SERVER] = warm.start_server()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SERVER in config.stash:
        process, _ = config.stash[_SERVER]
        process.terminate()
        process.wait()
        _, _, path = os.environ.pop(warm.SERVER).partition(":")
        shutil.rmtree(Path(path).parent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are marked neither `full` nor `every` are `daily`. A tier means those before it, too."""
    for item in items:
        if item.get_closest_marker("full") is None and item.get_closest_marker("every") is None:
            item.add_marker(pytest.mark.daily)
    meant = {"": "daily", "full": "not every", "every": ""}  # pytest selects after this
    config.option.markexpr = meant.get(config.option.markexpr.strip(), config.option.markexpr)
    items.sort(key=_starts_late)


def _starts_late(item: pytest.Item) -> int:
    """Files that take long come first, so that no worker is left alone with one at the end."""
    folder, file = item.path.parent.name, item.path.name
    return SLOW.index(f"{folder}/{file}") if f"{folder}/{file}" in SLOW else len(SLOW)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this machine could not test: a green end must not hide it."""
    skipped = terminalreporter.getreports("skipped")
    for marker in ("slurm", "gpu"):
        # A file that is skipped as a whole has no keywords.
        left_out = [report for report in skipped if marker in getattr(report, "keywords", ())]
        if left_out:
            reason = left_out[0].longrepr[2].removeprefix("Skipped: ")
            terminalreporter.write_line(f"{len(left_out)} {marker} tests did not run: {reason}", yellow=True)


@pytest.fixture(scope="module")
def group_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupOf]:
    """Makes a `Group` of cases for the tests of a file: `group_of(script, name, count, **environment)`."""
    with contextlib.ExitStack() as groups:

        def make(script: Path, name: str, count: int, **extra: str) -> Group:
            group = Group(script, tmp_path_factory.mktemp(name) / f"on_{count}", name, count, **extra)
            groups.callback(group.close)
            return group

        yield make


@pytest.fixture(scope="module")
def one(group_of: GroupOf, request: pytest.FixtureRequest) -> Group:
    """One process that runs the cases named `one` of the test file's `SCRIPT`; so `two` and `four`."""
    return group_of(request.module.SCRIPT, "one", 1)


@pytest.fixture(scope="module")
def two(group_of: GroupOf, request: pytest.FixtureRequest) -> Group:
    return group_of(request.module.SCRIPT, "two", 2)


@pytest.fixture(scope="module")
def four(group_of: GroupOf, request: pytest.FixtureRequest) -> Group:
    return group_of(request.module.SCRIPT, "four", 4)


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """Hydra's handlers, made in a test, would write to a stream that is closed in the next."""
    level = logging.root.level
    yield
    for handler in [handler for handler in logging.root.handlers if type(handler) is logging.StreamHandler]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Trainers that a file runs in its own process leave none to the next file, whichever that is."""
    yield
    if (distributed := sys.modules.get("torch.distributed")) is not None and distributed.is_initialized():
        from autolaunch_strategies.mesh.process_group import leave_process_group

        leave_process_group()


@pytest.fixture(autouse=True)
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks of runs that a test starts from its own process are forked, too."""
    if warm.SERVER in os.environ:
        monkeypatch.setattr("autolaunch.launch.local.start_worker", warm.start_worker)
    yield
