"""Context parallelism through the real command: what a mesh computes is what one process computes."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.test_mp import Command, rows, summary
from tests.support.ranks import start

TINY = (
    *("data=synthetic", "data.seq_len=32", "data.batch_size=4", "data.vocab_size=64"),
    *("data.num_validation_sequences=4", "model.vocab_size=67", "model.hidden_size=36", "model.head_dim=10"),
    *("model.intermediate_size=49", "model.num_layers=2", "trainer.accelerator=cpu", "trainer.max_steps=4"),
    *("trainer.gradient_clip_val=0.5", "trainer.enable_progress_bar=false"),
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs `autolaunch ARGUMENTS` once, however often it is asked for; returns the output directory."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(*arguments: str) -> Path:
        directory = root / str(len(list(root.iterdir())))
        directory.mkdir()
        # what is given comes last, so that it may differ from TINY
        task, given = arguments[:1] if "=" not in arguments[0] else (), arguments
        line = [sys.executable, "-m", "autolaunch", *task, *TINY, *given[len(task) :], f"output_dir={directory}"]
        done = start(line, timeout=120)
        assert done.returncode == 0, done.stdout[-6000:]
        (directory / "screen.txt").write_text(done.stdout)
        return directory

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        "mesh=1x1x1x2 cp=ring",
        "mesh=1x1x1x4 cp=usp recompute=selective",
        "mesh=dp2xcp2 dp=fsdp data.microbatches=2",  # cp=gather
        "mesh=1x2x1x2 cp=ring mp=seq_parallel recompute=full",
    ],
)
def test_losses_and_norms_of_one_process(command: Command, arguments: str) -> None:
    expected, found = rows(command("mesh=1")), rows(command(*arguments.split()))
    assert len(found) == 4
    assert found == [pytest.approx(row, rel=1e-4) for row in expected]


def test_a_checkpoint_serves_other_meshes(command: Command) -> None:
    (checkpoint,) = (command("mesh=dp2xcp2", "dp=fsdp", "data.microbatches=2") / "checkpoints").iterdir()
    expected = summary(command("validate", "mesh=1", "data.microbatches=2", f"ckpt_path={checkpoint}"))
    found = summary(command("validate", "mesh=cp2", "cp=ring", "data.microbatches=2", f"ckpt_path={checkpoint}"))
    assert len(found) > 0
    assert found == pytest.approx(expected, rel=1e-4)


def test_predictions_are_whole(command: Command) -> None:
    (checkpoint,) = (command("mesh=1x1x1x2", "cp=ring") / "checkpoints").iterdir()
    expected, found = (
        sorted((command("predict", *mesh, f"ckpt_path={checkpoint}") / "predictions").iterdir())
        for mesh in (("mesh=1",), ("mesh=cp2", "cp=ring"))
    )
    assert [file.name for file in found] == [file.name for file in expected] != []
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(torch.load(other, weights_only=True), torch.load(one, weights_only=True))


def test_the_summary_counts_every_token_once(command: Command) -> None:
    """Ranks along cp work on the same sequences: they don't make more of them."""
    one, found = (json.loads((command(*line) / "summary.json").read_text()) for line in (
        ("mesh=1",), ("mesh=1x1x1x2", "cp=ring"),
    ))  # fmt: skip
    assert found["mesh"] == "1x1x1x2" and found["world_size"] == 2
    assert found["steps"] == one["steps"] == 4 and found["parameters"] == one["parameters"]
    tokens = [
        line.split(",")
        for line in (command("mesh=1x1x1x2", "cp=ring") / "metrics.csv").read_text().splitlines()
    ]  # fmt: skip
    column = tokens[0].index("tokens")
    assert [float(line[column]) for line in tokens[1:]] == [4 * 32 * step for step in range(1, 5)]


def test_the_start_says_how_cp_divides(command: Command) -> None:
    screen = (command("mesh=1x1x1x2", "cp=ring") / "screen.txt").read_text()
    assert "cp         ring · 2 ranks · 32 → 16 tokens per rank" in screen


REFUSED = {
    "mesh=cp2 data.seq_len=31": "31",
    "mesh=cp2 cp=none": "the mesh has 2 ranks along cp, but cp=none uses only one",
    "mesh=cp2 cp=rings": "ring",
    "mesh=cp4 cp=ulysses model.num_heads=6 model.num_kv_heads=2": "heads",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_refused_before_anything_starts(tmp_path: Path, arguments: str) -> None:
    line = [sys.executable, "-m", "autolaunch", *TINY, *arguments.split(), f"output_dir={tmp_path}"]
    done = start(line, timeout=30)
    assert done.returncode == 2, done.stdout
    assert REFUSED[arguments] in done.stdout and "Traceback" not in done.stdout
