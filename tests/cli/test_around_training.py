"""What runs around a training: groups of parameters, callbacks by name, texts from the weights as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autolaunch.cli import run
from autolaunch.tasks.export import export_checkpoint, trained_config
from tests.support.chats import save_tokenizer
from tests.support.commands import Commands, Run, assert_same_curve
from tests.support.messages import Told, assert_told

pytestmark = pytest.mark.timeout(900)

# --- refused before anything starts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "errors"),
    [
        (
            [
                "optimizer.groups=[{match: lm_head, momentum: 0.5}, {lr: 0.1}, {match: lm_head, lr: -1}]",
                "callbacks=samples",
                "generate.temperature=1",
            ],
            [
                Told("optimizer.groups[0].momentum=0.5", "adamw", allowed="match, lr, weight_decay, betas, eps"),
                Told("optimizer.groups[1]", "which parameters", write=None),
                Told("optimizer.groups[2].lr=-1", allowed=None),
                Told("callbacks.samples.prompts", "given", write="callbacks.samples.prompts=..."),
                Told(
                    "generate.temperature=1", "fit", allowed=("the line without it", "autolaunch generate"), write=None
                ),
            ],
        ),
        (["optimizer.groups=[lm_head]"], [Told("optimizer.groups=[lm_head]", "list of mappings")]),
        (
            ["optimizer=custom", "optimizer._target_=bitsandbytes.optim.AdamW8bit", "dp=fsdp"],
            [
                Told(
                    "optimizer._target_=bitsandbytes.optim.AdamW8bit with dp.sharding_level=3",
                    "sharded",
                    allowed=("torchao.optim.AdamW8bit",),
                    write="dp=ddp",
                ),
            ],
        ),
        (
            ["generate"],
            [
                Told("generate.prompts", "nothing", write=None),
                Told("autolaunch generate", "no trained weights", allowed=("model.path",), write="ckpt_path=last"),
            ],
        ),
        (["generate", "generate.prompts=[{a: b}]"], [Told("generate.prompts[0]", allowed=("messages",))]),
        (
            [
                *("generate", "generate.prompts=[[1,2],[1,-5],[1,600]]", "model.vocab_size=600", "callbacks=samples"),
                "callbacks.samples.prompts=[a,[999]]",
            ],
            [
                Told("generate.prompts[1]", "token -5", "only 600", allowed=("ids from 0 to 599",)),
                Told("generate.prompts[2]", "token 600", "only 600"),
                Told("callbacks.samples.prompts[1]", "token 999", "only 600"),
            ],
        ),
    ],
    ids=["keys", "types", "sharded for bitsandbytes", "no prompts", "prompts", "token ids"],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], errors: list[Told], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, f"output_dir={tmp_path / 'run'}", "mesh=2", "trainer.accelerator=cpu"]) == 2
    said = capsys.readouterr().err
    for told in errors:
        assert_told(said, told.key, *told.facts, write=told.write, allowed=told.allowed)
    assert not (tmp_path / "run").exists()


# --- runs --------------------------------------------------------------------------------------------------------

PROMPTS = ["import os", "The", "def f(x):"]
CALLBACKS = (
    "callbacks=[early_stopping,ema,samples]", "callbacks.early_stopping.min_delta=100",
    "callbacks.early_stopping.patience=2", "callbacks.ema.decay=0.8",
    "callbacks.samples.prompts=[import os,The,'def f(x):']",
    "callbacks.samples.max_new_tokens=8",
)  # fmt: skip
GROUPS = (
    "optimizer.groups=[{match: [lm_head, .*norm], lr: 0.003, weight_decay: 0.3}, {match: .*k_proj, betas: [0.8, 0.9]}]"
)
STEPS = 6
"""At the third validation there have been two without an improvement by 100."""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(
        tmp_path_factory.mktemp("around"), "model=llama", "model.hidden_size=32", "model.intermediate_size=64",
        "model.num_heads=4", "model.num_kv_heads=2", "model.num_layers=2", "model.vocab_size=257", "data.seq_len=16",
        "data.batch_size=8", "trainer.accelerator=cpu", "scheduler=constant", "optimizer.lr=0.01",
        "optimizer.eps=0.001",  # with less, Adam makes a step of rounding errors
        timeout=400,
    )  # fmt: skip


TRAINING = (GROUPS, *CALLBACKS, "trainer.max_steps=20", "trainer.val_check_interval=2", "trainer.limit_val_batches=2")
MESHES = [
    ("mesh=1x2", "mp=seq_parallel"),
    # Stages and ranks along dp are below, too.
    *(
        pytest.param(mesh, marks=pytest.mark.every)
        for mesh in (("mesh=2",), ("mesh=2", "dp=zero1"), ("mesh=1x1x2", "pp=1f1b"), ("mesh=cp2",))
    ),
]


def _weights(of: Run, directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    config = trained_config(of.checkpoint)
    assert config is not None
    export_checkpoint(of.checkpoint, directory, config)
    return load_file(directory / "model.safetensors")


def _samples(of: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (of.directory / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def _validated(of: Run) -> list[float]:
    return [row["val_loss"] for row in of.rows if "val_loss" in row]


def _assert_same(found: Run, expected: Run, directory: Path, after: int = 0) -> None:
    assert_same_curve(found, expected, after)
    assert found.summary["steps"] == STEPS
    assert _validated(found) == pytest.approx(_validated(expected)[after // 2 :], rel=1e-5)
    assert _samples(found) == [line for line in _samples(expected) if line["step"] > after]
    ours, theirs = (_weights(item, directory / str(place)) for place, item in enumerate((found, expected)))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def alone(command: Commands) -> Run:
    watched = (item.replace("[early", "[lr_monitor,early") for item in TRAINING)  # which adds a row of step 0
    ended = command("mesh=1", *watched)
    assert [ended.rows[1][f"lr-AdamW/pg{number}"] for number in (1, 3, 5)] == [0.01, 0.003, 0.01]
    return ended


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=" ".join)
def test_the_same_on_every_mesh(mesh: tuple[str, ...], command: Commands, alone: Run, tmp_path: Path) -> None:
    _assert_same(command(*mesh, *TRAINING), alone, tmp_path)


@pytest.mark.full
def test_resumed_on_another_mesh_and_generated_from(command: Commands, alone: Run, tmp_path: Path) -> None:
    half = command("mesh=1x1x2", *TRAINING, "trainer.max_steps=2")
    resumed = command("mesh=2", *TRAINING, f"ckpt_path={half.checkpoint}")
    _assert_same(resumed, alone, tmp_path, after=2)
    without = [item for item in TRAINING if not item.startswith("callbacks")]
    said = command("mesh=2", *without, f"ckpt_path={half.checkpoint}", code=2).screen
    assert "averaged weights" in said and "callbacks=ema" in said
    assert command("validate", f"ckpt_path={alone.checkpoint}", "trainer.limit_val_batches=2").summary[
        "metrics"
    ] == pytest.approx({"val_loss": _validated(alone)[-1]}, rel=1e-5)

    asks = "generate.prompts=[import os,The,'def f(x):']", f"ckpt_path={alone.checkpoint}", "generate.max_new_tokens=8"
    written = command("generate", "mesh=1x2", *asks).directory / "generated.jsonl"
    texts = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert texts == [{key: line[key] for key in ("prompt", "text")} for line in _samples(alone)[-3:]]
    drawn = [
        (command("generate", mesh, *asks, "generate.temperature=1", "generate.top_p=0.9").directory / "generated.jsonl")
        for mesh in ("mesh=1", "mesh=1x1x2")
    ]
    assert drawn[0].read_text() == drawn[1].read_text() != written.read_text()


@pytest.mark.every  # half a minute; test_parallelize.py has Muon on shards
def test_muon_orthogonalises_whole_matrices_wherever_they_are_sharded(command: Commands) -> None:
    muon = (
        "optimizer=custom", "optimizer._target_=tests.support.float32_muon.Muon", "optimizer.momentum=0.9",
        "optimizer.groups=[{match: [.*embed_tokens, lm_head], muon: false}]", "trainer.max_steps=4",
    )  # fmt: skip
    expected = command("mesh=1", *muon)
    for mesh in ("mesh=2", "mesh=1x2"):
        assert_same_curve(command(mesh, *muon), expected, tolerance=1e-5)
    alone = [item for item in muon if "groups" not in item]
    assert (
        "autolaunch.models.muon.Muon" in command("mesh=2", *alone, "optimizer._target_=torch.optim.Muon", code=2).screen
    )


@pytest.mark.full
def test_benchmarks_run_on_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes = {"vocab_size": 310, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=128)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    rows = [{"question": f"what {number}", "choices": ["two", "four"], "answer": number % 2} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "own_questions", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text(json.dumps(task))
    keys = ["eval.tasks=[own_questions]", f"eval.include_path={tmp_path / 'tasks'}", "trainer.accelerator=cpu"]
    assert run(["eval", f"eval.path={tmp_path / 'model'}", *keys, f"output_dir={tmp_path / 'out'}"]) == 0
    shares = json.loads((tmp_path / "out" / "summary.json").read_text())["metrics"]
    assert shares["own_questions/acc"] in [number / 6 for number in range(7)]
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["own_questions"]
