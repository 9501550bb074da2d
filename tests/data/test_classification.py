"""data=classification: from rows and what the model says of labels and padding to batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autolaunch.config.classification import with_labels_of_model
from autolaunch.config.schema import ClassificationData, HFModel, defaults_of
from autolaunch.data.classification import open_sequences
from autolaunch_strategies.config import ConfigError
from tests.support.chats import save_tokenizer
from tests.support.messages import Told, assert_only_told

pytest.importorskip("transformers")


def resolved(file: Path, config: dict[str, Any], **data: Any) -> dict[str, Any]:
    """The data group of a job whose model has `config`, and the model's group."""
    keys = {**defaults_of(ClassificationData), "path": str(file), "validation_fraction": 0.5, "batch_size": 1, **data}
    model = {**defaults_of(HFModel), "task": "sequence_classification", "config": {"model_type": "llama", **config}}
    return with_labels_of_model({"module": None, "model": model, "data": keys})


def written(directory: Path, *rows: Any) -> Path:
    file = directory / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_names_of_classes_and_two_texts_of_bytes(tmp_path: Path) -> None:
    rows = [{"text": "ab", "other": "c", "label": "yes"}, {"text": "", "other": "c", "label": "no"}]
    rows.append({"text": "abcdef", "other": "c", "label": "no"})
    keys = {"tokenizer": "bytes", "pair_key": "other", "on_bad": "skip", "seq_len": 5, "classes": ["no", "yes"]}
    job = resolved(written(tmp_path, *rows), {}, **keys)
    assert (
        job["model"]["config"]["id2label"] == {"0": "no", "1": "yes"} and job["model"]["config"]["pad_token_id"] == 256
    )
    parts = open_sequences(job["data"], 0)
    (note,) = parts.training.notes
    assert "1 bad row" in note and "rows.jsonl:2" in note
    batch = parts.training.batch(np.array([0]))
    assert batch["input_ids"].tolist() == [[*b"ab\nc", 256]] and batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [1] and batch["labels"].dtype == np.int64
    assert parts.validation.batch(np.array([0]))["input_ids"].tolist() == [[*b"abcde"]]


def test_several_labels_and_the_padding_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer"))
    file = written(tmp_path, *({"text": "two four", "label": ["b"]} for _ in range(2)))
    job = resolved(file, {}, tokenizer=tokenizer, seq_len=8, classes=["a", "b", "c"])
    assert job["data"]["of_model"] == [3, "multi_label_classification", 0]
    batch = open_sequences(job["data"], 0).training.batch(np.array([0]))
    assert batch["labels"].tolist() == [[0.0, 1.0, 0.0]] and batch["labels"].dtype == np.float32
    length = int(batch["attention_mask"].sum())
    assert 0 < length < 8 and not batch["input_ids"][0, length:].any() and batch["input_ids"][0, :length].all()
    # The model's own padding comes before that of the tokenizer.
    job = resolved(file, {"pad_token_id": 7}, tokenizer=tokenizer, seq_len=8, classes=["a", "b", "c"])
    assert open_sequences(job["data"], 0).training.batch(np.array([0]))["input_ids"][0, -1] == 7


def test_padding_that_nobody_knows(tmp_path: Path) -> None:
    file = written(tmp_path, {"text": "a", "label": 0})
    with pytest.raises(ConfigError) as caught:
        resolved(file, {}, tokenizer=str(tmp_path / "none"))
    told = Told("model.task=sequence_classification", "padded", write="model.config.pad_token_id=0")
    assert_only_told(caught.value, told)
