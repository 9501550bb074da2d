"""Cases for test_packing.py: several documents in one row on every mesh, and each document by itself by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

from autolaunch.models import build_model
from autolaunch.models.language_model import LanguageModel
from autolaunch.models.packed_attention import use_kernel
from tests.models.label_cases import CLIP, CONSTANT, LLAMA, SAMPLES, SGD, STEPS, rows_of, schedule
from tests.support.cases import serve
from tests.support.documents import kernel_on_cpu

LENGTH = 18
"""Of a row: not one that 4 or 8 places divide."""

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Models of transformers, unmodified; one has a window that is shorter than its documents."""


def build(name: str) -> nn.Module:
    pl.seed_everything(1, verbose=False)
    if name == "ours":
        return build_model({**LLAMA, "num_heads": 4, "max_seq_len": 32})
    from autolaunch.models.hf import build_hf

    family = name.removeprefix("hf-")
    return build_hf({"config": {"model_type": family, **SIZES, **FAMILIES[family]}})


@cache
def rows() -> list[dict[str, torch.Tensor]]:
    """Rows of three documents and padding, of other lengths in every row; of some documents nothing is trained on."""
    generator = torch.Generator().manual_seed(7)
    items = []
    for index in range(STEPS * SAMPLES):
        ids = torch.randint(0, 32, (LENGTH,), generator=generator)
        lengths = [2 + index % 5, 3 + index * 3 % 4, 5]
        lengths.append(LENGTH - sum(lengths))
        labels = ids.clone()
        labels[-lengths[-1] :] = -100
        labels[lengths[0] : lengths[0] + index % 3 * 3] = -100
        positions = torch.cat([torch.arange(length) for length in lengths])
        items.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return items


def by_hand(name: str) -> dict[str, Any]:
    """One process, one document at a time, and the mean over all labels of a step, written down."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])

    def total(items: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, int]:
        loss, count = torch.zeros(()), 0
        for item in items:
            starts = [*(item["position_ids"] == 0).nonzero().flatten().tolist(), LENGTH]
            for start, end in pairwise(starts):
                output = model(item["input_ids"][None, start:end])
                scores = output if isinstance(output, torch.Tensor) else output.logits
                targets = item["labels"][start + 1 : end]
                loss = loss + F.cross_entropy(scores[0, :-1], targets, reduction="sum")
                count += int((targets != -100).sum())
        return loss, count

    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, count = total(rows()[step * SAMPLES : (step + 1) * SAMPLES])
        (loss / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss / count))
        optimizer.step()
    with torch.no_grad():
        loss, count = total(rows())
    weights = {f"model.{name}": value.flatten().tolist() for name, value in model.named_parameters()}
    return {"losses": losses, "norms": norms, "val_loss": float(loss / count), "weights": weights}


def packed(name: str, strategy: dict[str, Any]) -> dict[str, Any]:
    return rows_of(LanguageModel(build(name), SGD, CONSTANT, -1), rows(), strategy)


def by_kernel(name: str, strategy: dict[str, Any]) -> dict[str, Any]:
    """The same by the kernel for documents, as far as a loop in its place shows it."""
    model = build(name)
    assert use_kernel(model) is None
    with kernel_on_cpu() as calls:
        found = rows_of(LanguageModel(model, SGD, CONSTANT, -1), rows(), strategy)
    assert calls["forward"] and calls["backward"]
    return found


MESHES: dict[str, dict[str, dict[str, Any]]] = {
    "one": {"1": {"mesh": "1"}},
    "two": {
        "dp2": {"mesh": "2", "dp": 3},
        "mp2": {"mesh": "1x2", "mp": "tensor_parallel"},
        "sp2": {"mesh": "1x2", "mp": "seq_parallel"},
        "pp2-exact": {"mesh": "1x1x2", "pp": "exact"},
        "pp2-1f1b": {"mesh": "1x1x2", "pp": schedule("1f1b", 4)},
        "cp2-gather": {"mesh": "cp2", "cp": "gather"},
        "cp2-ring": {"mesh": "cp2", "cp": "ring"},
        "cp2-ulysses": {"mesh": "cp2", "cp": "ulysses"},
    },
    "four": {
        "cp4-usp": {"mesh": "cp4", "cp": "usp"},
        "dp2xcp2": {"mesh": "dp2xcp2", "dp": 3, "cp": "ring"},
        "pp2xcp2": {"mesh": "pp2xcp2", "pp": schedule("1f1b", 2), "cp": "gather"},
    },
    "eight": {"mp2xpp2xcp2": {"mesh": "1x2x2x2", "mp": "seq_parallel", "pp": "exact", "cp": "ring"}},
}
NAMES = ("ours", *(f"hf-{family}" for family in FAMILIES))
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    group: {f"{name}@{mesh}": partial(packed, name, strategy) for mesh, strategy in meshes.items() for name in NAMES}
    for group, meshes in MESHES.items()
}
KERNEL: dict[str, dict[str, Any]] = {
    "dp2": {"recompute": "selective"},
    "mp2": {},
    "sp2": {"recompute": "full"},
    "pp2-1f1b": {},
}
GROUPS["two"] |= {
    f"{name}-kernel@{mesh}": partial(by_kernel, name, MESHES["two"][mesh] | KERNEL[mesh])
    for name in NAMES
    for mesh in KERNEL
}
GROUPS["hand"] = {name: partial(by_hand, name) for name in NAMES}

if __name__ == "__main__":
    serve(GROUPS)
