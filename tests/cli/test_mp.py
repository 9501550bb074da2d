"""Model parallelism through the real command: plans that are typed, written, repeated or one's own reach the engine.

What a mesh with an axis mp computes is shown by the engine's own tests (tests/loop, tests/tensor); here is one run for
each way in which the command is told how.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autolaunch.config.trained import trained_config
from autolaunch.tasks.export import export_checkpoint
from tests.support.commands import Commands, Run, assert_same_curve

# No size can be shared evenly by 2 or 4 ranks, but for the heads; 2 key/value heads are fewer than 4 ranks.
TINY = (
    *("data=synthetic", "data.seq_len=17", "data.batch_size=8", "data.vocab_size=64"),
    *("data.num_validation_sequences=11", "model.vocab_size=67", "model.hidden_size=36", "model.head_dim=10"),
    *("model.intermediate_size=49", "model.num_layers=2", "trainer.accelerator=cpu", "trainer.max_steps=3"),
    *("trainer.gradient_clip_val=0.5", "trainer.enable_progress_bar=false"),
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("runs"), *TINY)


@pytest.fixture(scope="module")
def alone(command: Commands) -> Run:
    """The run of one process."""
    return command("mesh=1")


@pytest.fixture(scope="module")
def four(command: Commands) -> Run:
    """A run of four processes, with all that divides parameters and activations."""
    return command("mesh=2x2", "mp=seq_parallel", "dp=fsdp", "recompute=full")


def test_losses_and_norms_of_one_process(four: Run, alone: Run) -> None:
    assert_same_curve(four, alone)
    assert "mp         seq_parallel · 8 rules" in four.screen


def test_mp_auto(command: Commands, alone: Run) -> None:
    found = command("mesh=1x2", "mp=auto", "data.microbatches=2", "recompute=selective")
    assert_same_curve(found, alone)
    assert "mp         auto · " in found.screen
    assert "each rank holds 5" in found.screen


@pytest.mark.full  # more meshes show numbers only, here of Lightning's loop with an axis mp
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            "mesh=1x2 mp=tensor_parallel data.microbatches=2 recompute=selective",
            id="1x2-tp-selective",
            marks=pytest.mark.every,
        ),
        pytest.param("mesh=1x4 mp=seq_parallel recompute=selective", id="1x4-sp-selective", marks=pytest.mark.every),
        pytest.param(
            "mesh=2x2 mp=seq_parallel dp=zero1 data.microbatches=2", id="2x2-sp-level-1", marks=pytest.mark.every
        ),
        pytest.param("mesh=2x2 mp=tensor_parallel dp=zero2 data.microbatches=2", id="2x2-tp-level-2"),
    ],
)
def test_losses_and_norms_on_more_meshes(command: Commands, arguments: str, alone: Run) -> None:
    assert_same_curve(command(*arguments.split()), alone)


@pytest.mark.full  # numbers only: precision= reaches the engine in test_first_run.py
def test_bf16(command: Commands) -> None:
    one, two = (command(*mesh, "precision=bf16-mixed") for mesh in (("mesh=1",), ("mesh=1x2", "mp=seq_parallel")))
    assert_same_curve(two, one, tolerance=1e-2)


def test_exported_weights_of_one_process(alone: Run, four: Run, tmp_path: Path) -> None:
    exported = []
    for run in (alone, four):
        directory = tmp_path / run.directory.name
        export_checkpoint(run.checkpoint, directory, trained_config(run.checkpoint) or {})
        exported.append(load_file(directory / "model.safetensors"))
    expected, found = exported
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_validation_of_one_process(command: Commands, four: Run) -> None:
    checkpoint = f"ckpt_path={four.checkpoint}"
    expected = command("validate", "mesh=1", checkpoint).summary["metrics"]
    found = command("validate", "mesh=1x2", "mp=seq_parallel", checkpoint).summary["metrics"]
    assert len(found) > 0
    assert found == pytest.approx(expected, rel=1e-4)


def test_predictions_are_whole(command: Commands, four: Run) -> None:
    expected, found = (
        sorted((command("predict", *mesh, f"ckpt_path={four.checkpoint}").directory / "predictions").iterdir())
        for mesh in (("mesh=1",), ("mesh=1x2", "mp=tensor_parallel"))
    )
    assert [file.name for file in found] == [file.name for file in expected] != []
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(
            torch.load(other, weights_only=True), torch.load(one, weights_only=True), rtol=1e-4, atol=1e-5
        )


def test_a_plan_is_shown_with_reasons_and_can_be_run(command: Commands, alone: Run) -> None:
    typed = (
        r"+mp.plan={lm_head: null, model.layers.*.mlp.\(gate|up\)_proj: [ColWiseParallel], lm_haed: RowWiseParallel}"
    )
    planned = command("plan", "mesh=1x2", "mp=tensor_parallel", typed)
    screen = " ".join(planned.screen.split())
    assert "mp tensor_parallel · 5 rules · 1 rule without effect" in screen
    assert "mp model.layers.*.self_attn.(q|k|v)_proj: ColWiseParallel (6 modules; the model's plan)" in screen
    assert "mp model.layers.*.mlp.(gate|up)_proj: ColWiseParallel (4 modules; mp.plan)" in screen
    assert "mp.plan: lm_haed matches nothing; the nearest names are lm_head" in screen
    written = planned.plan["mp"]
    assert written == {
        "name": "tensor_parallel",
        "base": "none",
        "sequence_parallel": False,
        "overlap": False,
        "plan": {
            "model.embed_tokens": "RowWiseParallel",
            "model.layers.*.self_attn.(q|k|v)_proj": "ColWiseParallel",
            "model.layers.*.self_attn.o_proj": "RowWiseParallel",
            "model.layers.*.mlp.(gate|up)_proj": "ColWiseParallel",
            "model.layers.*.mlp.down_proj": "RowWiseParallel",
        },
    }
    again = command(f"experiment={planned.directory / 'plan.yaml'}")
    assert again.plan["mp"] == written
    assert_same_curve(again, alone)


def test_a_plan_in_a_file_of_ones_own(command: Commands, alone: Run, tmp_path: Path) -> None:
    (tmp_path / "mp").mkdir()
    (tmp_path / "mp" / "mine.yaml").write_text(
        "name: mine\nbase: none\nplan:\n  .*mlp.(gate|up)_proj: ColWiseParallel\n  .*mlp.down_proj: RowWiseParallel\n"
        "  model.embed_tokens.weight: ColWiseParallel\n  lm_head: {ColWiseParallel: {gather_output: true}}\n"
    )
    found = command(f"--config-dir={tmp_path}", "mesh=1x2", "mp=mine")
    assert_same_curve(found, alone)
    assert "mp         mine · 4 rules" in found.screen
