"""Cases for test_label_means.py: the built-in language model on labels that are spread unevenly, and a loop by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autolaunch.models import build_model
from autolaunch.models.language_model import LanguageModel, SupervisedModule
from autolaunch.report.metrics import StepMetrics
from autolaunch_strategies import MeshStrategy
from tests.lightning.cases import make_trainer, whole
from tests.support.cases import serve

LENGTH, STEPS, SAMPLES = 12, 3, 8
"""Of a sequence; optimizer steps; sequences of a step over all ranks."""

LLAMA = {
    "name": "llama", "size": "debug", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2,
    "num_heads": 2, "num_kv_heads": 2, "max_seq_len": 16,
}  # fmt: skip
SGD = {"name": "sgd", "_target_": None, "lr": 0.5, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-8,
       "momentum": 0.5}  # fmt: skip
CONSTANT = {"name": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0, "total_steps": None}
CLIP = 0.5

MASKS: dict[str, Callable[[int], int]] = {
    "none": lambda index: 0,
    "some": lambda index: index * 5 % LENGTH,
    # Whole sequences, so that the first rank, or the first microbatch, has not one label.
    "half": lambda index: LENGTH if index % SAMPLES < SAMPLES // 2 else index % 3,
    "whole-step": lambda index: LENGTH if index // SAMPLES == 1 else index * 5 % LENGTH,
}
"""How many labels of which sequence are not trained on, from its start."""


def sequences(mask: str, count: int = STEPS * SAMPLES) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    items = []
    for index in range(count):
        ids = torch.randint(0, 32, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: MASKS[mask](index)] = -100
        items.append({"input_ids": ids, "labels": labels})
    return items


def by_hand(mask: str) -> dict[str, Any]:
    """One process, and the mean over all labels of a step, written down."""
    pl.seed_everything(1, verbose=False)
    model = build_model(LLAMA)
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
    losses, norms = [], []
    items = torch.utils.data.default_collate(sequences(mask))
    batches = zip(items["input_ids"].split(SAMPLES), items["labels"].split(SAMPLES), strict=True)

    def total(ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        scores = model(ids)[:, :-1]
        targets = labels[:, 1:].flatten()
        return F.cross_entropy(scores.flatten(0, 1), targets, reduction="sum"), int((targets != -100).sum())

    for ids, labels in batches:
        optimizer.zero_grad()
        loss, count = total(ids, labels)
        loss = loss / max(count, 1)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss))
        optimizer.step()
    with torch.no_grad():
        loss, count = total(items["input_ids"], items["labels"])
    weights = {f"model.{name}": value.flatten().tolist() for name, value in model.named_parameters()}
    return {"losses": losses, "norms": norms, "val_loss": float(loss / count), "weights": weights}


def rows_of(module: pl.LightningModule, data: list[Any], strategy: dict[str, Any], accumulate: int = 1) -> Any:
    """Train on what the command trains with; what `metrics.csv` and the validation say."""
    steps = StepMetrics()
    norms: list[float] = []

    class Norms(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if steps.latest is not None and len(steps.steps) > len(norms):
                norms.append(steps.latest.grad_norm)

    trainer = make_trainer(
        MeshStrategy(timeout=60, **strategy), steps, Norms(), gradient_clip_val=CLIP,
        accumulate_grad_batches=accumulate, use_distributed_sampler=True,
    )  # fmt: skip
    loader = partial(DataLoader, data, batch_size=SAMPLES // accumulate)
    trainer.fit(module, loader(), loader())
    weights = {name: whole(value).flatten().tolist() for name, value in module.named_parameters() if value.numel()}
    return {
        "losses": list(steps.losses), "norms": norms, "val_loss": float(trainer.callback_metrics["val_loss"]),
        "weights": weights,
    }  # fmt: skip


def language(mask: str, strategy: dict[str, Any], accumulate: int = 1) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = LanguageModel(build_model(LLAMA), SGD, CONSTANT, -1)
    return rows_of(module, sequences(mask), strategy, accumulate)


def documents(kind: str) -> list[dict[str, torch.Tensor]]:
    """Rows of two documents whose positions restart, or of one and padding; of other lengths in every row."""
    items = []
    for index, item in enumerate(sequences("some")):
        length, places = 3 + index * 7 % 8, torch.arange(LENGTH)
        if kind == "packed":
            items.append({**item, "position_ids": torch.where(places < length, places, places - length)})
            continue
        there = places < length
        items.append({"input_ids": item["input_ids"], "attention_mask": there.long(),
                      "labels": item["labels"].masked_fill(~there, -100)})  # fmt: skip
    return items


def transformers(kind: str, strategy: dict[str, Any]) -> dict[str, Any]:
    from autolaunch.models.hf import build_hf

    pl.seed_everything(1, verbose=False)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = build_hf({"config": {"model_type": "llama", "num_attention_heads": 2, **sizes}})
    return rows_of(LanguageModel(model, SGD, CONSTANT, -1), documents(kind), strategy)


def mixtral() -> torch.nn.Module:
    from autolaunch.models.hf import build_hf

    pl.seed_everything(1, verbose=False)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return build_hf({"config": {"model_type": "mixtral", **sizes, **heads, **routers}})


def routers(strategy: dict[str, Any]) -> dict[str, Any]:
    return rows_of(LanguageModel(mixtral(), SGD, CONSTANT, -1), documents("padded"), strategy)


def routers_by_hand() -> dict[str, Any]:
    """One process, with the loss that transformers computes of tokens and routers."""
    model: Any = mixtral()
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
    losses, norms = [], []
    for batch in DataLoader(documents("padded"), batch_size=SAMPLES):  # type: ignore[arg-type]  # a list is a dataset
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss))
        optimizer.step()
    weights = {f"model.{name}": value.flatten().tolist() for name, value in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def schedule(name: str, microbatches: int) -> dict[str, Any]:
    return {"schedule": name, "loss": "microbatch", "microbatches": microbatches}


MESHES: dict[str, dict[str, dict[str, Any]]] = {
    "one": {"1": {"mesh": "1"}},
    "two": {
        **{f"dp2-level{level}": {"mesh": "2", "dp": level} for level in (0, 1, 2, 3)},
        "mp2": {"mesh": "1x2", "mp": "tensor_parallel"},
        "pp2-exact": {"mesh": "1x1x2", "pp": {"loss": "exact", "microbatches": 2}},
        "pp2-gpipe": {"mesh": "1x1x2", "pp": schedule("gpipe", 2)},
        "pp2-1f1b": {"mesh": "1x1x2", "pp": schedule("1f1b", 4)},
        "cp2": {"mesh": "cp2", "cp": "ring"},
    },
    "four": {
        "dp2xmp2": {"mesh": "2x2", "mp": "seq_parallel", "dp": 3},
        "dp2xpp2-exact": {"mesh": "2x1x2", "dp": 2, "pp": "exact"},
        "dp2xpp2-1f1b": {"mesh": "2x1x2", "dp": 3, "pp": schedule("1f1b", 2)},
        "dp2xcp2": {"mesh": "dp2xcp2", "dp": 3, "cp": "gather"},
    },
}
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    group: {
        f"{mesh}/{mask}/{accumulate}".replace("/", "@"): partial(language, mask, strategy, accumulate)
        for mesh, strategy in meshes.items()
        for mask in MASKS
        for accumulate in (1, 2)
    }
    for group, meshes in MESHES.items()
}
GROUPS["hand"] = {mask: partial(by_hand, mask) for mask in MASKS}


def classes(loss: Any, strategy: dict[str, Any]) -> Any:
    """`model=custom` with labels of which some do not count; the last batch leaves one rank without a sample."""
    pl.seed_everything(1, verbose=False)
    model = torch.nn.Linear(4, 3)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(17, 4, generator=generator)
    targets = torch.where(torch.arange(17) % 8 >= 4, -100, torch.arange(17) % 3)
    module = SupervisedModule(model, loss, SGD, CONSTANT, -1)
    return rows_of(module, list(zip(inputs, targets, strict=True)), strategy)


CLASSES: dict[str, Any] = {
    "cross_entropy": "cross_entropy",
    "weighted": {
        "_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1,
        "weight": {"_target_": "torch.tensor", "data": [1.0, 0.25, 4.0]},
    },
}  # fmt: skip
"""`model.loss` of `classes`."""
for name, loss in CLASSES.items():
    GROUPS["one"][f"classes-{name}"] = partial(classes, loss, {"mesh": "1"})
    GROUPS["two"][f"classes-{name}"] = partial(classes, loss, {"mesh": "2", "dp": 3})

for group, meshes in MESHES.items():
    for mesh in ("1", "dp2-level3", "mp2", "pp2-1f1b", "cp2"):
        for kind in ("packed", "padded"):
            if mesh in meshes:
                GROUPS[group][f"hf-{kind}-{mesh}"] = partial(transformers, kind, meshes[mesh])

    for mesh in ("1", "dp2-level3", "pp2-exact", "cp2"):
        if mesh in meshes:
            GROUPS[group][f"routers-{mesh}"] = partial(routers, meshes[mesh])
GROUPS["hand"]["routers"] = routers_by_hand

if __name__ == "__main__":
    serve(GROUPS)
