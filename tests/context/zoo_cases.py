"""Cases of the zoo with sequences divided: loss and gradients of one step.

A case is `<family>:<backend>`; a group is a mesh.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from autolaunch_strategies import MeshStrategy
from tests.context.runs import how_modules_run
from tests.pipeline.zoo_cases import told_or
from tests.support.cases import serve
from tests.support.zoo import MORE, NAMES, Data, batch_of, gradients, made, step_of


class Once(pl.LightningModule):
    """One training step of a model of the zoo, as its users write it; nothing moves."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model: nn.Module = made(name)
        self.name = name
        self.found: tuple[torch.Tensor, Data] | None = None

    def training_step(self, data: Data, batch_idx: int) -> torch.Tensor:
        self.loss = step_of(self.name, self.model)(data)
        return self.loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found = self.loss.detach().clone(), gradients(self.model)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def unpadded(data: Data) -> Data:
    """Without the mask, which some backends can't follow; what it hid is hidden from the loss only."""
    return {key: value for key, value in data.items() if key != "attention_mask"}


def run(name: str, mesh: str, backend: str) -> dict[str, Any]:
    data = batch_of(name) if backend == "gather" else unpadded(batch_of(name))
    alone = made(name)
    loss = step_of(name, alone)(data)
    loss.backward()
    strategy = MeshStrategy(mesh=mesh, dp=0, cp=backend, timeout=40)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = Once(name)
    trainer.fit(module, DataLoader([data], batch_size=None))
    assert module.found is not None and strategy._applied is not None
    runs = how_modules_run(strategy._applied)
    return {"expected": (loss.detach(), gradients(alone)), "found": module.found, "runs": runs}


MESHES: dict[str, tuple[int, list[str]]] = {
    "cp2": (
        2,
        [f"{name}:gather" for name in (*NAMES, *MORE)]
        + [f"{name}:{backend}" for name in ("llama", "gpt2", "mixtral", "bart") for backend in ("ring", "ulysses")]
        + ["deepseek_v3:ring", "qwen3_moe_router_logits:ring", "mixtral_router_logits:gather", "falcon:ulysses"]
        + ["vision_transformer:ring", "clip:ulysses"],
    ),
    "cp4": (4, ["gpt2_4:usp", "qwen3:ring", "bert:gather", "opt:ulysses"]),
}
"""Mesh -> ranks, cases."""


def case(mesh: str, name: str, backend: str) -> dict[str, Any]:
    return told_or(lambda: run(name, mesh, backend))


GROUPS = {mesh: {name: partial(case, mesh, *name.split(":")) for name in cases} for mesh, (_, cases) in MESHES.items()}

if __name__ == "__main__":
    serve(GROUPS, tensors=True)
