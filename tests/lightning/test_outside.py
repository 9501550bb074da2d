"""Parameters used outside of their block are, on every mesh, what they are in one process; or the use is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Group, differences
from tests.support.tiers import spread, tiered

SCRIPT = Path(__file__).with_name("outside_cases.py")
PENALTIES = ("squares", "sizes", "norms", "orthogonal", "embedding", "by_hand")
MODULES = ("before", "behind", "both", *PENALTIES, *(f"{name}-first" for name in PENALTIES), "both-squares")
MESHES = ("dp2-0", "dp2-1", "dp2-2", "dp2-3", "mp2", "sp2", "cp2")
PAIRS = [
    (module, mesh)
    for module in MODULES
    for column, mesh in enumerate(MESHES)
    if module.removesuffix("-first") not in PENALTIES
    or module.endswith("-first") == (PENALTIES.index(module.removesuffix("-first")) + column) % 2
]
"""Of penalty, mesh, and whether the penalty comes first, every two meet."""
DAILY = {
    ("both-squares", "dp2-3"), ("norms-first", "dp2-1"), ("both", "dp2-2"), ("both-squares", "cp2"),
    ("squares", "mp2"), ("orthogonal", "sp2"),
}  # fmt: skip


def check(one: Group, ranks: Group, name: str, case: str, own: bool = False) -> None:
    """Compare losses, norms, weights and logged values; with `own` the weights that a rank holds."""
    expected: dict[str, Any] = one.read(name)
    for result in ranks.read_all(case):
        here = dict(expected)
        if own:
            here["weights"] = {key: value for key, value in here["weights"].items() if key in result["weights"]}
        assert differences(here, result, 2e-5) == []


@pytest.mark.parametrize(("module", "mesh"), tiered(PAIRS, DAILY, spread(PAIRS, tuple, DAILY)))
def test_losses_and_weights_are_those_of_one_process(one: Group, two: Group, module: str, mesh: str) -> None:
    check(one, two, module, f"{module}@{mesh}")


@pytest.mark.parametrize("module", tiered(["both-squares", "norms-first"], {"both-squares"}))
@pytest.mark.parametrize("mesh", tiered(["dp2-0", "dp2-1", "dp2-2", "dp2-3"], {"dp2-1", "dp2-3"}))
def test_so_they_are_where_gradients_accumulate(one: Group, two: Group, module: str, mesh: str) -> None:
    check(one, two, f"{module}+accumulate", f"{module}@{mesh}+accumulate")


@pytest.mark.parametrize("apart", ["loop-False", "loop-True"])
@pytest.mark.parametrize("level", tiered([0, 1, 2, 3], {1, 3}))
def test_so_they_are_in_a_plain_loop(one: Group, two: Group, level: int, apart: str) -> None:
    check(one, two, apart, f"{apart}@{level}")


@pytest.mark.full
def test_so_they_are_where_models_are_sharded_over_two_axes(one: Group, four: Group) -> None:
    check(one, four, "both-squares", "both-squares@dp2mp2")
    check(one, four, "both", "both@dp2pp2", own=True)


@pytest.mark.parametrize("mesh", tiered(["pp2", "pp2-1f1b", "pp2-one"], {"pp2"}))
def test_a_part_of_a_block_is_held_by_all_stages_that_call_it(one: Group, two: Group, mesh: str) -> None:
    check(one, two, "both", f"both@{mesh}", own=True)


@pytest.mark.parametrize(
    ("module", "mesh"),
    tiered(
        [(name, mesh) for name in ("squares", "sizes", "squares-first") for mesh in ("pp2", "pp2-1f1b", "pp2-one")],
        {("squares", "pp2"), ("sizes", "pp2-one")},
    ),
)
def test_a_loss_of_parameters_of_all_stages_is_refused(two: Group, module: str, mesh: str) -> None:
    for result in two.read_all(f"{module}@{mesh}"):
        assert "the loss uses model.blocks.2" in result["refused"]
        assert "weight_decay of the optimizer" in result["refused"]


def test_a_loss_of_parameters_of_another_stage_is_refused(two: Group) -> None:
    for result in two.read_all("embedding@pp2"):
        assert "model.embed.weight is used outside of the call of the model" in result["refused"]
        assert "held by stage 0" in result["refused"]
