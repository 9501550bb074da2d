"""Context parallelism through the real command: every backend that can be typed reaches the engine.

What a mesh with an axis cp computes is shown by the engine's own tests (tests/context).
"""

from __future__ import annotations

import pytest
import torch

from tests.support.commands import Commands, Run, assert_same_curve

TINY = (
    *("data=synthetic", "data.seq_len=32", "data.batch_size=4", "data.vocab_size=64"),
    *("data.num_validation_sequences=6", "model.vocab_size=67", "model.hidden_size=36", "model.head_dim=10"),
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
def ring(command: Commands) -> Run:
    return command("mesh=1x1x1x2", "cp=ring")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param("mesh=1x1x1x2 cp=ring", "ring · 2 ranks · 32 → 16 tokens per rank", id="ring"),
        pytest.param(
            "mesh=1x1x1x4 cp=usp recompute=selective", "usp · 4 ranks", id="usp-selective", marks=pytest.mark.full
        ),
        pytest.param("mesh=dp2xcp2 dp=fsdp data.microbatches=2", "gather · 2 ranks", id="default-with-dp"),
        pytest.param(
            "mesh=1x2x1x2 cp=ulysses mp=seq_parallel recompute=full",
            "ulysses · 2 ranks",
            id="ulysses-with-mp",
            marks=pytest.mark.every,
        ),
    ],
)
def test_losses_and_norms_of_one_process(command: Commands, arguments: str, shown: str, alone: Run) -> None:
    found = command(*arguments.split())
    assert_same_curve(found, alone)
    assert f"cp         {shown}" in found.screen


def test_a_checkpoint_serves_other_meshes(command: Commands, alone: Run, ring: Run) -> None:
    expected = command("validate", "mesh=1", f"ckpt_path={ring.checkpoint}").summary["metrics"]
    found = command("validate", "mesh=cp2", "cp=gather", f"ckpt_path={ring.checkpoint}").summary["metrics"]
    assert len(found) > 0
    assert found == pytest.approx(expected, rel=1e-4)


def test_predictions_are_whole(command: Commands, ring: Run) -> None:
    expected, found = (
        sorted((command("predict", *mesh, f"ckpt_path={ring.checkpoint}").directory / "predictions").iterdir())
        for mesh in (("mesh=1",), ("mesh=cp2", "cp=ring"))
    )
    assert [file.name for file in found] == [file.name for file in expected] != []
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(torch.load(other, weights_only=True), torch.load(one, weights_only=True))


def test_the_summary_counts_every_token_once(alone: Run, ring: Run) -> None:
    """Ranks along cp work on the same sequences: they don't make more of them."""
    one, found = alone.summary, ring.summary
    assert found["mesh"] == "1x1x1x2" and found["world_size"] == 2
    assert found["steps"] == one["steps"] == 3 and found["parameters"] == one["parameters"]
    assert [row["tokens"] for row in ring.rows] == [4 * 32 * step for step in range(1, 4)]


def test_what_is_refused_before_anything_starts(command: Commands) -> None:
    """One of the messages of tests/config/test_cp_messages.py."""
    refused = command("mesh=cp2", "data.seq_len=31", "cp.pad=false", code=2)
    assert refused.screen.startswith("data.seq_len=31: ") and "Traceback" not in refused.screen
    assert not refused.directory.exists()
