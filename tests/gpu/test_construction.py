"""A model that is built without memory gets the values of its constructor, and no more memory than its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies import MeshStrategy
from tests.support.one_rank import without_process_group

SIZES: dict[str, Any] = {
    "size": "debug", "hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 8,
    "num_kv_heads": 4, "vocab_size": 8192,
}  # fmt: skip


class Module(pl.LightningModule):
    """Llama, built where the strategy wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model: torch.nn.Module | None = None
        self.first: dict[str, torch.Tensor] = {}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Llama(llama_config(SIZES))

    def on_train_start(self) -> None:
        self.allocated = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        for name, parameter in self.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            self.first[name] = whole.detach().cpu().clone()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.model is not None
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def built(level: int, device: str) -> tuple[Module, int]:
    """A module before its first step, and the most memory that was taken until then."""
    without_process_group()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    tokens = torch.randint(0, SIZES["vocab_size"], (4, 17))
    pl.seed_everything(3, verbose=False)
    module = Module()
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh="1", dp=level), accelerator="gpu" if device == "cuda" else device, devices=1,
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader([tokens], batch_size=None))
    return module, module.allocated - before


def test_values_are_like_the_constructors_at_every_level_and_memory_is_that_of_the_parameters(device: str) -> None:
    (module, _), (sharded, peak) = built(0, device), built(3, device)
    expected = Llama(llama_config(SIZES))
    assert module.first.keys() == sharded.first.keys() == {f"model.{name}" for name, _ in expected.named_parameters()}
    for name, parameter in expected.named_parameters():
        found = sharded.first[f"model.{name}"]
        assert torch.equal(found, module.first[f"model.{name}"]), name
        if parameter.dim() == 1:
            assert torch.equal(found, parameter), "weights of norms are not drawn"
        else:
            assert found.std() == pytest.approx(float(parameter.std()), rel=0.02), name
            assert abs(found.mean()) < 0.02 * found.std(), name
    if device == "cuda":
        sizes = [parameter.numel() * parameter.element_size() for parameter in expected.parameters()]
        assert peak <= 1.1 * sum(sizes) + 2 * max(sizes)
