"""A model's state and inputs without memory or data: the model may be on meta or real, and of any size."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from autolaunch_strategies.torch_private.random_state import saved_random_state
from autolaunch_strategies.torch_private.tracing import fake_tensors

_depth = 0


def is_on_shapes_alone() -> bool:
    """Whether `on_shapes_alone` is in effect: what runs takes no memory, whatever device its tensors name."""
    return _depth > 0


@contextmanager
def on_shapes_alone() -> Iterator[Callable[[], bool]]:
    """Within it new tensors are fake. Random states are put back afterwards: those of torch, Python and numpy.

    Gives a function that says whether anything has drawn from Python's or numpy's.
    """
    global _depth
    states = random.getstate(), np.random.get_state()

    def drew() -> bool:
        return random.getstate() != states[0] or pickle.dumps(np.random.get_state()) != pickle.dumps(states[1])

    _depth += 1
    try:
        with saved_random_state(torch.device("cpu")), fake_tensors():
            yield drew
    finally:
        _depth -= 1
        random.setstate(states[0])
        np.random.set_state(states[1])


def fake_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on the CPU with the shape, the strides and the need of a gradient of another.

    Args:
        dtype: None for that of `tensor`.
    """
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def fake_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of `model`, by name."""
    return {name: fake_like(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def fake_inputs(args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype | None = None) -> tuple[Any, dict[str, Any]]:
    """Arguments of a call with all tensors in them made fake.

    Args:
        dtype: of those with floating-point numbers; None for their own.
    """

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return fake_like(leaf, dtype if leaf.is_floating_point() else None)

    return tree_map(fake, (args, dict(kwargs)))
