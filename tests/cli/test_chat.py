"""Fine-tuning from a model directory and files of chats, through the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from autolaunch.config.trained import trained_config
from autolaunch.data import build_data
from autolaunch.tasks.export import export_checkpoint
from tests.support.chats import CHATML, chat_tokenizer, save_tokenizer
from tests.support.commands import Commands, Run, assert_same_curve
from tests.support.tiers import tiered

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

CHAT = (
    *("model=hf", "model.path=model", "data=chat", "data.path=chats.jsonl", "data.seq_len=48", "data.batch_size=8"),
    *("data.validation_fraction=0.2", "trainer.max_steps=3", "trainer.accelerator=cpu", "optimizer.lr=3e-3"),
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Runs commands in a directory with a pretrained model, its tokenizer and chats."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("chats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        torch.manual_seed(0)
        shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(chat_tokenizer()), **shape))
        model.save_pretrained(directory / "model")
    save_tokenizer(directory / "model")
    lines = []
    for number in range(50):
        answer = {"role": "assistant", "content": "two " * (1 + number % 7)}
        lines.append(json.dumps({"messages": [{"role": "user", "content": f"what {number}"}, answer]}))
    (directory / "chats.jsonl").write_text("\n".join(lines))
    (directory / "bad.jsonl").write_text("\n".join([*lines, "{"]))
    return Commands(directory, *CHAT, timeout=200, XDG_CACHE_HOME=str(directory / "cache"))


@pytest.fixture(scope="module")
def alone(command: Commands) -> Run:
    return command("mesh=1")


def first_loss(run: Run, command: Commands, monkeypatch: pytest.MonkeyPatch) -> float:
    """The loss of the first batch by `transformers`, from the pretrained weights."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(command.directory)
    config = json.loads((run.directory / ".hydra" / "job.json").read_text())["config"]
    data: Any = build_data(config["data"], config["seed"])
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    count = (batch["labels"][:, 1:] != -100).sum()
    assert 0 < count < 0.7 * batch["labels"].numel()
    model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="eager")
    return float(model(**batch, use_cache=False).loss.detach())


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_the_loss_is_that_of_transformers(
    packing: str, command: Commands, alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = alone if packing == "none" else command("mesh=1", "data.packing=documents", "data.validation_fraction=0")
    assert "tokenizer model" in run.screen
    np.testing.assert_allclose(run.rows[0]["loss"], first_loss(run, command, monkeypatch), rtol=1e-5)


@pytest.mark.parametrize("mesh", tiered(["2", "1x2", "1x1x2", "1x1x1x2"], [], ["1x2", "1x1x2"]))
def test_chats_train_alike_on_every_mesh(mesh: str, command: Commands, alone: Run) -> None:
    run = command(f"mesh={mesh}")
    assert_same_curve(run, alone)


@pytest.mark.parametrize("mesh", tiered(["2", "1x2", "1x1x2"], [], ["2", "1x2"]))  # test_packing.py has all axes
def test_packed_chats_train_alike(mesh: str, command: Commands) -> None:
    packed = ("data.packing=documents", "data.validation_fraction=0", "data.num_workers=1")
    run = command(f"mesh={mesh}", *packed)
    assert_same_curve(run, command("mesh=1", *packed))


def test_what_was_trained_is_exported_with_its_tokenizer(command: Commands, alone: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(command.directory)
        export_checkpoint(alone.checkpoint, tmp_path / "export", trained_config(alone.checkpoint) or {})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.chat_template == CHATML
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what 3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_bad_rows_end_every_rank(command: Commands) -> None:
    run = command("mesh=2", "data.path=bad.jsonl", code=2)
    assert "bad.jsonl:51" in run.screen and "data.on_bad=skip" in run.screen
    assert "Traceback" not in run.screen


def test_a_run_goes_on_in_the_middle_of_an_epoch(command: Commands, alone: Run) -> None:
    half = command("mesh=1", "trainer.max_steps=2", "scheduler.total_steps=3")
    whole = command("mesh=1", "scheduler.total_steps=3")
    later = command("mesh=1", "scheduler.total_steps=3", f"ckpt_path={half.checkpoint}")
    assert later.rows[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], rel=1e-6)


def test_a_stream_goes_on_on_another_mesh(command: Commands) -> None:
    streamed = ("data.streaming=true", "data.shuffle_buffer=16", "data.packing=documents", "data.validation_fraction=0")
    streamed += (
        "data.path=[{path: chats.jsonl, weight: 3}, {path: [chats.jsonl], weight: 1}]",
        "scheduler.total_steps=3",
    )
    whole = command("mesh=1", *streamed)
    half = command("mesh=2", *streamed, "trainer.max_steps=2", "data.num_workers=1")
    later = command("mesh=1x2", *streamed, f"ckpt_path={half.checkpoint}")
    both = [*half.rows, *later.rows]
    assert [row["step"] for row in both] == [row["step"] for row in whole.rows]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[key] for row in both], [row[key] for row in whole.rows], rtol=1e-4)
