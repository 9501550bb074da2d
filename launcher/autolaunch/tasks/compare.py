"""compare: a few steps of training, of which everything is kept that says where two runs part.

What is kept of a tensor is its mean and its root mean square: sums over what each rank holds, and a count, added up
over all ranks. On every mesh the elements of a tensor are held equally often, so that both are those of the whole
tensor, however it is sharded, replicated or cut into microbatches, and nobody has to know how. A module that is run
again, for recomputation, counts alike.
"""

from __future__ import annotations

import json
import pickle
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from autolaunch.job import ResolvedJob, write_beside
from autolaunch.launch.place import Place
from autolaunch.report.comparison import (
    BATCH,
    BUFFER,
    FURTHER_OUTPUT,
    GRADIENT,
    INPUT,
    MOMENTS,
    OUTPUT,
    WEIGHT,
    Moments,
)
from autolaunch.tasks import fit
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.modes import outside_of_modes


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Train `compare.steps` steps and write what they went through; collective over all ranks. Returns the summary."""
    config = job.config
    scheduler = config["scheduler"]  # the steps are the first ones of the whole training
    if scheduler["total_steps"] is None and config["trainer"]["max_steps"] > 0:
        scheduler = {**scheduler, "total_steps": config["trainer"]["max_steps"]}
    limits = {"max_steps": config["compare"]["steps"], "max_epochs": None, "max_time": None, "limit_val_batches": 0}
    training = {
        **config,
        "task": "fit",
        "trainer": {**config["trainer"], **limits, "log_every_n_steps": 1, "nonfinite_patience": None},
        "scheduler": scheduler,
        "checkpoint": {**config["checkpoint"], "enabled": False},
    }
    seen = SeenByModules(inside=not config["compile"])
    summary = fit.run(replace(job, config=training), place, further=[seen])
    if place.rank == 0:
        kept = {"steps": seen.steps, "classes": seen.classes, "drawing": sorted(seen.drawing)}
        kept["random_numbers"] = config["random_numbers"]
        write_beside(job.output_dir / MOMENTS, json.dumps(kept))
    return {**summary, "task": "compare"}


class SeenByModules(pl.Callback):
    """Keeps the moments of batches, weights, buffers, inputs and outputs of modules and gradients, step by step.

    Args:
        inside: whether to look at inputs and outputs of modules: of compiled ones there are none to see.
    """

    def __init__(self, inside: bool = True) -> None:
        self._inside = inside
        self._sums: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        """Kind -> name -> [3] float64: sum, sum of squares and count of what this rank holds."""
        self._undo = ExitStack()
        self.steps: list[dict[str, dict[str, Moments]]] = []
        """Of each optimizer step kind -> name -> (mean, root mean square), over all ranks; the same on every rank.

        One more comes last: the weights after the last step.
        """
        self.classes: dict[str, str] = {}
        """Of the modules whose outputs are kept, those of all stages when training has ended."""
        self.drawing: set[str] = set()
        """Those of them that have asked a generator of their rank for numbers, or what they call has."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        for name, module in pl_module.named_modules() if self._inside else ():
            if module is not pl_module and not strategy.lacks(module):
                self.classes[name] = type(module).__name__
                self._undo.callback(_listen(module, partial(self._seen, module, name), partial(self.drawing.add, name)))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for name, tensor in _named_tensors(batch):
            self._add(BATCH, name, tensor)
        if WEIGHT not in self._sums:
            self._state(pl_module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for name, parameter in reversed(list(pl_module.named_parameters())):  # as gradients come
            if parameter.requires_grad:  # one that has none has another gradient than where it has some
                self._add(GRADIENT, name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > len(self.steps):
            self._end_step(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._undo.close()
        self._sums.clear()
        self._state(pl_module)  # after the last step
        self._end_step(trainer)
        for classes, drawing in _of_all_ranks((self._stage(trainer), (dict(self.classes), set(self.drawing)))):
            self.classes = classes | self.classes
            self.drawing |= drawing

    def _state(self, pl_module: pl.LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            self._add(WEIGHT, name, parameter)
        for name, module in pl_module.named_modules():
            for key, buffer in module.named_buffers(name, recurse=False):
                saved = key.rpartition(".")[2] not in module._non_persistent_buffers_set  # others are made when needed
                if saved and buffer.is_floating_point():
                    self._add(BUFFER, key, buffer)

    def _seen(self, module: nn.Module, name: str, kind: str, values: Any) -> None:
        # What is only tried (a trial of sequences, a check of samples) is run without gradients.
        if module.training and torch.is_grad_enabled():
            floating = [(place, it) for place, it in _named_tensors(values) if it.is_floating_point()]
            # Of what a module is given the first one: others (a mask, rotations) may be the same for every microbatch.
            for place, tensor in floating[:1] if kind == INPUT else floating:
                # Each by itself: some are there on one mesh alone (weights of attention are not along cp).
                is_first = kind == INPUT or tensor is values or place == "[0]"
                self._add(kind, name if is_first else f"{name}{FURTHER_OUTPUT}{place}", tensor)

    def _add(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        with outside_of_modes(), torch.no_grad():
            local = _held(tensor)
            if local is None:
                return
            values = local.detach().double()
            sums = torch.stack([values.sum(), values.square().sum(), values.new_tensor(values.numel())])
            before = self._sums[kind].get(name)
            self._sums[kind][name] = sums if before is None else before + sums

    def _end_step(self, trainer: pl.Trainer) -> None:
        mine = {kind: {name: sums.tolist() for name, sums in table.items()} for kind, table in self._sums.items()}
        self._sums.clear()
        self.steps.append(_moments(_of_all_ranks((self._stage(trainer), mine))))

    @staticmethod
    def _stage(trainer: pl.Trainer) -> int:
        strategy: Any = trainer.strategy
        return strategy.rank_mesh.coordinate["pp"]


def _listen(module: nn.Module, tell: Callable[[str, Any], None], draws: Callable[[], None]) -> Callable[[], None]:
    """Tell what `module.forward` is given and returns, and whether it draws, until what is returned here is called.

    No hook: what hooks are shown, pipelines carry from stage to stage.
    """
    forward, own = module.forward, "forward" in module.__dict__

    @wraps(forward)
    def told(*args: Any, **kwargs: Any) -> Any:
        tell(INPUT, (args, kwargs))  # now: it may change them
        before = _generators()
        output = forward(*args, **kwargs)
        tell(OUTPUT, output)
        if _generators() != before:
            draws()
        return output

    def undo() -> None:
        if own:
            module.forward = forward
        else:
            del module.forward

    module.forward = told
    return undo


def _generators() -> list[Any]:
    """The states of the generators that torch, numpy and Python draw from where they are not given one."""
    with outside_of_modes():
        states: list[Any] = [
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            pickle.dumps(np.random.get_state()),
        ]
        if torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return states


def _held(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this rank holds of a tensor; None where nothing is computed, on shapes alone."""
    if isinstance(tensor, SequenceShard):
        tensor = tensor.local
    if isinstance(tensor, DTensor):
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            summed = [Replicate() if isinstance(it, Partial) else it for it in tensor.placements]
            tensor = tensor.redistribute(placements=summed)
        tensor = tensor.to_local()
    known = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta
    return tensor if known else None


def _named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch, or of what a module returns, by where they stand in it."""
    if isinstance(batch, torch.Tensor):
        yield name or "the batch", batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from _named_tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, list | tuple):
        for position, value in enumerate(batch):
            yield from _named_tensors(value, f"{name}[{position}]")


def _of_all_ranks(mine: tuple[int, Any]) -> list[Any]:
    """What each rank has, those of the first stage first: modules in the order in which they run."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine[1]]
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    return [table for _, table in sorted(all_ranks, key=lambda item: item[0])]


def _moments(tables: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, Moments]]:
    """kind -> name -> (mean, root mean square) from the sums of all ranks."""
    totals: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for table in tables:
        for kind, named in table.items():
            for name, sums in named.items():
                before = totals[kind].get(name, [0.0, 0.0, 0.0])
                totals[kind][name] = [a + b for a, b in zip(before, sums, strict=True)]
    return {
        kind: {
            name: (total / count, (squares / count) ** 0.5) for name, (total, squares, count) in named.items() if count
        }
        for kind, named in totals.items()
    }
