"""Cases for test_loading.py: every family of the zoo from safetensors onto a mesh, as the command does it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.utils.data import DataLoader

from autolaunch.models import hf as hf_models
from autolaunch.tasks.run_parts import construct_module
from autolaunch_strategies import MeshStrategy
from tests.lightning.cases import make_trainer, whole
from tests.models.label_cases import CONSTANT, SGD
from tests.support import zoo
from tests.support.cases import OUT, RANK, serve


def saved(name: str) -> Any:
    """A directory with weights of that family, each tensor its own, and what `transformers` reads from it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = zoo.make(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    directory = OUT / f"{name}.{RANK}"
    with patch("torch.distributed.is_initialized", return_value=False):  # else the first rank alone writes
        model.save_pretrained(directory, max_shard_size="20KB")
    return directory, AutoModelForCausalLM.from_pretrained(directory).state_dict()


def config_of(directory: Path) -> dict[str, Any]:
    """Of a resolved job, what its model and its module are made of."""
    model = {"name": "hf", "path": str(directory), "revision": None, "task": "causal_lm", "num_labels": None}
    model |= {"config": {}, "pretrained": True, "attn_implementation": "eager", "trainable": None}
    return {
        "seed": 7, "module": None, "model": model, "adapter": None, "optimizer": {**SGD, "lr": 0.0},
        "scheduler": CONSTANT, "trainer": {"max_steps": 1}, "data": {"name": "synthetic"},
    }  # fmt: skip


def load(name: str, strategy: dict[str, Any], in_memory: bool = False) -> list[str]:
    """Names of weights that are not bit by bit what `transformers` reads."""
    directory, expected = saved(name)
    config = config_of(directory)
    mesh = MeshStrategy(timeout=60, **strategy)
    build = hf_models.build_hf
    if in_memory:

        def reads_its_memory(model_cfg: Any) -> Any:
            if torch.empty(1).untyped_storage().device.type == "meta":
                raise RuntimeError("this constructor reads memory")
            return build(model_cfg)

        hf_models.build_hf = reads_its_memory
    try:
        module = construct_module(config, mesh, Precision(), torch.device("cpu"))
    finally:
        hf_models.build_hf = build
    trainer = make_trainer(mesh, max_steps=1)
    ids = torch.arange(4 * 13).reshape(4, 13) % zoo.VOCABULARY
    items = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    pl.seed_everything(1, verbose=False)
    trainer.fit(module, DataLoader(items, batch_size=4))
    # With stages a rank has its own; a parameter of no rank's would be in neither.
    found = {name: whole(value) for name, value in module.model.named_parameters() if value.numel()}
    assert found
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


GROUPS = {
    "one": {"memory": partial(load, "llama", {"mesh": "1"}, in_memory=True)},
    "four": {
        **{name: partial(load, name, {"mesh": "2x2", "dp": 3, "mp": "tensor_parallel"}) for name in zoo.CAUSAL},
        "memory": partial(load, "qwen3_moe", {"mesh": "2x2", "dp": 3, "mp": "tensor_parallel"}, in_memory=True),
        "stages": partial(load, "qwen3_moe", {"mesh": "2x1x2", "dp": 3, "pp": "exact"}),
    },
}

if __name__ == "__main__":
    serve(GROUPS)
