"""LightningModules that know nothing of cp give on two ranks along it what plain Lightning gives in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from autolaunch_strategies.mesh.layout import Layout
from tests.context.cases import GROUPS, RANKS, RECIPES
from tests.context.modules import LENGTH
from tests.pipeline.modules import WIDTH
from tests.support.ranks import Group, GroupOf, differences, problems, went_on
from tests.support.tiers import in_turn, spread, tiered

SCRIPT = Path(__file__).with_name("cases.py")
TOLERANCE = 1e-5
pytestmark = pytest.mark.timeout(600)
SAME = [name for name in GROUPS["two"] if name.split("@")[0] in RECIPES and "bf16" not in name]
BACKENDS = ("gather", "ring", "ulysses")
LONG = {
    "hf-llama-eager",
    "hf-gpt2-eager",
    "hf-bert-eager",
    "hf-mistral-sdpa",
    "recompute-full",
    "hf-no-cache",
    "bent",
    "compiled",
    "mixes-compiled",
    "captured",
    "as-many-samples-as-positions",
    "hf-generates",
    "hf-bart",
    "tasks",
    "hf-llama-reenters",
    "predictions",
    "hf-accumulate",
    "hf-llama-recomputes",
    "hf-bert-whole",
    "hf-llama-padded-eager",
    "hf-gpt2-padded",
    "holds-blocks",
    "chosen",
    "bent-fixed",
    "hf-bert-length-13",
}
_MODELS = list(dict.fromkeys(name.split("@")[0] for name in SAME))
_TURNS = in_turn(_MODELS, BACKENDS)


def everyday(case: str) -> bool:
    """Every model meets one backend, and every backend a third of the models."""
    model, _, run = case.partition("@")
    alone = sum(name.startswith(f"{model}@") for name in SAME) == 1
    return model not in LONG and (alone or any(backend in run for name, backend in _TURNS if name == model))


def seldom(case: str) -> bool:
    """Of models that meet a backend every day, the others; what is compiled, is in test_compiled_meshes.py."""
    return case.startswith(("compiled@", "captured@")) or case in ALIKE or _SELDOM(case)


_SELDOM = spread(SAME, lambda case: case.split("@"), everyday)
ALIKE = {
    "hf-llama-eager@cp2-ulysses", "hf-bert-eager@cp2-ring", "hf-llama-padded-eager@cp2-ulysses", "bent-fixed@cp2-ring",
    "hf-llama-recomputes@cp2-ring", "hf-bert-whole@cp2-ulysses", "hf-bert-length-13@cp2-gather",
    "hf-gpt2-padded@cp2-gather", "hf-accumulate@cp2-ring", "written-out@cp2-gather-selective",
}  # fmt: skip
"""Beside another of their kind."""
assert ALIKE.issubset(SAME)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that pass from mesh to mesh."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def one(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "one", RANKS["one"], SHELF=str(shelf))


@pytest.fixture(scope="module")
def two(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "two", RANKS["two"], SHELF=str(shelf))


@pytest.fixture(scope="module")
def back(group_of: GroupOf, shelf: Path) -> Group:
    return group_of(SCRIPT, "back", RANKS["back"], SHELF=str(shelf))


@pytest.mark.parametrize("case", tiered(SAME, everyday, seldom))
def test_two_ranks_equal_one_process(one: Group, two: Group, case: str) -> None:
    assert problems(one, two, case.split("@")[0], case, TOLERANCE) == []


@pytest.mark.parametrize("backend", tiered(BACKENDS, ["ring"]))
def test_bf16_mixed_is_close(one: Group, two: Group, backend: str) -> None:
    """Sums over parts of a sequence round differently from those over the whole: 8 bits of mantissa."""
    expected, found = one.read("bf16-mixed")["first"], two.read(f"bf16-mixed@cp2-{backend}")["first"]
    assert differences(expected["losses"], found["losses"], 1e-2) == []
    assert differences(one.read("llama")["first"]["losses"], found["losses"], 1e-5) != []


@pytest.mark.parametrize(
    "case",
    tiered([f"dropout-{backend}" for backend in BACKENDS], ["dropout-ring"], ["dropout-gather", "dropout-ulysses"]),
)
def test_dropout(one: Group, two: Group, case: str) -> None:
    """Each rank drops on its own part of the sequence, differently, and the same again with the same seed."""
    parts = [two.read(case, rank) for rank in (0, 1)]
    for part in parts:
        assert part["first"] == part["again"]
        losses, without = part["first"]["losses"], one.read("nanogpt")["first"]["losses"]
        assert len(losses) == 4 and all(0 < loss < 20 for loss in losses)
        assert all(abs(loss - other) > 1e-3 for loss, other in zip(losses, without, strict=True))
        assert part["other"]["losses"] != losses
        for name in ("recomputed", "selected"):
            for what in ("losses", "norms"):
                assert differences(part["first"][what], part[name][what], TOLERANCE, f"{name} {what}") == []
    assert parts[0]["first"]["losses"] == parts[1]["first"]["losses"], "every rank computes the whole loss"
    dropped = [part["first"]["dropped"] for part in parts]
    assert dropped[0] == dropped[1], "hooks see the whole sequence"
    layout = Layout(LENGTH, 2, 2 if case.endswith("ulysses") else 1)
    for masks in dropped[0].values():
        assert len(masks) == 4
        for mask in masks:
            whole = torch.tensor(mask).view(4, LENGTH, WIDTH).bool()
            assert 0.4 < whole.float().mean() < 0.6
            here, there = (whole[:, layout.positions(rank)] for rank in (0, 1))
            assert 0.15 < (here & there).float().mean() < 0.35, "the ranks' masks have nothing to do with each other"
        assert masks[0] != masks[1]
    assert len(dropped[0]) == 5


@pytest.mark.parametrize("backend", tiered(["gather", "ulysses"], ["ulysses"], ["gather"]))
def test_dropout_of_attention(one: Group, two: Group, backend: str) -> None:
    found = [two.read(f"dropout-of-attention-{backend}", rank) for rank in (0, 1)]
    assert found[0]["first"] == found[1]["first"] == found[0]["again"]
    for name in ("recomputed", "selected"):
        for what in ("losses", "norms"):
            assert differences(found[0]["first"][what], found[0][name][what], TOLERANCE, f"{name} {what}") == []
    losses, without = found[0]["first"]["losses"], one.read("nanogpt")["first"]["losses"]
    assert all(0 < loss < 20 for loss in losses)
    assert losses != found[0]["other"]["losses"]
    assert all(abs(loss - other) > 1e-4 for loss, other in zip(losses, without, strict=True))


@pytest.mark.parametrize(
    "case",
    tiered(
        [name for name in GROUPS["two"] if name.startswith("resume-")],
        ["resume-cp2-from-1", "resume-dp2-from-cp2"],
        ["resume-cp2-from-cp2"],
    ),
)
def test_a_run_goes_on_with_another_axis(one: Group, two: Group, case: str) -> None:
    source = case.rpartition("-")[2]
    (one if source == "1" else two).read_all(f"save-{source}")
    assert went_on(one.read("uninterrupted"), two, case, TOLERANCE) == []


@pytest.mark.parametrize("case", [name for name in GROUPS["back"] if "dp2xcp2" not in name])
def test_a_run_goes_on_in_one_process(one: Group, two: Group, back: Group, case: str) -> None:
    two.read_all(f"save-{case.rpartition('-')[2]}")
    assert went_on(one.read("uninterrupted"), back, case, TOLERANCE) == []


@pytest.mark.full
@pytest.mark.parametrize("heads", ["own", "multi"])
def test_attention_is_not_gathered_where_a_block_calls_it_itself(two: Group, heads: str) -> None:
    """What is tried out and found wrong would be gathered, so this says that its numbers are right, too."""
    for run in two.read_all(f"how-{heads}"):
        assert run == {f"model.blocks.{number}": [["OPENED"], 2048, ["cumsum"]] for number in (0, 1)}
