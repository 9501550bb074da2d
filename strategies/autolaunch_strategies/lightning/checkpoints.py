"""Lightning's side of checkpoints: what is saved when, and what a resumed run takes up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from autolaunch_strategies.checkpoint.optimizers import GroupNames
from autolaunch_strategies.checkpoint.sharded import (
    CheckpointWriter,
    load_checkpoint,
    remove_checkpoint,
    set_random_state,
)
from autolaunch_strategies.lightning.place import Place


class Checkpoints:
    """Saves, loads and removes checkpoints of a run, and gives a resumed one its random numbers back in time.

    Args:
        place: knows the mesh, from its `join` on.
        asynchronous: write in the background.
        trust: unpickle metadata of any type.
    """

    def __init__(self, place: Place, asynchronous: bool = False, trust: bool = True) -> None:
        self.place, self.trust = place, trust
        self.optimizer_names: list[GroupNames] | None = None
        """The groups of each whole optimizer, where this rank holds a stage."""
        self._writer = CheckpointWriter(asynchronous)
        self._pending_rng: dict[str, Any] | None = None

    def save(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        module: pl.LightningModule,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        """Write lightning's `checkpoint` to the directory `path`, the same on every rank. Collective."""
        self._writer.save(path, checkpoint, module, optimizers, self.place.rank_mesh, self.optimizer_names)

    def load(
        self,
        path: Path,
        module: pl.LightningModule,
        optimizers: list[torch.optim.Optimizer],
        fitting: bool,
        trust: bool | None = None,
    ) -> dict[str, Any]:
        """Fill the module and, when `fitting`, the optimizers; what lightning has to take up itself. Collective.

        Args:
            trust: instead of this object's own.
        """
        self._writer.finish()
        checkpoint = load_checkpoint(
            path,
            module,
            optimizers if fitting else [],
            self.place.rank_mesh,
            self.trust if trust is None else trust,
            self.optimizer_names,
        )
        state = checkpoint.pop("random_state", None)
        if fitting and state is not None:
            set_random_state(state)  # for the loaders of a new epoch
            if _in_the_middle_of_an_epoch(checkpoint):
                self._pending_rng = state  # making the loaders again draws numbers that the first run did not draw
        return checkpoint

    def before_training_batch(self) -> None:
        """The first batch of a resumed run has been loaded: go on with the random numbers of the one that saved."""
        if self._pending_rng is not None:
            set_random_state(self._pending_rng)
            self._pending_rng = None

    def remove(self, path: Path) -> bool:
        """Remove a checkpoint that is a directory, on rank 0; whether that was done."""
        self._writer.finish()
        if self.place.global_rank == 0 and path.is_dir() and not path.is_symlink():
            remove_checkpoint(path)
            return True
        return False

    def finish(self, together: bool = True) -> None:
        """Wait for what is being written; with `together=False` the other ranks may be gone."""
        self._writer.finish(together)


def _in_the_middle_of_an_epoch(checkpoint: dict[str, Any]) -> bool:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return progress.get("current", {}).get("ready", 0) > 0 and not progress.get("is_last_batch", False)
