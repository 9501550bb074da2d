"""`autolaunch dryrun`: what it says of jobs, built-in and of users, beside the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autolaunch.planning.dryrun import NOT_COMPILED
from autolaunch_strategies.dry_run.step import EVEN
from tests.support.commands import Commands

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]  # torch and lightning, for each again

IMAGES = (
    *("module._target_=tests.dry_run.images.Classifier", "data=custom", "data._target_=tests.dry_run.images.Images"),
    "+data.batch_size=32",
)


def ranks(commands: Commands, *arguments: str) -> list[dict[str, Any]]:
    done = commands("dryrun", *arguments)
    return json.loads((done.directory / "dryrun.json").read_text())["ranks"]


def test_it_plans_what_it_runs(tmp_path: Path) -> None:
    """Also where the job leaves the number of microbatches to the schedule: with two it would be twice as much."""
    dryrun = Commands(tmp_path, "model=llama", "model.size=debug", "data=synthetic", "data.batch_size=16")
    for mesh in (["mesh=1x1x2", "pp=1f1b"], ["mesh=2x1x1x2", "cp=ring"]):
        for rank in ranks(dryrun, *mesh):
            assert rank["predicted"]["total"] == pytest.approx(rank["memory"]["total"], rel=0.05)
            assert rank["notes"] == []


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.every)])
def test_a_module_of_ones_own_is_run_and_planned_on_the_first_batch_of_its_data(apart: bool, tmp_path: Path) -> None:
    """Also if its step calls parts of a model by themselves."""
    dryrun = Commands(tmp_path, *IMAGES, f"+module.apart={apart}")
    (first, _) = ranks(dryrun, "mesh=2", "dp=ddp")
    convolved = 16 * 32 * 20 * 20 * 4  # half of the batch, channels, pixels: kept before and after ReLU
    assert convolved < first["memory"]["activations"] < 4 * convolved
    assert first["predicted"]["total"] == pytest.approx(first["memory"]["total"], rel=0.15)


def test_layers_that_join_a_batch_or_hold_lists_of_weights(tmp_path: Path) -> None:
    """Counts of values are values, of which there are none; LSTMs refer to weights weakly; no block is repeated."""
    dryrun = Commands(tmp_path, *IMAGES, "+module.kinds=true")
    first, _ = ranks(dryrun, "mesh=2")
    assert sum(item["bytes"] == 4 * 33 for item in first["collectives"]) == 1  # sums of 32 channels, and the count
    cut = dryrun("dryrun", "mesh=1x1x2")
    assert "0 repeated blocks" in " ".join(cut.screen.split())


def test_what_can_not_be_run_is_said(tmp_path: Path) -> None:
    dryrun = Commands(tmp_path, *IMAGES)
    fails = dryrun("dryrun", "mesh=2", "+data.fails=true", code=2).screen
    assert "data=custom: its first batch can't be read: no images here" in fails
    manual = dryrun("dryrun", "mesh=2", "+module.manual=true", code=2).screen
    assert "dryrun with Classifier: it calls its optimizers itself" in manual


@pytest.mark.every
def test_what_a_plan_compiles_is_run_as_it_is_which_is_said(tmp_path: Path) -> None:
    dryrun = Commands(tmp_path, "model=llama", "model.size=debug", "data=synthetic", "data.batch_size=16", "mesh=1x2")
    (compiled, other), as_it_is = ranks(dryrun, "compile=true"), ranks(dryrun)
    assert (compiled.pop("notes"), other.pop("notes")) == ([NOT_COMPILED], [])
    assert [compiled, other] == [{key: value for key, value in rank.items() if key != "notes"} for rank in as_it_is]


@pytest.mark.every  # test_experts.py has them without a command
def test_experts_are_taken_to_be_even(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, moe_intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, num_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    dryrun = Commands(tmp_path, "model=hf", "model.pretrained=false", f"model.path={tmp_path / 'model'}")
    done = dryrun("dryrun", "mesh=2", "ep=2", "data=synthetic", "data.batch_size=4", "data.seq_len=64")
    (first, _) = json.loads((done.directory / "dryrun.json").read_text())["ranks"]
    assert first["notes"] == [EVEN] and EVEN in " ".join(done.screen.split())
    assert {"kind": "alltoall_base", "axes": "dp", "bytes": 2 * 64 * 2 * 64 * 4, "count": 8} in first["collectives"]
