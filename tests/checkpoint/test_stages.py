"""Checkpoints of a model in stages: each rank writes and loads what it holds, whatever holds it at the other end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Group, GroupOf

SCRIPT = Path(__file__).parent / "stages_cases.py"
SHARED = ("temperature", "embedding.weight", "head.weight")


class Runs:
    """Two stages write (on 2 ranks, and on 4 with each stage sharded), one process reads and writes, they read that."""

    def __init__(self, shelf: Path, group_of: GroupOf) -> None:
        self.shelf = shelf
        kept = {"CHECKPOINTS": str(shelf)}
        self._stages = {ranks: group_of(SCRIPT, "stages", ranks, **kept) for ranks in (2, 4)}
        self._back = {ranks: group_of(SCRIPT, "back", ranks, **kept) for ranks in (2, 4)}
        self.one = group_of(SCRIPT, "one", 1, **kept)
        self.expected = self.one.read("reference")
        for ranks in (2, 4):
            assert self._stages[ranks].read("write") == [None] * 4
        for case in ("write", "plain"):
            self.one.read(case)

    def stages(self, ranks: int) -> Group:
        return self._stages[ranks]

    def back(self, ranks: int) -> Group:
        return self._back[ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, group_of: GroupOf) -> Runs:
    return Runs(tmp_path_factory.mktemp("stages"), group_of)


def check_stages(expected: Any, results: Group, case: str, ranks: int) -> None:
    """What each rank has is a part of what one process has; together they have all of it, shared parameters twice."""
    found = [results.read(case, rank) for rank in range(ranks)]
    for kind in ("tensors", "state"):
        for part in found:
            assert {name: expected[kind][name] for name in part[kind]} == part[kind]
        assert set().union(*(part[kind] for part in found)) == set(expected[kind])
    holders = {name: sum(name in part["tensors"] for part in found) for name in expected["tensors"]}
    everywhere = {name for name in holders if name in SHARED or name.endswith("_extra_state")}
    assert holders == {name: ranks if name in everywhere else ranks // 2 for name in holders}
    assert [part["options"] for part in found] == [expected["options"]] * ranks


@pytest.mark.parametrize("case", ["on", "background", "unordered"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_find_what_they_wrote(runs: Runs, ranks: int, case: str) -> None:
    check_stages(runs.expected, runs.stages(ranks), case, ranks)


@pytest.mark.parametrize(
    "name",
    [*(f"{name}-{ranks}.ckpt" for ranks in (2, 4) for name in ("on", "background", "unordered")), "plain"],
)
def test_one_process_finds_what_stages_wrote(runs: Runs, name: str) -> None:
    assert runs.one.read(f"read-{name}") == runs.expected


@pytest.mark.parametrize("name", ["on-1.ckpt", "on-2.ckpt", "on-4.ckpt", "plain"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_find_what_others_wrote(runs: Runs, ranks: int, name: str) -> None:
    check_stages(runs.expected, runs.back(ranks), f"read-{name}", ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_element_is_written_once(runs: Runs, ranks: int) -> None:
    written = runs.stages(ranks).read("written_once")
    of_model = {name.removeprefix("model.") for name in written if name.startswith("model.")}
    assert of_model == {name for name in runs.expected["tensors"] if not name.endswith("_extra_state")}
    assert set(written.values()) == {1.0}


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_the_whole_optimizers(runs: Runs, ranks: int) -> None:
    seen = [runs.stages(ranks).read("groups", rank) for rank in range(ranks)]
    assert seen == seen[:1] * ranks
    (last, rest), (prompt,) = seen[0]["made"]
    assert rest[0].startswith("blocks.1") and rest[-1] == "temperature"
    assert seen[0]["known"] == [[[last, 0.0], [rest, 0.01]], [[prompt, 0]]]
    assert seen[0]["without empty ones"] == seen[0]["known"]
    by_stage = [name for name in rest if "blocks.1" not in name] + [name for name in rest if "blocks.1" in name]
    assert seen[0]["unknown"] == [[[last, 0.0], [by_stage, 0.01]], [[prompt, 0]]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_alone_are_not_enough_for_optimizers(runs: Runs, ranks: int) -> None:
    for rank in range(ranks):
        assert runs.stages(ranks).message("weights", rank) == (
            f"ConfigError: ckpt_path={runs.shelf}/weights-{ranks}.ckpt: holds weights only\n"
            "  allowed: a checkpoint with optimizer states to resume from; "
            "validate, test, predict and load_from_checkpoint need none"
        )


@pytest.mark.parametrize(
    ("why", "problem"),
    [
        pytest.param(
            "more", "7 parameters are missing (blocks.3.0.weight, blocks.3.0.bias, blocks.3.1.weight, ...)", id="more"
        ),
        pytest.param(
            "fewer", "7 are unknown here (blocks.2.0.weight, blocks.2.0.bias, blocks.2.1.weight, ...)", id="fewer"
        ),
        pytest.param(
            "wider",
            "prompt is (2, 6) there, (2, 8) here; embedding.weight is (10, 6) there, (10, 8) here; "
            "blocks.0.0.weight is (6, 6) there, (8, 8) here",
            id="wider",
        ),
    ],
)
@pytest.mark.parametrize("name", ["on-1.ckpt", "plain"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_stage_says_what_is_wrong_with_the_whole_model(
    runs: Runs, ranks: int, name: str, why: str, problem: str
) -> None:
    for rank in range(ranks):
        assert runs.back(ranks).message(f"{why}-{name}", rank) == (
            f"ConfigError: ckpt_path={runs.shelf}/{name}: belongs to another model: {problem}\n"
            "  allowed: the model that it was saved from"
        )
