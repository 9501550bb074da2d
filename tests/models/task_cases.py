"""Cases for test_tasks.py: models of transformers for every `model.task`, on uneven labels, on meshes."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from autolaunch.models.hf import build_hf
from autolaunch.models.task_module import TaskModule
from tests.models.label_cases import CONSTANT, MESHES, SAMPLES, SGD, STEPS, rows_of
from tests.support.cases import serve

LENGTH, CLASSES = 12, 3
USUAL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {"model_type": "llama", **USUAL, "pad_token_id": 0}
BERT = {"model_type": "bert", **USUAL, **NO_DROPOUT, "pad_token_id": 0}
T5 = {
    "model_type": "t5", "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
VIT = {"model_type": "vit", **NO_DROPOUT, "image_size": 8, "patch_size": 4, **USUAL}
del VIT["vocab_size"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "last-token": ("sequence_classification", LLAMA),
    "first-token": ("sequence_classification", BERT),
    "regression": ("sequence_classification", {**LLAMA, "problem_type": "regression"}),
    "multi-label": ("sequence_classification", {**BERT, "problem_type": "multi_label_classification"}),
    "tokens": ("token_classification", BERT),
    "masked": ("masked_lm", BERT),
    "seq2seq": ("seq2seq_lm", T5),
    "questions": ("question_answering", BERT),
    "images": ("image_classification", VIT),
}


def samples(name: str) -> list[dict[str, torch.Tensor]]:
    """Padded sequences of many lengths, some without a target."""
    generator = torch.Generator().manual_seed(5)
    task, items = MODELS[name][0], []
    for index in range(STEPS * SAMPLES):
        ids = torch.randint(1, 32, (LENGTH,), generator=generator)
        there = (torch.arange(LENGTH) < 2 + index * 7 % (LENGTH - 1)).long()
        draw = torch.randint(0, CLASSES, (LENGTH,), generator=generator)
        item = {"input_ids": ids * there, "attention_mask": there}
        if task == "image_classification":
            item = {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": draw[0]}
        elif name in ("regression", "multi-label"):
            item["labels"] = (draw[:CLASSES] % 2).float()
        elif task == "sequence_classification":
            item["labels"] = draw[0] if index % 5 else torch.tensor(-100)
        elif task == "question_answering":
            item |= {"start_positions": draw[0], "end_positions": draw[1] * (LENGTH if index % 4 == 0 else 2)}
        else:
            asked = (torch.arange(LENGTH) % (1 + index % 4) == 0) & (there > 0) & (index % SAMPLES < 6)
            labels = draw if task == "token_classification" else ids
            item["labels"] = labels.masked_fill(~asked, -100)
        items.append(item)
    return items


def train(name: str, strategy: dict[str, Any]) -> Any:
    pl.seed_everything(1, verbose=False)
    task, config = MODELS[name]
    labels = {"num_labels": CLASSES} if "classification" in task else {}
    model = build_hf({"name": "hf", "task": task, "config": config, **labels})
    return rows_of(TaskModule(model, task, {**SGD, "lr": 0.1}, CONSTANT, -1), samples(name), strategy)


def by_transformers(name: str) -> list[float]:
    """The losses of the first two batches by the model's own loss, each over the whole batch, before any step."""
    pl.seed_everything(1, verbose=False)
    task, config = MODELS[name]
    labels = {"num_labels": CLASSES} if "classification" in task else {}
    model = build_hf({"name": "hf", "task": task, "config": config, **labels})
    module = TaskModule(model, task, SGD, CONSTANT, -1)
    found = []
    for start in (0, SAMPLES):
        batch = torch.utils.data.default_collate(samples(name)[start : start + SAMPLES])
        found += [float(model(**batch).loss.detach()), float(module._loss(batch).detach())]
    return found


GROUPS = {
    group: {f"{name}@{mesh}": partial(train, name, strategy) for mesh, strategy in meshes.items() for name in MODELS}
    for group, meshes in MESHES.items()
}
GROUPS["one"] |= {f"{name}@transformers": partial(by_transformers, name) for name in MODELS}

if __name__ == "__main__":
    serve(GROUPS)
