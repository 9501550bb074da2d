"""cp with dp, mp and pp, and over four ranks: what one process gives, on 4 and 8 ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from context_cases import GROUPS, RECIPES
from context_runs import run_group
from pipeline_runs import Results, problems
from strategy_runs import differences
from test_context_lightning import went_on

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5


def same(group: str) -> list[str]:
    """The cases of a group that have a counterpart in one process."""
    return [name for name in GROUPS[group] if name.split("@")[0] in RECIPES and "bf16" not in name]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that pass from mesh to mesh."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> Results:
    wanted = {name.split("@")[0] for group in ("four", "eight") for name in GROUPS[group]}
    cases = [name for name in GROUPS["one"] if name in wanted or name in ("uninterrupted", "save-1")]
    return run_group(tmp_path_factory.mktemp("context") / "one", "one", shelf, cases)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, one: Results, shelf: Path) -> Results:
    results = run_group(tmp_path_factory.mktemp("context") / "two", "two", shelf, ["save-cp2"])
    results.read("save-cp2")
    return results


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, two: Results, shelf: Path) -> Results:
    return run_group(tmp_path_factory.mktemp("context") / "four", "four", shelf)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory, one: Results, shelf: Path) -> Results:
    return run_group(tmp_path_factory.mktemp("context") / "eight", "eight", shelf)


@pytest.fixture(scope="module")
def back(tmp_path_factory: pytest.TempPathFactory, four: Results, shelf: Path) -> Results:
    return run_group(tmp_path_factory.mktemp("context") / "back", "back", shelf, ["resume-1-from-dp2xcp2"])


@pytest.mark.parametrize("case", same("four"))
def test_four_ranks_equal_one_process(one: Results, four: Results, case: str) -> None:
    assert problems(one, four, case.split("@")[0], case, 4, TOLERANCE) == []


@pytest.mark.parametrize("case", same("eight"))
def test_eight_ranks_equal_one_process(one: Results, eight: Results, case: str) -> None:
    assert problems(one, eight, case.split("@")[0], case, 8, TOLERANCE) == []


def test_bf16_mixed_is_close(one: Results, four: Results) -> None:
    expected, found = one.read("bf16-mixed")["first"], four.read("bf16-mixed@dp2xcp2-ring-level3")["first"]
    assert differences(expected["losses"], found["losses"], 1e-2) == []


@pytest.mark.parametrize("case", [name for name in GROUPS["four"] if name.startswith("resume-")])
def test_a_run_goes_on_on_dp2xcp2(one: Results, four: Results, case: str) -> None:
    assert went_on(one, four, case, 4) == []


def test_a_run_goes_on_in_one_process(one: Results, back: Results) -> None:
    assert went_on(one, back, "resume-1-from-dp2xcp2", 1) == []
