"""Lightning's side of checkpoints: what is saved when, and what a resumed run takes up again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from autolaunch_strategies.checkpoint.files import complete_checkpoints
from autolaunch_strategies.checkpoint.optimizers import GroupNames
from autolaunch_strategies.checkpoint.sharded import (
    CheckpointWriter,
    copy_part,
    damage,
    load_checkpoint,
    set_random_state,
)
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.lightning.place import Place
from autolaunch_strategies.lightning.positions import Positions, take_states, trained_batches
from autolaunch_strategies.tensor.views import plain

VERIFICATIONS = ("hash", "size")


class Checkpoints:
    """Saves, loads and removes checkpoints of a run, and gives a resumed one its random numbers back in time.

    Args:
        place: knows the mesh, from its `join` on.
        positions: resumes the training loaders.
        asynchronous: write in the background.
        trust: run what checkpoints' pickles name, if that is no plain data.
        verify: before loading, compare the content of files (`hash`) or their sizes only (`size`).

    Raises:
        ConfigError: another `verify`.
    """

    def __init__(
        self,
        place: Place,
        positions: Positions,
        asynchronous: bool = False,
        trust: bool = False,
        verify: str = "hash",
    ) -> None:
        if verify not in VERIFICATIONS:
            raise ConfigError(
                f"verify_checkpoints={verify!r}",
                "not one of the choices",
                ", ".join(VERIFICATIONS),
                "MeshStrategy(verify_checkpoints='hash')",
            )
        self.place, self.positions, self.trust, self.verify = place, positions, trust, verify
        self.optimizer_names: list[GroupNames] | None = None
        """The groups of each whole optimizer, where this rank holds a stage."""
        self.earlier_if_damaged = False
        """Load the furthest trained whole checkpoint beside one that is damaged, and say so, instead of refusing it."""
        self._writer = CheckpointWriter(asynchronous, place.timeout)
        self._loaded: dict[str, Any] = {}

    def save(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        module: pl.LightningModule,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        """Write lightning's `checkpoint` to the directory `path`, the same on every rank. Collective."""
        self.positions.before_save()
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
        verify = self.verify
        if self.earlier_if_damaged:
            path, verify = self._whole(path), "size"
        checkpoint = load_checkpoint(
            path,
            module,
            optimizers if fitting else [],
            self.place.rank_mesh,
            self.trust if trust is None else trust,
            self.optimizer_names,
            verify,
        )
        self._loaded = dict(checkpoint["state_dict"])
        state = checkpoint.pop("random_state", None)
        if fitting:
            self._resume_loaders(path, checkpoint, state)
        return checkpoint

    def _resume_loaders(self, path: Path, checkpoint: dict[str, Any], random_state: dict[str, Any] | None) -> None:
        states, batches = take_states(checkpoint), trained_batches(checkpoint)
        self.positions.mend_progress(checkpoint)
        # Making the loaders again may draw numbers that the first run did not draw: so they are set again.
        restore = None if random_state is None else partial(set_random_state, random_state)
        if restore is not None:
            restore()
        self.positions.resume(states, batches, str(path), restore)

    def _whole(self, path: Path) -> Path:
        """`path`, or if it is damaged the furthest trained one beside it that is not, if there is one. Collective."""
        problem = damage(path, self.verify)
        if problem is None:
            return path
        for earlier in reversed(complete_checkpoints(path.parent)):
            if earlier != path and damage(earlier, self.verify) is None:
                if self.place.global_rank == 0:
                    warnings.warn(f"{path} {problem}; going on from {earlier} instead", stacklevel=2)
                return earlier
        return path

    def fill_changed(self, state: Mapping[str, Any], module: pl.LightningModule) -> None:
        """Fill what `on_load_checkpoint` has put in the place of loaded tensors.

        Args:
            state: the `state_dict` that `load` has returned, after the hooks.

        Raises:
            ConfigError: a tensor of another shape.
        """
        loaded, self._loaded = self._loaded, {}
        mine = module.state_dict()
        for name, value in state.items():
            if name not in mine or value is loaded.get(name) or not isinstance(value, torch.Tensor):
                continue
            if value.shape != mine[name].shape:
                raise ConfigError(
                    f"on_load_checkpoint: state_dict[{name!r}]",
                    f"has shape {tuple(value.shape)}, but the model's {tuple(mine[name].shape)}",
                    "whole tensors of the model's shapes",
                )
            copy_part(plain(value), mine[name])

    def remove(self, path: Path) -> bool:
        """Remove a checkpoint that is a directory, on rank 0; whether that was done."""
        if self.place.global_rank == 0 and path.is_dir() and not path.is_symlink():
            self._writer.remove(path)
            return True
        return False

    def finish(self, together: bool = True) -> None:
        """Wait for what is being written; with `together=False` the other ranks may be gone."""
        self._writer.finish(together)
