"""Three functions of lightning that are replaced once `MeshStrategy` is imported: none of them asks a strategy.

`load_from_checkpoint` of a LightningModule or DataModule opens a file; a checkpoint directory of this project is read
here instead. The search for a learning rate takes the loss of the first rank's part of a batch; here it is that of the
whole batch. Callbacks that thaw parameters compare them by value with those that are trained already; here also
those that are sharded otherwise. Everything else goes to lightning's own functions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.core import saving
from lightning.pytorch.tuner import lr_finder
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autolaunch_strategies.checkpoint.files import MANIFEST, METADATA
from autolaunch_strategies.checkpoint.whole import whole_checkpoint
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.training.weights import weighed


def replace_functions() -> None:
    """Put ours in the place of lightning's. Nothing happens the second time."""
    if hasattr(saving.pl_load, "__wrapped__"):
        return
    # Names of modules and methods of classes are replaced: lightning has no hook for them.
    saving.pl_load = _reads_directories(saving.pl_load)
    thaws: Any = BaseFinetuning
    thaws.filter_on_optimizer = staticmethod(_comparing_wholes(thaws.filter_on_optimizer))
    callback = lr_finder._LRCallback
    callback.on_train_batch_end = _with_loss_of_all(callback.on_train_batch_end)  # type: ignore[method-assign]  # of this object alone


def _reads_directories(load: Any) -> Any:
    @functools.wraps(load)
    def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | Path) and _is_ours(Path(path_or_url)):
            return whole_checkpoint(Path(path_or_url), map_location, weights_only)
        return load(path_or_url, map_location=map_location, weights_only=weights_only)

    return load_any


def _is_ours(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).exists() or (path / METADATA).exists())


class _WholeEqual(TorchFunctionMode):
    """Within it `torch.equal` takes any two tensors of which some are sharded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal and not kwargs and any(isinstance(item, DTensor) for item in args):
            one, other = args
            return one is other or (one.shape == other.shape and torch.equal(plain(one), plain(other)))
        return func(*args, **(kwargs or {}))


def _comparing_wholes(filter_on_optimizer: Any) -> Any:
    @functools.wraps(filter_on_optimizer)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _WholeEqual(), torch.no_grad():
            return filter_on_optimizer(*args, **kwargs)

    return run


def _with_loss_of_all(on_train_batch_end: Any) -> Any:
    @functools.wraps(on_train_batch_end)
    def run(self: Any, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        weight = getattr(trainer.strategy, "batch_weight", None)  # of a MeshStrategy
        if isinstance(loss, torch.Tensor) and weight is not None:
            loss = trainer.strategy.reduce(weighed(loss.detach(), weight))
            outputs = {**outputs, "loss": loss} if isinstance(outputs, Mapping) else loss
        on_train_batch_end(self, trainer, pl_module, outputs, *args, **kwargs)

    return run
