"""What a model is called with, guessed from an input spec or from a batch of its loader: for looks on shapes alone."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.paddle.config import InputSpec

log = logging.getLogger(__name__)

DEFAULT_POSITIONS = 1024
"""Size of a dim that neither an input spec nor a batch shows."""

_NOT_NEEDED = ("label", "target")
"""Arguments that a model needs for its loss only have these in their names."""


@dataclass(frozen=True)
class ExampleBatch:
    """One call of a model with a batch of all ranks, and in words where that is from."""

    origin: str
    inputs: tuple[Any, ...] | dict[str, Any]
    """Arguments, by position or by name."""
    samples: int
    """Size of the first dim."""

    @property
    def positions(self) -> int | None:
        """Tokens of a sequence, where the first input is [batch, tokens] or [batch, tokens, features]; else None."""
        first = next(leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, torch.Tensor))
        is_sequence = first.dim() == 3 if first.is_floating_point() else first.dim() == 2
        return first.shape[1] if is_sequence else None

    def with_samples(self, samples: int) -> Any:
        """The inputs with so many samples, on meta."""

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = list(leaf.shape)
            if shape and shape[0] == self.samples:
                shape[0] = samples
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        return tree_map(resized, self.inputs)


def example_of(
    model: nn.Module, specs: Sequence[InputSpec] | None, batch: Any, batch_size: int | None
) -> ExampleBatch | None:
    """The call of `model` that the specs or else the batch show; None if there are neither.

    What serves the loss only is left out. Of a batch that is a list or a tuple, the first items are what the model is
    called with, as many as its `forward` has to be given; a dict gives arguments by name.

    Raises:
        ConfigError: a spec with a type that torch has not.
    """
    if specs:
        return _of_specs(model, specs, batch, batch_size)
    inputs = _called_with(model, batch)
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    return ExampleBatch("the first batch", inputs, tensors[0].shape[0]) if tensors else None


def _of_specs(model: nn.Module, specs: Sequence[InputSpec], batch: Any, batch_size: int | None) -> ExampleBatch:
    shown = [leaf for leaf in tree_leaves(_called_with(model, batch)) if isinstance(leaf, torch.Tensor)]
    names = _arguments(model)
    tensors = []
    for place, spec in enumerate(specs):
        like = shown[place].shape if place < len(shown) and shown[place].dim() == len(spec.shape) else None
        shape = [
            size or (batch_size if dim == 0 and batch_size else like[dim] if like is not None else DEFAULT_POSITIONS)
            for dim, size in enumerate(spec.shape)
        ]
        dtype = _dtype(spec)
        if like is not None and dtype.is_floating_point != shown[place].dtype.is_floating_point:
            # Paddle's own example calls token ids float32.
            log.warning("config.input_spec: batches have %s, not %s; this is used", shown[place].dtype, dtype)
            dtype = shown[place].dtype
        tensors.append(torch.empty(shape, dtype=dtype, device="meta"))
    samples = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), 1)
    if all(spec.name in names for spec in specs):
        named = {str(spec.name): tensor for spec, tensor in zip(specs, tensors, strict=True)}
        required = _required(model)
        kept = {name: tensor for name, tensor in named.items() if name in required or not _serves_loss(name)}
        return ExampleBatch("config.input_spec", kept or named, samples)
    return ExampleBatch("config.input_spec", tuple(tensors), samples)


def _dtype(spec: InputSpec) -> torch.dtype:
    dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else getattr(torch, str(spec.dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"InputSpec(dtype={spec.dtype!r})", "no type of torch", "int64, float32, bfloat16, ...")
    return dtype


def _called_with(model: nn.Module, batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Mapping):
        batch = batch[0]
    if isinstance(batch, Mapping):
        known = _arguments(model)
        required = _required(model)
        named = {str(key): value for key, value in batch.items() if key in known}
        named = {key: value for key, value in named.items() if key in required or not _serves_loss(key)}
        if any(isinstance(value, torch.Tensor) for value in named.values()):
            return named
        batch = list(batch.values())
    if isinstance(batch, torch.Tensor):
        return (batch,)
    if isinstance(batch, list | tuple):
        return tuple(batch[: max(1, len(_required(model)))])
    return ()


def _serves_loss(name: str) -> bool:
    return any(part in name.lower() for part in _NOT_NEEDED)


def _arguments(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def _required(model: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in kinds and parameter.default is inspect.Parameter.empty
    ]
