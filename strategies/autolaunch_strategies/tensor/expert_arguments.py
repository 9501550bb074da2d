"""Which of the three arguments of a module that holds experts is which, however it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from autolaunch_strategies.tensor.views import plain


def is_index(value: Any) -> bool:
    """Whether an argument holds the numbers of experts: whole numbers."""
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


class ExpertArguments:
    """Of a forward that takes hidden [T, D], index [T, K] and weights [T, K]: whole numbers are the index.

    Args:
        forward: bound to its module.
    """

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self._forward, self._signature = forward, inspect.signature(forward)

    def read(self, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """(hidden, index, weights, the place of the index) of one call, as plain tensors."""
        values = [plain(value) for value in self._signature.bind(*args, **kwargs).arguments.values()]
        place = next(place for place, value in enumerate(values) if is_index(value))
        index = values.pop(place)
        hidden, weights = values
        return hidden, index, weights, place

    def call(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, place: int) -> torch.Tensor:
        """What the forward makes of them."""
        values = [hidden, weights]
        values.insert(place, index)
        return self._forward(*values)
