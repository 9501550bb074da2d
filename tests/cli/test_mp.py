"""Model parallelism through the real command: what a mesh computes is what one process computes."""

from __future__ import annotations

import csv
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.ranks import start

# No size can be shared evenly by 2 or 4 ranks, but for the heads; 2 key/value heads are fewer than 4 ranks.
TINY = (
    *("data=synthetic", "data.seq_len=33", "data.batch_size=8", "data.vocab_size=64"),
    *("data.num_validation_sequences=8", "model.vocab_size=67", "model.hidden_size=36", "model.head_dim=10"),
    *("model.intermediate_size=49", "model.num_layers=2", "trainer.accelerator=cpu", "trainer.max_steps=4"),
    *("trainer.gradient_clip_val=0.5", "trainer.enable_progress_bar=false"),
)

Command = Callable[..., Path]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs `autolaunch ARGUMENTS` once, however often it is asked for; returns the output directory."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(*arguments: str) -> Path:
        directory = root / str(len(list(root.iterdir())))
        directory.mkdir()
        done = start([sys.executable, "-m", "autolaunch", *arguments, *TINY, f"output_dir={directory}"], timeout=120)
        assert done.returncode == 0, done.stdout[-6000:]
        (directory / "screen.txt").write_text(done.stdout)
        return directory

    return run


def rows(directory: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of every step."""
    with (directory / "metrics.csv").open() as file:
        return [(float(row["loss"]), float(row["grad_norm"])) for row in csv.DictReader(file)]


def summary(directory: Path) -> dict[str, float]:
    return json.loads((directory / "summary.json").read_text())["metrics"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("mesh=1x2 mp=tensor_parallel data.microbatches=2 recompute=selective", id="1x2-tp-selective"),
        pytest.param("mesh=1x2 mp=seq_parallel recompute=full", id="1x2-sp-full"),
        pytest.param("mesh=1x2 mp=auto", id="1x2-auto"),
        pytest.param("mesh=1x4 mp=tensor_parallel recompute=full", id="1x4-tp-full"),
        pytest.param("mesh=1x4 mp=seq_parallel recompute=selective", id="1x4-sp-selective"),
        pytest.param("mesh=2x2 mp=tensor_parallel dp=ddp", id="2x2-tp-level-0"),
        pytest.param("mesh=2x2 mp=seq_parallel dp=zero1 data.microbatches=2", id="2x2-sp-level-1"),
        pytest.param("mesh=2x2 mp=tensor_parallel dp=zero2 data.microbatches=2", id="2x2-tp-level-2"),
        pytest.param("mesh=2x2 mp=seq_parallel dp=fsdp", id="2x2-sp-level-3"),
    ],
)
def test_losses_and_norms_of_one_process(command: Command, arguments: str) -> None:
    expected, found = rows(command("mesh=1")), rows(command(*arguments.split()))
    assert found == [pytest.approx(row, rel=1e-4) for row in expected]


def test_bf16(command: Command) -> None:
    expected = rows(command("mesh=1", "precision=bf16-mixed"))
    assert rows(command("mesh=1x2", "mp=seq_parallel", "precision=bf16-mixed")) == [
        pytest.approx(row, rel=1e-2) for row in expected
    ]


@pytest.mark.parametrize(
    "arguments", [("mesh=1x2", "mp=auto"), ("mesh=2x2", "mp=seq_parallel", "dp=fsdp")], ids=["1x2", "2x2"]
)
def test_exported_weights_of_one_process(command: Command, arguments: tuple[str, ...]) -> None:
    exported = []
    for run in (command("mesh=1"), command(*arguments)):
        (checkpoint,) = (run / "checkpoints").iterdir()
        exported.append(load_file(command("export", f"ckpt_path={checkpoint}") / "export" / "model.safetensors"))
    expected, found = exported
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_other_tasks_of_one_process(command: Command) -> None:
    (checkpoint,) = (command("mesh=2x2", "mp=seq_parallel", "dp=fsdp") / "checkpoints").iterdir()
    for task in ("validate", "test"):
        expected = summary(command(task, "mesh=1", f"ckpt_path={checkpoint}"))
        found = summary(command(task, "mesh=1x2", "mp=seq_parallel", f"ckpt_path={checkpoint}"))
        assert len(found) > 0
        assert found == pytest.approx(expected, rel=1e-4)


def test_predictions_are_whole(command: Command) -> None:
    (checkpoint,) = (command("mesh=2x2", "mp=seq_parallel", "dp=fsdp") / "checkpoints").iterdir()
    expected, found = (
        sorted((command("predict", *mesh, f"ckpt_path={checkpoint}") / "predictions").iterdir())
        for mesh in (("mesh=1",), ("mesh=1x2", "mp=tensor_parallel"))
    )
    assert [file.name for file in found] == [file.name for file in expected] != []
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(
            torch.load(other, weights_only=True), torch.load(one, weights_only=True), rtol=1e-4, atol=1e-5
        )


def test_the_start_says_how_mp_divides_the_model(command: Command) -> None:
    assert (
        "mp         seq_parallel · 8 rules"
        in (command("mesh=1x2", "mp=seq_parallel", "recompute=full") / "screen.txt").read_text()
    )


def test_a_plan_is_shown_with_reasons_and_can_be_run(command: Command) -> None:
    typed = (
        r"+mp.plan={lm_head: null, model.layers.*.mlp.\(gate|up\)_proj: [ColWiseParallel], lm_haed: RowWiseParallel}"
    )
    planned = command("plan", "mesh=1x2", "mp=tensor_parallel", typed)
    screen = " ".join((planned / "screen.txt").read_text().split())
    assert "mp tensor_parallel · 5 rules · 1 rule matching nothing" in screen
    assert "mp model.layers.*.self_attn.(q|k|v)_proj: ColWiseParallel (6 modules; the model's plan)" in screen
    assert "mp model.layers.*.mlp.(gate|up)_proj: ColWiseParallel (4 modules; mp.plan)" in screen
    assert "mp.plan: lm_haed matches nothing; the nearest names are lm_head" in screen
    written = yaml.safe_load((planned / "plan.yaml").read_text())
    assert written["mp"] == {
        "name": "tensor_parallel",
        "base": "none",
        "sequence_parallel": False,
        "plan": {
            "model.embed_tokens": "RowWiseParallel",
            "model.layers.*.self_attn.(q|k|v)_proj": "ColWiseParallel",
            "model.layers.*.self_attn.o_proj": "RowWiseParallel",
            "model.layers.*.mlp.(gate|up)_proj": "ColWiseParallel",
            "model.layers.*.mlp.down_proj": "RowWiseParallel",
        },
    }
    again = command(f"experiment={planned / 'plan.yaml'}")
    assert yaml.safe_load((again / "plan.yaml").read_text())["mp"] == written["mp"]
    assert rows(again) == [pytest.approx(row, rel=1e-4) for row in rows(command("mesh=1"))]


def test_a_plan_in_a_file_of_ones_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mp").mkdir()
    (tmp_path / "mp" / "mine.yaml").write_text(
        "name: mine\nbase: none\nplan:\n  .*mlp.(gate|up)_proj: ColWiseParallel\n  .*mlp.down_proj: RowWiseParallel\n"
        "  model.embed_tokens.weight: ColWiseParallel\n  lm_head: {ColWiseParallel: {gather_output: true}}\n"
    )
    found = command(f"--config-dir={tmp_path}", "mesh=1x2", "mp=mine")
    assert rows(found) == [pytest.approx(row, rel=1e-4) for row in rows(command("mesh=1"))]
    assert "mp         mine · 4 rules" in (found / "screen.txt").read_text()
