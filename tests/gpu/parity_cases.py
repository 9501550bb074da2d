"""Short fits on every axis for ranks that share one device, through the backend of `tests.support.staged`.

The device is said by the variable DEVICE. The group `one` is plain Lightning in one process, on the same device.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.experts.cases import Own
from tests.pipeline.cases import PLAIN, Items, Setting, batches, fit
from tests.support import staged
from tests.support.cases import WORLD, serve

DEVICE = os.environ.get("DEVICE", "cpu")
LENGTH, VOCABULARY = 16, 32  # of tokens: two chunks for each of two ranks along cp; of experts.cases.Own


class Dense(pl.LightningModule):
    """This project's Llama, with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        from autolaunch.models.llama import Llama
        from autolaunch.models.llama_config import llama_config

        sizes: dict[str, Any] = {
            "size": "debug", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4,
            "num_heads": 4, "num_kv_heads": 2, "init_std": 0.2,
        }  # fmt: skip
        self.model = self.made(sizes, Llama, llama_config)

    @staticmethod
    def made(sizes: Any, llama: Any, config: Any) -> torch.nn.Module:
        return llama(config(sizes))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = batch["input_ids"]
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mixture(Dense):
    """Blocks with a list of experts."""

    @staticmethod
    def made(sizes: Any, llama: Any, config: Any) -> torch.nn.Module:
        return Own()


def tokens() -> Items:
    generator = torch.Generator().manual_seed(6)
    return Items([{"input_ids": torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)} for _ in range(24)])


TOKENS = batches(tokens)
MODELS = {"dense": Dense, "mixture": Mixture}
_1F1B = {"pp": {"loss": "microbatch", "schedule": "1f1b", "microbatches": 2}}
_INTERLEAVED = {"pp": {"loss": "microbatch", "schedule": "interleaved_1f1b", "microbatches": 2}}
MESHES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "dense:fsdp": ("2", {"dp": 3}),
        "dense:ddp": ("2", {"dp": 0}),
        "dense:sp": ("1x2", {"mp": "seq_parallel"}),
        "dense:mp": ("1x2", {"mp": "tensor_parallel"}),
        "dense:exact": ("1x1x2", {}),
        "dense:1f1b": ("1x1x2", _1F1B),
        "dense:interleaved": ("1x1x2", _INTERLEAVED),
        "dense:gather": ("1x1x1x2", {"cp": "gather"}),
        "dense:ring": ("1x1x1x2", {"cp": "ring"}),
        "dense:ulysses": ("1x1x1x2", {"cp": "ulysses"}),
        "mixture:ep": ("2", {"dp": 3, "ep": 2}),
    },
    4: {
        "dense:fsdp-sp": ("2x2", {"dp": 3, "mp": "seq_parallel"}),
        "dense:fsdp-1f1b": ("2x1x2", {"dp": 3, **_1F1B}),
        "dense:sp-1f1b": ("1x2x2", {"mp": "seq_parallel", **_1F1B}),
        "dense:fsdp-ring": ("2x1x1x2", {"dp": 3, "cp": "ring"}),
        "mixture:fsdp-ep": ("4", {"dp": 3, "ep": 2}),
    },
    8: {"dense:fsdp-sp-1f1b": ("2x2x2", {"dp": 3, "mp": "seq_parallel", **_1F1B})},
}
"""By the number of ranks, `model:name` of a mesh and its options."""


def train(model: str, setting: Setting) -> Any:
    return fit(setting, MODELS[model], TOKENS, accelerator="gpu" if DEVICE == "cuda" else DEVICE, gradient_clip_val=0.5)


GROUPS: dict[str, dict[str, Any]] = {
    "one": {model: (lambda model=model: train(model, PLAIN)) for model in MODELS},
    **{
        str(ranks): {
            name: (lambda name=name, mesh=mesh: train(name.split(":")[0], Setting(*mesh)))
            for name, mesh in meshes.items()
        }
        for ranks, meshes in MESHES.items()
    },
}

if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group(staged.NAME)  # its own device could not be said to torch: it may be that of others
    serve(GROUPS)
