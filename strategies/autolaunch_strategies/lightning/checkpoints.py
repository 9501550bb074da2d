"""Lightning's side of checkpoints: what is saved when, and what a resumed run takes up again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from autolaunch_strategies.checkpoint.files import complete_checkpoints, read_manifest
from autolaunch_strategies.checkpoint.optimizers import GroupNames
from autolaunch_strategies.checkpoint.record import (
    changes,
    check_allowed,
    plain_record,
    record_of,
    refuse_changes,
    told,
)
from autolaunch_strategies.checkpoint.sharded import (
    CheckpointWriter,
    copy_part,
    damage,
    load_checkpoint,
    set_random_state,
)
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.lightning.ema import check_left_out
from autolaunch_strategies.lightning.place import Place
from autolaunch_strategies.lightning.positions import Positions, take_states, trained_batches
from autolaunch_strategies.lightning.step_start import StepStart
from autolaunch_strategies.tensor.views import plain

VERIFICATIONS = ("hash", "size")

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves, loads and removes checkpoints of a run, and gives a resumed one its random numbers back in time.

    Args:
        place: knows the mesh, from its `join` on.
        positions: resumes the training loaders.
        asynchronous: write in the background.
        trust: run what checkpoints' pickles name, if that is no plain data.
        verify: before loading, compare the content of files (`hash`) or their sizes only (`size`).
        recorded: what each checkpoint says about the run beside the optimizer and the batch size; see
            `checkpoint.record`.
        allowed: names in the record that may be another in the run that goes on.
        batch_size: says how many samples an optimizer step takes, over all ranks; None while that is not known.

    Raises:
        ConfigError: another `verify`, a record that is no plain data, an allowed name that is not compared.
    """

    def __init__(
        self,
        place: Place,
        positions: Positions,
        asynchronous: bool = False,
        trust: bool = False,
        verify: str = "hash",
        recorded: Mapping[str, Any] | None = None,
        allowed: Collection[str] = (),
        batch_size: Callable[[], int | list[int] | None] = lambda: None,
    ) -> None:
        if verify not in VERIFICATIONS:
            raise ConfigError(
                f"verify_checkpoints={verify!r}",
                "not one of the choices",
                ", ".join(VERIFICATIONS),
                "MeshStrategy(verify_checkpoints='hash')",
            )
        check_allowed(allowed, f"allow_on_resume={list(allowed)!r}", "MeshStrategy(allow_on_resume=['{}'])")
        self.place, self.positions, self.trust, self.verify = place, positions, trust, verify
        self.recorded, self.allowed, self._batch_size = plain_record(recorded or {}), tuple(allowed), batch_size
        self.changed: dict[str, str] = {}
        """Name in the record -> how it has changed since the checkpoint from which training goes on."""
        self.tell: Callable[[str], None] = log.warning
        """Shows a line about the checkpoint from which training goes on; called on the first rank."""
        self._samples_there: tuple[Path, Any] | None = None
        self.optimizer_names: list[GroupNames] | None = None
        """The groups of each whole optimizer, where this rank holds a stage."""
        self.earlier_if_damaged = False
        """Load the furthest trained whole checkpoint beside one that is damaged, and say so, instead of refusing it."""
        self.as_of: StepStart | None = None
        """Save the loops and random numbers of then, instead of the present ones."""
        self._writer = CheckpointWriter(asynchronous, place.first_step_timeout)
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
        run = {**self._record(optimizers), "batch_size": self.recorded.get("batch_size", self._batch_size())}
        run = {name: value for name, value in run.items() if value is not None}
        random = None
        if self.as_of is not None:
            random = self.as_of.random
            checkpoint = {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": self.as_of.loops}}
        self._writer.save(path, checkpoint, module, optimizers, self.place.rank_mesh, self.optimizer_names, run, random)

    def _record(self, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        """What is recorded of this run and is known before its data are loaded."""
        if not optimizers:
            return self.recorded
        classes = [_class_path(type(optimizer)) for optimizer in optimizers]
        return {**self.recorded, "optimizer": classes[0] if len(classes) == 1 else classes}

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
        there, here = (record_of(path), self._record(optimizers)) if fitting else ({}, {})
        self.changed = changes(there, here)
        checkpoint = load_checkpoint(
            path,
            module,
            optimizers if fitting and "optimizer" not in self.changed else [],
            self.place.rank_mesh,
            self.trust if trust is None else trust,
            self.optimizer_names,
            verify,
            lambda: refuse_changes(path, self.changed, self.allowed, in_script=True),
        )
        if fitting:
            if "optimizer" in self.changed:
                check_left_out(path, self.trust if trust is None else trust)
            self._go_on_from(path, there, here)
        self._loaded = dict(checkpoint["state_dict"])
        state = checkpoint.pop("random_state", None)
        if fitting:
            self._resume_loaders(path, checkpoint, state)
        return checkpoint

    def _go_on_from(self, path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
        """Tell what is another than in the run that wrote the checkpoint, and keep what can't be compared yet."""
        manifest = read_manifest(path) if path.is_dir() else {}
        self._writer.newest = manifest.get("written", 0.0)
        self._samples_there = (
            (path, there["batch_size"]) if "batch_size" in there and "batch_size" not in here else None
        )
        if self.place.global_rank != 0:
            return
        mesh = {"mesh": manifest["mesh"]} if "mesh" in manifest else {}
        for line in told(path, {**mesh, **there}, {"mesh": self.place.rank_mesh.shape.name, **here}, self.allowed):
            self.tell(line)

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

    def compare_batch_size(self) -> None:
        """Training is about to begin, with its loaders made: if it is resumed, with batches as those that were saved.

        Raises:
            ConfigError: its loaders have another batch size than those of the one that saved.
        """
        if self._samples_there is None:
            return
        (path, there), here = self._samples_there, self._batch_size()
        self._samples_there = None
        if here is not None:
            changed = changes({"batch_size": there}, {"batch_size": here})
            refuse_changes(path, changed, self.allowed, in_script=True)

    def remove(self, path: Path) -> bool:
        """Remove a checkpoint that is a directory, on rank 0; whether that was done."""
        if self.place.global_rank == 0 and path.is_dir() and not path.is_symlink():
            self._writer.remove(path)
            return True
        return False

    def finish(self, together: bool = True) -> RuntimeError | None:
        """Wait for what is being written; with `together=False` the other ranks may be gone: why it could not be.

        Raises:
            RuntimeError: it could not be written; `together` only.
        """
        return self._writer.finish(together)


def _class_path(kind: type) -> str:
    """Where a class is imported from, as people write it."""
    public = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if public else f"{kind.__module__}.{kind.__qualname__}"
