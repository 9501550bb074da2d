"""Whether microbatches give what a batch gives: two samples are tried together, apart and in turn, before it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.parts import parameters_in
from autolaunch_strategies.pipeline.microbatches import Filled
from autolaunch_strategies.pipeline.structure import Structure
from autolaunch_strategies.pipeline.transfer import Axes, local_part
from autolaunch_strategies.torch_private.calls import INTERCEPTING
from autolaunch_strategies.tracing.state import attributes_kept, values_kept

Passes = Callable[[Filled, list[Any], Callable[[], AbstractContextManager[Any]]], None]
"""Runs samples through this rank's stages, each pass of a stage within what the last argument gives."""


@dataclass
class TriedSamples:
    """What two samples come to."""

    together: Filled
    apart: Filled
    """One by one, each with the model as it is."""
    in_turn: Filled
    """One after the other."""

    def problem(self, name: str, leaves: list[Any], axes: Axes, device: torch.device) -> ConfigError | None:
        """Why microbatches would change the result, if they would.

        Args:
            name: of the model.
            leaves: the flattened arguments of its call.
        """
        narrow = torch.is_autocast_enabled(device.type)  # what is fp32 there may come of products in another type
        said = ""
        if unit := _differing(self.together, self.apart, axes, narrow):
            shapes = ", ".join(str(tuple(item.shape)) for item in leaves if isinstance(item, torch.Tensor))
            said = (
                f"{unit} returns something else for a sample when another one is in the batch (tensors of shapes "
                f"{shapes} were cut along their first dim)"
            )
        elif _differing(self.apart, self.in_turn, axes, narrow):
            said = (
                f"{name} returns something else for a sample when it has been called before (a part of it keeps "
                "something from call to call)"
            )
        return samples_meet(said) if said else None


def samples_meet(said: str) -> ConfigError:
    """The error for a model of which `said` is true, so that each sample needs the whole batch."""
    return ConfigError(
        "pp.microbatches",
        f"{said}, so microbatches would change the result",
        "a model that takes the batch as its first dim and each sample by itself, or one microbatch",
        "pp.microbatches=1",
    )


@dataclass
class Samples:
    """Two samples of a batch: the flattened arguments of a call, and what runs such through this rank's stages."""

    structure: Structure
    leaves: list[Any]
    run: Passes

    def fresh(self) -> list[Any]:
        """The arguments as if nothing had run on them yet."""
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]


def try_samples(model: nn.Module, evaluates: bool, samples: Samples) -> TriedSamples:
    """Two samples through a model, which is left as it was; collective.

    Args:
        evaluates: whether the model is in evaluation for that.
    """
    modes = {module: module.training for module in model.modules()}
    structure = samples.structure
    tried = TriedSamples(Filled(structure, 1), Filled(structure, 2), Filled(structure, 2))
    as_it_was = partial(_state_kept, model)
    if evaluates:
        model.eval()
    try:
        for filled, around, each in (
            (tried.together, nullcontext, as_it_was),
            (tried.apart, nullcontext, as_it_was),
            (tried.in_turn, as_it_was, nullcontext),
        ):
            with around():
                samples.run(filled, samples.fresh(), each)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return tried


def what_training_keeps(model: nn.Module, samples: Samples) -> str:
    """The first buffer of numbers that is another one after two samples in turn than after both together, in training.

    Such as running statistics; empty if there is none. The model is left as it was. Collective.
    """
    left = []
    for count in (1, 2):
        with _state_kept(model):
            samples.run(Filled(samples.structure, count), samples.fresh(), nullcontext)
            buffers = model.named_buffers()
            left.append({name: item.clone() for name, item in buffers if item.is_floating_point() and not item.is_meta})
    together, in_turn = left
    return next(
        (
            name
            for name, item in together.items()
            if name in in_turn and item.shape == in_turn[name].shape and _far(item, in_turn[name], 1e-5)
        ),
        "",
    )


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Put back afterwards what a pass changes in the model: trained parameters, buffers, plain attributes."""
    trained = [item for item in parameters_in(model.modules()) if item.requires_grad]
    state = (*trained, *model.buffers())
    tensors = [local_part(item.detach()) for item in state if not item.is_meta]  # others are on other stages
    # Sharding of parameters and of sequences puts others there, and knows which.
    with values_kept(tensors), attributes_kept(model, ("_parameters", *INTERCEPTING)):
        yield


def _differing(one: Filled, other: Filled, axes: Axes, narrow: bool) -> str:
    """The first unit that returned something else in one of two runs of the same samples; empty if none did."""
    other_values = other.joined(axes)[0]
    for leaf, value in one.joined(axes)[0].items():
        here, there = local_part(value), local_part(other_values[leaf])
        tolerance = 1e-3 if here.dtype.itemsize >= 4 and not narrow else 5e-2
        if here.shape != there.shape or (here.is_floating_point() and _far(here, there, tolerance)):
            return one.structure.recording.calls[leaf.call].unit
    return ""


def _far(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than rounding, measured on the largest value."""
    one, other = one.float(), other.float()
    return bool((one.isnan() != other.isnan()).any()) or bool(
        (one - other).abs().max() > tolerance * one.abs().max().clamp(min=1e-6)
    )
