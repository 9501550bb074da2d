"""Small inputs with which an unknown model can be called once, to see what feeds what."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

BATCH, POSITIONS = 2, 8
"""Sizes of example inputs: different, so that layouts can be told apart."""

_USUAL_IMAGE_SIZES = (224, 32, 64, 28, 16)


@dataclass(frozen=True)
class ExampleInputs:
    """What to call a model with, and in words where that comes from."""

    origin: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_guess: bool = True


def example_inputs(model: nn.Module, example: Any = None) -> Iterator[ExampleInputs]:
    """Inputs worth a try, the likeliest first. Batches of 2, sequences of 8.

    Args:
        example: inputs that the user names (lightning's `example_input_array`); by default the model's own, if any.
    """
    example = getattr(model, "example_input_array", None) if example is None else example
    if example is not None:
        yield as_given(example)
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        yield from _of_transformers(model)
    names = _required_arguments(model)
    for origin, tensor in _by_first_layers(model):
        yield ExampleInputs(origin, (tensor,) * max(1, len(names)))


def as_given(example: Any) -> ExampleInputs:
    """Inputs that are known: a mapping by name, a tuple or a list by position, the only one, or already such inputs."""
    origin = "example_input_array"
    if isinstance(example, ExampleInputs):
        return example
    if isinstance(example, Mapping):
        return ExampleInputs(origin, (), dict(example), False)
    return ExampleInputs(origin, tuple(example) if isinstance(example, tuple | list) else (example,), {}, False)


def _of_transformers(model: Any) -> Iterator[ExampleInputs]:
    accepted = inspect.signature(model.forward).parameters
    extra = {"use_cache": False} if "use_cache" in accepted else {}
    main = model.main_input_name
    if main == "input_ids":
        extra_ids = {"decoder_input_ids": _ids()} if getattr(model.config, "is_encoder_decoder", False) else {}
        yield ExampleInputs("input_ids of transformers", (), {main: _ids(), **extra_ids, **extra})
    elif main == "pixel_values":
        for size in _image_sizes(model):
            channels = getattr(model.config, "num_channels", 3)
            images = torch.zeros(BATCH, channels, *size, dtype=model.dtype)
            yield ExampleInputs("pixel_values of transformers", (), {main: images, **extra})
    elif main == "input_values":
        sound = torch.zeros(BATCH, 4000, dtype=model.dtype)
        yield ExampleInputs("input_values of transformers", (), {main: sound, **extra})
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, Mapping):
        yield ExampleInputs("dummy_inputs of transformers", (), {**dummy, **extra})


def _by_first_layers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Inputs for the layers that are defined first: the kind of layer tells the kind of input."""
    seen: set[type] = set()
    for name, layer in model.named_modules():
        kind = next((kind for kind in (nn.Embedding, nn.Linear, nn.Conv2d, nn.Conv1d) if isinstance(layer, kind)), None)
        if kind is None or kind in seen:
            continue
        seen.add(kind)
        dtype = layer.weight.dtype
        if isinstance(layer, nn.Embedding):
            yield f"token ids for {name}", _ids()
        elif isinstance(layer, nn.Linear):
            yield f"features for {name}", torch.zeros(BATCH, POSITIONS, layer.in_features, dtype=dtype)
            yield f"features for {name}", torch.zeros(BATCH, layer.in_features, dtype=dtype)
        elif isinstance(layer, nn.Conv2d):
            for size in _image_sizes(model):
                images = torch.zeros(BATCH, layer.in_channels, *size, dtype=dtype)
                yield f"images {size[0]}x{size[1]} for {name}", images
        elif isinstance(layer, nn.Conv1d):
            yield f"signals for {name}", torch.zeros(BATCH, layer.in_channels, 64, dtype=dtype)


def _ids() -> torch.Tensor:
    return torch.zeros(BATCH, POSITIONS, dtype=torch.long)


def _image_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Sizes that the config or an attribute of a module names, or else the usual ones."""
    named: list[tuple[int, int]] = []
    for holder in (getattr(model, "config", None), *model.modules()):
        for attribute in ("image_size", "img_size", "input_size"):
            value = getattr(holder, attribute, None)
            if isinstance(value, int) and value > 0:
                named.append((value, value))
            elif isinstance(value, tuple | list) and len(value) in (2, 3) and all(isinstance(n, int) for n in value):
                named.append((value[-2], value[-1]))
    return list(dict.fromkeys(named)) or [(size, size) for size in _USUAL_IMAGE_SIZES]


def _required_arguments(model: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in kinds and parameter.default is inspect.Parameter.empty
    ]
