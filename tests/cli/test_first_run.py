"""Whole runs through the real command: what is typed reaches the engine; every task leaves what it promises."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from autolaunch import cli
from autolaunch.config.trained import trained_config
from autolaunch.tasks.export import export_checkpoint
from tests.support.commands import Commands, Run, assert_same_curve
from tests.support.messages import Told, assert_only_told
from tests.support.ranks import environment

pytestmark = pytest.mark.timeout(240)

STEPS = 4
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
    "model.num_kv_heads=2",
)
QUICK = (
    *("data.seq_len=32", "data.batch_size=8", "optimizer.lr=3e-3", f"scheduler.total_steps={STEPS}"),
    *(f"trainer.max_steps={STEPS}", "trainer.accelerator=cpu"),
)
HF = "model=hf model.config.vocab_size=257 model.config.model_type="
QWEN = (
    f"{HF}qwen3 model.config.num_hidden_layers=2 model.config.hidden_size=32 model.config.intermediate_size=64 "
    "model.config.num_attention_heads=4 model.config.num_key_value_heads=2 model.config.head_dim=8"
)
GPT2 = (
    f"{HF}gpt2 model.config.n_layer=2 model.config.n_embd=32 model.config.n_head=4 model.config.n_positions=32 "
    "model.config.resid_pdrop=0 model.config.embd_pdrop=0 model.config.attn_pdrop=0"
)

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
            self.log("epoch_loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)
""")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Runs commands in a directory with a file of tokens."""
    directory = tmp_path_factory.mktemp("first_run")
    np.save(directory / "tokens.npy", np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16))
    return Commands(directory, *QUICK, timeout=200)


@pytest.fixture(scope="module")
def own_command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Runs commands with a module of the user's own, which brings its optimizer."""
    directory = tmp_path_factory.mktemp("own_module")
    (directory / "bigram.py").write_text(OWN_MODULE)
    always = (word for word in QUICK if not word.startswith(("optimizer.", "scheduler.")))
    return Commands(directory, *always, "module._target_=bigram.Bigram", "module.width=16", timeout=200)


@pytest.fixture(scope="module")
def alone(command: Commands) -> Run:
    """The run on one rank that all others are compared with; it keeps a checkpoint of half the way, too."""
    return command(*TINY, "mesh=1", f"checkpoint.every_n_steps={STEPS // 2}")


def weights(run: Run, directory: Path) -> dict[str, torch.Tensor]:
    """The final weights, whole, by the model's own names."""
    export_checkpoint(run.checkpoint, directory, trained_config(run.checkpoint) or {})
    return load_file(directory / "model.safetensors")


# --- what is typed reaches the engine ----------------------------------------------------------------------------

# That all of this trains alike, in whatever combination, is shown by the engine's own tests (tests/lightning).


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(
            "mesh=2 dp=ddp recompute=selective data.num_workers=1",
            ["nothing: every rank of dp holds all of it", "recompute selective"],
            id="ddp-selective-recompute-loader-worker",
        ),
        pytest.param(
            "mesh=2 dp=zero2 data.microbatches=2 recompute=full",
            ["256 tokens per step · 2 microbatches", "gradients, optimizer state over dp · 2 blocks", "recompute full"],
            id="zero2-microbatches-recompute",
        ),
    ],
)
def test_a_mesh_trains_alike_and_says_what_it_does(
    arguments: str, shown: list[str], command: Commands, alone: Run
) -> None:
    run = command(*TINY, *arguments.split())
    assert_same_curve(run, alone)
    for words in ("dp 2 · 2 ranks", *shown):
        assert words in run.screen


def test_loss_falls(alone: Run) -> None:
    assert alone.rows[-1]["loss"] < alone.rows[0]["loss"] - 0.1


MODELS_AND_DATA = {
    "gpt2-tokens": (f"{GPT2} data=tokens data.path=tokens.npy", "data       tokens · 8 × 32"),
    "qwen3-synthetic-sgd": (f"{QWEN} data=synthetic data.vocab_size=257 optimizer=sgd", "4 steps · sgd, lr 0.003"),
}


@pytest.mark.parametrize("name", MODELS_AND_DATA)
def test_every_model_and_data_can_be_trained(name: str, command: Commands) -> None:
    arguments, shown = MODELS_AND_DATA[name]
    run = command(*arguments.split(), "mesh=2")
    assert (run.summary["status"], run.summary["world_size"], len(run.rows)) == ("finished", 2, STEPS)
    assert shown in run.screen


def test_a_module_of_ones_own_can_be_trained(own_command: Commands) -> None:
    run = own_command("mesh=2")
    assert (run.summary["status"], run.summary["world_size"], len(run.rows)) == ("finished", 2, STEPS)
    assert "model      bigram.Bigram" in run.screen
    assert "`self.log('epoch_loss', ..., sync_dist=True)`" in run.screen  # it is of the first rank's part of the data


@pytest.mark.full
def test_a_module_of_ones_own_trains_alike(own_command: Commands) -> None:
    assert_same_curve(own_command("mesh=2"), own_command("mesh=1"))


@pytest.mark.full  # the second mesh shows numbers only
@pytest.mark.parametrize("name", MODELS_AND_DATA)
def test_every_model_and_data_train_alike(name: str, command: Commands) -> None:
    one, two = (command(*MODELS_AND_DATA[name][0].split(), f"mesh={ranks}") for ranks in (1, 2))
    assert_same_curve(two, one)


@pytest.fixture(scope="module")
def mixed(command: Commands) -> Run:
    return command(*TINY, "mesh=2", "dp=fsdp", "precision=bf16-mixed")


def test_bf16_mixed_is_close_to_fp32(mixed: Run, alone: Run) -> None:
    losses, expected = ([row["loss"] for row in run.rows] for run in (mixed, alone))
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses != pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_bf16_true_holds_weights_of_two_bytes(command: Commands, tmp_path: Path) -> None:
    run = command(*TINY, "mesh=2", "precision=bf16-true")
    assert {tensor.dtype for tensor in weights(run, tmp_path / "exported").values()} == {torch.bfloat16}


@pytest.mark.full  # the second mesh shows numbers only
def test_bf16_true_is_alike_on_every_mesh(command: Commands) -> None:
    one, two = (command(*TINY, f"mesh={ranks}", "precision=bf16-true") for ranks in (1, 2))
    assert [row["loss"] for row in two.rows] == pytest.approx([row["loss"] for row in one.rows], rel=0.01)


# --- going on ----------------------------------------------------------------------------------------------------


def test_resume_on_another_mesh(command: Commands, alone: Run) -> None:
    run = command(
        *(*TINY, "mesh=4", "dp=hsdp", "dp.replicate=2"), f"ckpt_path={alone.checkpoint_at(STEPS // 2)}"
    )  # fmt: skip
    assert_same_curve(run, alone, after=STEPS // 2)
    assert "parameters, gradients, optimizer state over each replica · 2 replicas · 2 blocks" in run.screen


def test_a_restarted_job_goes_on_in_its_directory(command: Commands, alone: Run, tmp_path: Path) -> None:
    job = (*TINY, "checkpoint.every_n_steps=1", "ckpt_path=last")
    first = command(*job, "mesh=2", "dp=zero1", "trainer.max_steps=3", into=tmp_path)
    assert "optimizer state over dp · 2 blocks" in first.screen
    assert [row["step"] for row in first.rows] == [1, 2, 3]
    run = command(*job, "mesh=1", into=tmp_path)
    assert_same_curve(run, alone)  # metrics.csv has the rows of both
    kept = {path.name for path in (run.directory / "checkpoints").iterdir()}
    assert kept == {"step_0000003.ckpt", "step_0000004.ckpt"}


# --- what a command leaves ---------------------------------------------------------------------------------------


def test_what_a_run_leaves(mixed: Run) -> None:
    assert {path.name for path in mixed.directory.iterdir()} >= {
        ".hydra", "plan.yaml", "metrics.csv", "summary.json", "checkpoints", "logs",
    }  # fmt: skip
    assert {"rank_0.log", "rank_1.log"} <= {path.name for path in (mixed.directory / "logs").iterdir()}
    assert (mixed.directory / "metrics.csv").read_text().splitlines()[0] == "step,loss,grad_norm,lr,tokens,step_time_s"
    summary = mixed.summary
    assert list(summary) == [
        "task", "status", "world_size", "mesh", "steps", "loss", "tokens_per_second", "step_time_s",
        "peak_memory_bytes", "parameters", "checkpoint", "seconds", "restarts",
    ]  # fmt: skip
    assert {name: summary[name] for name in ("task", "status", "world_size", "mesh", "steps", "checkpoint")} == {
        "task": "fit", "status": "finished", "world_size": 2, "mesh": "2", "steps": STEPS,
        "checkpoint": str(mixed.checkpoint),
    }  # fmt: skip
    assert summary["loss"] == mixed.rows[-1]["loss"]
    assert mixed.rows[-1]["tokens"] == STEPS * 8 * 32
    for words in (
        "parameters, gradients, optimizer state over dp · 2 blocks", "bf16-mixed · recompute none · compile off",
        "finished", "loss",
    ):  # fmt: skip
        assert words in mixed.screen


@pytest.mark.full
def test_a_profile_is_written(command: Commands) -> None:
    run = command(*TINY, "mesh=2", "trainer.max_steps=2", "trainer.profiler=simple")
    profiles = sorted(run.directory.glob("fit-profile*"))
    assert profiles and "run_training_batch" in profiles[0].read_text()


def test_plan_starts_nothing(command: Commands) -> None:
    large = ("model.size=8b", "mesh=64", "data.batch_size=64", "compile=true", "trainer.accelerator=gpu")
    run = command("plan", *large)
    assert (run.summary["task"], run.summary["world_size"]) == ("plan", 64)
    assert run.plan["compile"] is True and "compile on" in run.screen
    assert not (run.directory / "metrics.csv").exists()


def test_other_tasks_agree_on_every_mesh(command: Commands, alone: Run, tmp_path: Path) -> None:
    # 137 sequences: in batches of 8, the last one has nothing for the second of two ranks.
    (tmp_path / "test.txt").write_text(("The quick brown fox jumps over the lazy dog. " * 100)[: 137 * 32 + 1])
    checkpoint = f"ckpt_path={alone.checkpoint}"
    validating = command("validate", "mesh=1", checkpoint)  # its model is that of the checkpoint's job
    assert "callbacks" not in validating.screen
    validated = validating.summary
    tested, again = (
        command("test", *TINY, *mesh, f"data.test_path={tmp_path / 'test.txt'}", checkpoint).summary
        for mesh in (("mesh=2", "dp=zero1"), ("mesh=1", "data.batch_size=3"))
    )
    assert tested["metrics"]["test_loss"] == pytest.approx(again["metrics"]["test_loss"], rel=1e-5)
    assert tested["metrics"]["test_loss"] != pytest.approx(validated["metrics"]["val_loss"], rel=1e-5)
    assert [(summary["task"], summary["status"]) for summary in (validated, tested)] == [
        ("validate", "finished"),
        ("test", "finished"),
    ]


def test_a_run_is_evaluated_by_what_its_job_says(
    command: Commands, alone: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    taken = ["validate", f"ckpt_path={alone.directory}", "trainer.accelerator=cpu"]
    assert cli.run([*taken, "data.batch_size=4", "--cfg", "job"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    # What is typed wins; mesh, trainer and everything else that is about the run and not the weights is today's.
    assert (config["data"]["seq_len"], config["data"]["batch_size"], config["trainer"]["max_steps"]) == (32, 4, None)
    assert (config["model"]["hidden_size"], config["model"]["num_layers"]) == (32, 2)
    assert cli.run([*taken, "data=synthetic", "--cfg", "job", "--package", "data"]) == 0
    assert "seq_len: 256" in capsys.readouterr().out
    assert cli.run([*taken, "model.hidden_size=64", "seed=3"]) == 2
    told = Told(
        f"ckpt_path={alone.directory} with model.hidden_size=64",
        "another model (hidden_size 32 there, 64 here",
        write=f"autolaunch validate ckpt_path={alone.directory} trainer.accelerator=cpu seed=3",
    )
    assert_only_told(capsys.readouterr().err, told)
    assert cli.run([*taken, f"ckpt_path={tmp_path}"]) == 2
    assert list(tmp_path.iterdir()) == []
    shutil.copytree(alone.directory, "other")
    job = Path("other/.hydra/job.json")
    job.write_text(job.read_text().replace('"seq_len": 32', '"seq_len": 16'))
    capsys.readouterr()
    assert cli.run(["-m", *taken[:1], f"ckpt_path={alone.directory},other", *taken[2:]]) == 2
    assert_only_told(capsys.readouterr().err, Told(f"-m with ckpt_path={alone.directory}", "trained other models"))


def test_export_is_what_transformers_loads(command: Commands, alone: Run, tmp_path: Path) -> None:
    # In the directory of the run: its job stays the one that says what its checkpoints are.
    command("export", "ckpt_path=last", f"export_path={tmp_path / 'exported'}", into=alone.directory)
    native = command("validate", *TINY, "mesh=1", f"ckpt_path={alone.checkpoint}").summary
    loaded = command("validate", "model=hf", f"model.path={tmp_path / 'exported'}", "mesh=2").summary
    assert loaded["metrics"]["val_loss"] == pytest.approx(native["metrics"]["val_loss"], rel=1e-5)


def test_predict_writes_what_each_rank_has_of_each_batch(command: Commands, alone: Run) -> None:
    data = ("data=synthetic", "data.num_validation_sequences=9")
    run = command("predict", *TINY, *data, "mesh=2", f"ckpt_path={alone.checkpoint}")
    rows = {file.stem: len(torch.load(file, weights_only=True)) for file in (run.directory / "predictions").iterdir()}
    assert rows == {"batch_000000_part_00000": 4, "batch_000000_part_00001": 4, "batch_000001_part_00000": 1}


# --- how it starts and ends --------------------------------------------------------------------------------------


@pytest.mark.every  # tests/launch/test_place.py starts torchrun every day
def test_real_torchrun_in_new_processes(command: Commands, alone: Run) -> None:
    run = command(*TINY, "mesh=2", "seed=0", torchrun=2)
    assert_same_curve(run, alone)


def test_a_failure_is_told(own_command: Commands) -> None:
    run = own_command("module.fail_at=2", "mesh=2", code=1)
    assert "ValueError: this model fails on purpose" in run.screen
    # Whichever rank fails first ends the other; rank 0 may not have written its second row by then.
    assert (run.summary["status"], run.summary["steps"]) == ("failed", len(run.rows))
    assert len(run.rows) in (1, 2)


def test_a_wrong_config_is_told(command: Commands) -> None:
    run = command("model=llama", "data.batch_size=7", "mesh=2", code=2)
    assert run.screen.startswith("data.batch_size=7: ")
    assert not run.directory.exists()


@pytest.mark.every  # test_environment.py has a reader that is gone
@pytest.mark.parametrize("task", ["fit", "plan"])
def test_a_reader_that_leaves_early_ends_nothing(task: str, tmp_path: Path) -> None:
    """In new processes: this is about what Python itself does with its streams, up to its end."""
    words = [sys.executable, "-u", "-m", "autolaunch", task, *TINY, *QUICK, f"output_dir={tmp_path / 'out'}"]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (process.returncode, summary["status"]) == (0, "finished"), said
    assert "Traceback" not in said
