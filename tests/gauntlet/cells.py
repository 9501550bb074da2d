"""Runs on a rank: trains a row of the table on a mesh by MeshStrategy, or by a plain loop.

A case is `<library>:<model>@<mesh>`, with the mesh `plain` for the plain loop of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from autolaunch_strategies import MeshStrategy
from tests.gauntlet.row import Row, without_dropout
from tests.gauntlet.table import row_of
from tests.support.cases import serve

STEPS, BATCH, RATE, LARGEST_NORM = 3, 4, 0.05, 1.0
PLAIN = "plain"


class Task(pl.LightningModule):
    """A model in a LightningModule, as its users write it."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.model = without_dropout(row.make())
        self.loss = row.loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=RATE)


class Norms(pl.Callback):
    """The loss and the gradient norm of every step, before clipping."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.norms.append(float(trainer.strategy.last_grad_norm))
        self.losses.append(float(trainer.callback_metrics["loss"]))


def loader(row: Row) -> DataLoader:
    return DataLoader(row.samples(STEPS * BATCH), batch_size=BATCH)


def names_of(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or saved buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in module.state_dict(keep_vars=True).items()}


def plain(row: Row) -> dict[str, Any]:
    """What a loop of one process gives that knows of no mesh."""
    pl.seed_everything(1, verbose=False)
    module = Task(row)
    module.to(row.dtype)
    names = names_of(module)
    initial = {name: value.clone() for name, value in _floating(module.state_dict(), names)}
    module.train()
    module.log = lambda *_, **__: None
    optimizer = module.configure_optimizers()
    losses, norms = [], []
    for index, batch in enumerate(loader(row)):
        loss = module.training_step(batch, index)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), LARGEST_NORM)))
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(_floating(module.state_dict(), names))
    count = sum(item.numel() for item in module.parameters())
    return {"losses": losses, "norms": norms, "initial": initial, "weights": weights, "parameters": count}


def _floating(state: Mapping[str, torch.Tensor], names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and names[name] == name:
            yield name, value.detach().clone()


def on_mesh(row: Row, mesh: str) -> dict[str, Any]:
    """The same by a Trainer on the ranks of a mesh, with every option of `MeshStrategy` at its default."""
    phase = "before a process starts"
    try:
        strategy = MeshStrategy(mesh=mesh, timeout=600)
        pl.seed_everything(1, verbose=False)
        task, norms = Task(row), Norms()
        names = names_of(task)
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", max_steps=STEPS, callbacks=[norms], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
            gradient_clip_val=LARGEST_NORM, precision="64-true" if row.dtype == torch.float64 else "32-true",
        )  # fmt: skip
        phase = "before the first step"
        begin = task.on_train_batch_start

        def on_train_batch_start(*args: Any) -> Any:
            nonlocal phase
            phase = f"in step {len(norms.losses) + 1}"
            return begin(*args)

        task.on_train_batch_start = on_train_batch_start
        trainer.fit(task, loader(row))
        phase = "after training"
        share = held(task) / strategy.parameter_count
        return {"losses": norms.losses, "norms": norms.norms, "weights": gathered(task, names), "share": share}
    except Exception as error:
        error.add_note(f"{PHASE}{phase}")
        raise


PHASE = "gauntlet: "
"""What the note of an error begins with that says how far a cell came."""


def held(module: nn.Module) -> int:
    """Numbers in the parameters of this rank."""
    return sum(
        (item.to_local() if isinstance(item, DTensor) else item).numel()
        for item in module.parameters()
        if not item.is_meta
    )


def gathered(module: nn.Module, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Weights and saved buffers, whole and by name, from all ranks; where two hold one, those of the last differ."""
    mine = {}
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_meta:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            mine[names.get(name, name)] = whole.detach().clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    together: dict[str, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        for name, value in part.items():
            other = together.setdefault(name, value)
            if not torch.equal(other, value):
                together[f"{name} on rank {rank}"] = value
    return together


class Cases(Mapping[str, Callable[[], Any]]):
    """Every case by its name."""

    def __getitem__(self, case: str) -> Callable[[], Any]:
        key, _, mesh = case.rpartition("@")
        row = row_of(key)
        return (lambda: plain(row)) if mesh == PLAIN else (lambda: on_mesh(row, mesh))

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError  # cases are asked for by name

    def __len__(self) -> int:
        raise NotImplementedError  # as above


if __name__ == "__main__":
    serve({"cells": Cases()}, tensors=True)
