"""Lightning's side of checkpoints: what is saved when, and what a resumed run takes up again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from autolaunch_strategies.checkpoint.optimizers import GroupNames
from autolaunch_strategies.checkpoint.sharded import (
    CheckpointWriter,
    load_checkpoint,
    remove_checkpoint,
    set_random_state,
)
from autolaunch_strategies.config import ParallelConfig
from autolaunch_strategies.lightning.collectives import CollectiveStrategy


class CheckpointStrategy(CollectiveStrategy):
    """The part of a strategy that saves and loads.

    Args:
        asynchronous_checkpoints: write in the background.
        trust_checkpoints: unpickle metadata of any type.
        parallel, place: what `PlacedStrategy` takes.
    """

    def __init__(
        self, parallel: ParallelConfig, *, asynchronous_checkpoints: bool, trust_checkpoints: bool, **place: Any
    ) -> None:
        super().__init__(parallel, **place)
        self._trust_checkpoints = trust_checkpoints
        self._writer = CheckpointWriter(asynchronous_checkpoints)
        self._pending_rng: dict[str, Any] | None = None
        self._optimizer_names: list[GroupNames] | None = None  # of whole optimizers, where this rank holds a stage

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._share_statistics()
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing yet: `save_checkpoint` writes optimizers itself, by parameter name."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("MeshStrategy writes checkpoint directories; it takes no storage_options")
        assert self.lightning_module is not None
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        path = Path(self.broadcast(str(filepath)))
        self._writer.save(path, checkpoint, self.lightning_module, optimizers, self.rank_mesh, self._optimizer_names)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._writer.finish()
        trust = self._trust_checkpoints if weights_only is None else not weights_only
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else []
        checkpoint = load_checkpoint(
            Path(checkpoint_path), self.lightning_module, optimizers, self.rank_mesh, trust, self._optimizer_names
        )
        state = checkpoint.pop("random_state", None)
        if fitting and state is not None:
            set_random_state(state)  # for the loaders of a new epoch
            if _in_the_middle_of_an_epoch(checkpoint):
                self._pending_rng = state  # making the loaders again draws numbers that the first run did not draw
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has filled the parameters."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: Any) -> None:
        self._writer.finish()
        path = Path(filepath)
        if self.is_global_zero and path.is_dir() and not path.is_symlink():
            remove_checkpoint(path)
        else:
            super().remove_checkpoint(filepath)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        if self._pending_rng is not None and self.lightning_module.trainer.training:
            set_random_state(self._pending_rng)
            self._pending_rng = None
        return super().batch_to_device(batch, device, dataloader_idx)


def _in_the_middle_of_an_epoch(checkpoint: dict[str, Any]) -> bool:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return progress.get("current", {}).get("ready", 0) > 0 and not progress.get("is_last_batch", False)
