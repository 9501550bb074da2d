"""Fine-tuning a classifier from a model of the hub and labelled texts, through the real command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from autolaunch.tasks.export import export_checkpoint, trained_config
from tests.support.chats import chat_tokenizer, save_tokenizer
from tests.support.commands import Commands, assert_same_curve
from tests.support.hub import Hub, serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

ARGUMENTS = (
    *("model=hf", "model.task=sequence_classification", "data=classification", "data.path=texts.jsonl"),
    *("data.classes=[no,yes,maybe]", "data.seq_len=16", "data.batch_size=8", "data.validation_fraction=0.2"),
    *("trainer.max_steps=3", "trainer.accelerator=cpu", "optimizer.lr=3e-3"),
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Runs commands in a directory with texts; a hub has the model, and another one that is gated."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("texts")
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(chat_tokenizer()), **shape)).save_pretrained(directory / "model")
    save_tokenizer(directory / "model")
    names = ("no", "yes", "maybe")
    lines = [{"text": "two four " * (1 + n % 7) + names[n % 3], "label": names[n % 3]} for n in range(50)]
    (directory / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (directory / "bad.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"text": "two", "label": "nah"}])))
    with serving(Hub({"org/tiny": directory / "model", "org/gated": directory / "model"}, ("org/gated",))) as hub:
        home = str(directory / "home")
        yield Commands(directory, *ARGUMENTS, timeout=200, HF_ENDPOINT=hub.endpoint, HF_HOME=home, HF_HUB_OFFLINE="0")


def test_a_classifier_of_the_hub_trains_alike_everywhere_and_is_exported(command: Commands, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    downloaded = command("model.path=org/tiny", "mesh=2", cold=True)
    assert downloaded.screen.count("downloading weights in 1 file") == 1
    assert "score.weight" in downloaded.screen  # random at the start, which is no secret
    assert "not of this model: lm_head.weight" in downloaded.screen
    alone = command("model.path=model", "mesh=1")
    assert_same_curve(downloaded, alone)
    for mesh in ("1x2", "1x1x2", "1x1x1x2"):
        assert_same_curve(command("model.path=model", f"mesh={mesh}"), alone)
    validated = command("validate", "model.path=model", "mesh=1", f"ckpt_path={alone.checkpoint}")
    assert "score.weight" not in validated.screen  # the checkpoint has it
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(command.directory)
        export_checkpoint(alone.checkpoint, tmp_path / "export", trained_config(alone.checkpoint) or {})
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    assert model.config.id2label == {0: "no", 1: "yes", 2: "maybe"} and model.config.pad_token_id == 0
    inputs = AutoTokenizer.from_pretrained(tmp_path / "export")(["two yes", "four"], padding=True, return_tensors="pt")
    assert model(**inputs).logits.shape == (2, 3)


def test_what_goes_wrong_is_one_message(command: Commands) -> None:
    gated = command("model.path=org/gated", cold=True, code=2)
    assert "model.path=org/gated" in gated.screen and "hf auth login" in gated.screen
    bad = command("model.path=model", "mesh=2", "data.path=bad.jsonl", code=2)
    assert "bad.jsonl:51" in bad.screen and "'nah'" in bad.screen and "no, yes, maybe" in bad.screen
    adapted = command("model.path=model", "adapter=lora", "mesh=2", code=2)
    assert "adapter.modules_to_save=[score]" in adapted.screen
    for run in (gated, bad, adapted):
        assert "Traceback" not in run.screen
    command("model.path=model", "adapter=lora", "adapter.modules_to_save=[score]")
