"""Whole runs through the real command: a mesh changes nothing but the speed; every task leaves what it promises."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from autolaunch.tasks.export import export_checkpoint, trained_config
from tests import ROOT

pytestmark = pytest.mark.timeout(240)

STEPS = 6
TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
]
QUICK = [
    "data.seq_len=32",
    "data.batch_size=8",
    "optimizer.lr=3e-3",
    f"scheduler.total_steps={STEPS}",
    f"trainer.max_steps={STEPS}",
    "trainer.accelerator=cpu",
]
HF = "model=hf model.config.vocab_size=257 model.config.model_type="
QWEN = (
    f"{HF}qwen3 model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.intermediate_size=64 "
    "model.config.num_attention_heads=4 model.config.num_key_value_heads=2 model.config.head_dim=8"
).split()
GPT2 = (
    f"{HF}gpt2 model.config.n_layer=2 model.config.n_embd=32 model.config.n_head=4 model.config.n_positions=32 "
    "model.config.resid_pdrop=0 model.config.embd_pdrop=0 model.config.attn_pdrop=0"
).split()

OWN_MODULE = textwrap.dedent("""
    import lightning as L
    import torch
    from torch import nn


    class Bigram(L.LightningModule):
        def __init__(self, width, fail_at=None):
            super().__init__()
            self.embedding, self.head, self.fail_at = nn.Embedding(257, width), nn.Linear(width, 257), fail_at

        def training_step(self, batch, batch_idx):
            if self.global_step == self.fail_at:
                raise ValueError("this model fails on purpose")
            tokens = batch["input_ids"]
            logits = self.head(self.embedding(tokens[:, :-1]))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)
""")


@dataclass
class Run:
    """A command that has ended."""

    code: int
    screen: str
    directory: Path

    @property
    def rows(self) -> list[dict[str, float]]:
        """metrics.csv."""
        with (self.directory / "metrics.csv").open() as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoints" / f"step_{self.summary['steps']:07d}.ckpt"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of every command, with a module of the user's own in it."""
    directory = tmp_path_factory.mktemp("first_run")
    (directory / "bigram.py").write_text(OWN_MODULE)
    return directory


@pytest.fixture(scope="module")
def command(workplace: Path) -> Callable[..., Run]:
    """Runs `autolaunch <arguments>` in a process of its own, once for all tests that ask for the same arguments."""
    ended: dict[tuple[Any, ...], Run] = {}
    paths = [str(ROOT / "launcher"), str(ROOT / "strategies"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def run(*arguments: str | Path, starter: tuple[str, ...] = (), into: Path | None = None, code: int = 0) -> Run:
        if (arguments, starter) not in ended:
            directory = into or workplace / f"run_{len(ended)}"
            started = subprocess.run(
                [sys.executable, "-m", *starter, "autolaunch", *map(str, arguments), f"output_dir={directory}"],
                cwd=workplace,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=200,
            )
            ended[arguments, starter] = Run(started.returncode, started.stdout, directory)
        result = ended[arguments, starter]
        assert result.code == code, result.screen
        return result

    return run


@pytest.fixture(scope="module")
def alone(command: Callable[..., Run]) -> Run:
    """The run on one rank that all others are compared with."""
    return command(*TINY, *QUICK, "mesh=1")


def assert_same_curve(run: Run, reference: Run, steps: range = range(1, STEPS + 1), tolerance: float = 1e-4) -> None:
    rows = {int(row["step"]): row for row in run.rows}
    expected = {int(row["step"]): row for row in reference.rows}
    assert list(rows) == list(steps)
    for step in steps:
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert rows[step][name] == pytest.approx(expected[step][name], rel=tolerance), f"{name} at step {step}"


def weights(run: Run, target: Path) -> dict[str, torch.Tensor]:
    """The final weights, whole, by the model's own names."""
    if not target.exists():
        export_checkpoint(run.checkpoint, target, trained_config(run.checkpoint) or {})
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("mesh=2 dp=ddp", id="ddp"),
        pytest.param("mesh=2 dp=zero1", id="zero1"),
        pytest.param("mesh=2 dp=zero2", id="zero2"),
        pytest.param("mesh=2 dp=fsdp", id="fsdp"),
        pytest.param("mesh=4 dp=hsdp dp.replicate=2", id="hsdp-on-4"),
        pytest.param("mesh=2 dp=fsdp data.microbatches=2", id="microbatches"),
        pytest.param("mesh=2 dp=zero2 data.microbatches=2 recompute=full", id="microbatches-recompute"),
        pytest.param("mesh=2 recompute=selective data.num_workers=1", id="selective-recompute-loader-worker"),
        pytest.param("mesh=2 compile=true", id="compile"),
    ],
)
def test_every_mesh_trains_alike(arguments: str, command: Callable[..., Run], alone: Run, tmp_path: Path) -> None:
    run = command(*TINY, *QUICK, *arguments.split())
    assert_same_curve(run, alone)
    expected = weights(alone, alone.directory / "export")
    found = weights(run, tmp_path / "export")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_loss_falls(alone: Run) -> None:
    assert alone.rows[-1]["loss"] < alone.rows[0]["loss"] - 0.1


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(QWEN, id="qwen3"),
        pytest.param(GPT2, id="gpt2"),
        pytest.param(["module._target_=bigram.Bigram", "module.width=16"], id="own-lightning-module"),
        pytest.param([*TINY, "data=tokens", "data.path=tokens.npy", "model.vocab_size=257"], id="tokens"),
        pytest.param([*TINY, "data=synthetic", "optimizer=sgd"], id="synthetic-sgd"),
    ],
)
def test_every_model_and_data_train_alike(model: list[str], command: Callable[..., Run], workplace: Path) -> None:
    if not (workplace / "tokens.npy").exists():
        np.save(workplace / "tokens.npy", np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16))
    one, two = command(*model, *QUICK, "mesh=1"), command(*model, *QUICK, "mesh=2")
    assert_same_curve(two, one)


def test_bf16_mixed_is_close_to_fp32(command: Callable[..., Run], alone: Run) -> None:
    run = command(*TINY, *QUICK, "mesh=2", "precision=bf16-mixed")
    assert [row["loss"] for row in run.rows] == pytest.approx([row["loss"] for row in alone.rows], rel=1e-3)


def test_bf16_true_is_alike_on_every_mesh(command: Callable[..., Run]) -> None:
    one, two = (command(*TINY, *QUICK, f"mesh={ranks}", "precision=bf16-true") for ranks in (1, 2))
    assert [row["loss"] for row in two.rows] == pytest.approx([row["loss"] for row in one.rows], rel=0.01)


@pytest.fixture(scope="module")
def half(command: Callable[..., Run]) -> Run:
    """A run that ended half way."""
    return command(*TINY, *QUICK, "mesh=2", "dp=fsdp", f"trainer.max_steps={STEPS // 2}")


@pytest.mark.parametrize(
    "arguments", [pytest.param("mesh=1 dp=ddp", id="to-1-ddp"), pytest.param("mesh=4 dp=hsdp", id="to-4-hsdp")]
)
def test_resume_on_another_mesh(arguments: str, command: Callable[..., Run], alone: Run, half: Run) -> None:
    run = command(*TINY, *QUICK, *arguments.split(), f"ckpt_path={half.checkpoint}")
    assert_same_curve(run, alone, range(STEPS // 2 + 1, STEPS + 1))


def test_a_restarted_job_goes_on_in_its_directory(command: Callable[..., Run], alone: Run, workplace: Path) -> None:
    job = (*TINY, *QUICK, "checkpoint.every_n_steps=2", "ckpt_path=last")
    first = command(*job, "mesh=2", "dp=zero1", "trainer.max_steps=4", into=workplace / "restarted")
    assert_same_curve(first, alone, range(1, 5))
    run = command(*job, "mesh=1", into=workplace / "restarted")
    assert_same_curve(run, alone)
    kept = {path.name for path in (run.directory / "checkpoints").iterdir()}
    assert kept == {"step_0000004.ckpt", "step_0000006.ckpt"}


def test_what_a_run_leaves(command: Callable[..., Run]) -> None:
    run = command(*TINY, *QUICK, "mesh=2", "dp=fsdp")
    assert {path.name for path in run.directory.iterdir()} >= {
        ".hydra", "plan.yaml", "metrics.csv", "summary.json", "checkpoints", "logs",
    }  # fmt: skip
    assert {"rank_0.log", "rank_1.log"} <= {path.name for path in (run.directory / "logs").iterdir()}
    assert (run.directory / "metrics.csv").read_text().splitlines()[0] == "step,loss,grad_norm,lr,tokens,step_time_s"
    summary = run.summary
    assert list(summary) == [
        "task", "status", "world_size", "mesh", "steps", "loss", "tokens_per_second", "step_time_s",
        "peak_memory_bytes", "parameters", "checkpoint", "seconds",
    ]  # fmt: skip
    assert {name: summary[name] for name in ("task", "status", "world_size", "mesh", "steps", "checkpoint")} == {
        "task": "fit", "status": "finished", "world_size": 2, "mesh": "2", "steps": STEPS,
        "checkpoint": str(run.checkpoint),
    }  # fmt: skip
    assert summary["loss"] == run.rows[-1]["loss"]
    assert run.rows[-1]["tokens"] == STEPS * 8 * 32
    assert "finished" in run.screen and "loss" in run.screen


def test_a_run_is_repeated_from_its_plan(command: Callable[..., Run], alone: Run) -> None:
    first = command(*TINY, *QUICK, "mesh=2", "dp=zero1")
    assert_same_curve(command(f"experiment={first.directory / 'plan.yaml'}"), alone)


def test_plan_starts_nothing(command: Callable[..., Run]) -> None:
    run = command("plan", "model.size=8b", "mesh=64", "data.batch_size=64", "trainer.accelerator=gpu")
    assert (run.summary["task"], run.summary["world_size"]) == ("plan", 64)
    assert (run.directory / "plan.yaml").is_file()
    assert not (run.directory / "metrics.csv").exists()


def test_validate_and_test_agree_on_every_mesh(command: Callable[..., Run], alone: Run) -> None:
    checkpoint = f"ckpt_path={alone.checkpoint}"
    one = command("validate", *TINY, *QUICK, "mesh=1", checkpoint).summary
    two = command("validate", *TINY, *QUICK, "mesh=2", checkpoint).summary
    tested = command("test", *TINY, *QUICK, "mesh=2", "dp=zero1", checkpoint).summary
    assert two["metrics"]["val_loss"] == pytest.approx(one["metrics"]["val_loss"], rel=1e-5)
    assert tested["metrics"]["test_loss"] == pytest.approx(one["metrics"]["val_loss"], rel=1e-5)
    assert (two["task"], two["status"], tested["task"]) == ("validate", "finished", "test")


def test_export_is_what_transformers_loads(command: Callable[..., Run], alone: Run, tmp_path: Path) -> None:
    command("export", f"ckpt_path={alone.checkpoint}", f"export_path={tmp_path / 'exported'}")
    native = command("validate", *TINY, *QUICK, "mesh=1", f"ckpt_path={alone.checkpoint}").summary
    loaded = command("validate", "model=hf", f"model.path={tmp_path / 'exported'}", *QUICK, "mesh=2").summary
    assert loaded["metrics"]["val_loss"] == pytest.approx(native["metrics"]["val_loss"], rel=1e-5)


def test_predict_writes_files(command: Callable[..., Run], alone: Run) -> None:
    limited = (*TINY, *QUICK, "mesh=2", "trainer.limit_predict_batches=2", f"ckpt_path={alone.checkpoint}")
    run = command("predict", *limited)
    assert sorted(path.name for path in (run.directory / "predictions").iterdir()) == [
        f"batch_{batch:06d}_part_{part:05d}.pt" for batch in range(2) for part in range(2)
    ]


def test_torchrun(command: Callable[..., Run], alone: Run) -> None:
    starter = ("torch.distributed.run", "--nproc-per-node", "2", "-m")
    run = command(*TINY, *QUICK, "mesh=2", "dp=zero2", "seed=0", starter=starter)
    assert_same_curve(run, alone)


def test_a_failure_is_told(command: Callable[..., Run]) -> None:
    failing = ("module._target_=bigram.Bigram", "module.width=16", "module.fail_at=2")
    run = command(*failing, *QUICK, "mesh=2", code=1)
    assert "ValueError: this model fails on purpose" in run.screen
    assert (run.summary["status"], run.summary["steps"]) == ("failed", 2)
    assert len(run.rows) == 2


def test_a_wrong_config_is_told(command: Callable[..., Run]) -> None:
    run = command("model=llama", "data.batch_size=7", "mesh=2", code=2)
    assert run.screen.startswith("data.batch_size=7: ")
    assert not run.directory.exists()


@pytest.mark.parametrize("task", ["plan", "fit"])
def test_a_reader_that_leaves_early_ends_nothing(task: str, tmp_path: Path) -> None:
    words = [sys.executable, "-u", "-m", "autolaunch", task, *TINY, *QUICK, f"output_dir={tmp_path / 'out'}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "launcher"), str(ROOT / "strategies")])}
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert (process.returncode, json.loads((tmp_path / "out/summary.json").read_text())["status"]) == (0, "finished"), (
        said
    )
    assert "Traceback" not in said
