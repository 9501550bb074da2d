"""Modules with parameters [experts, ...] that compute with the experts of this rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def made_by_own(
    module: nn.Module,
    forward: Callable[..., torch.Tensor],
    experts: int,
    rows: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    change: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """What the experts of this rank make of rows, each with weight one: [N, D].

    Args:
        module: with parameters that are DTensors sharded by experts, of which this rank has `experts`.
        forward: the module's own.
        rows: [N, D], be there none.
        numbers: [N], for each row its expert, counted from the first of this rank.
        weights: a tensor of the kind that the module is called with.
        change: (name of a parameter, this rank's part of it) -> what the module sees of it.
    """
    is_empty = len(rows) == 0
    if is_empty:  # its result is dropped, but backward comes through here, to where all ranks meet
        rows, numbers = rows.new_zeros((1, *rows.shape[1:])) + rows.sum(), numbers.new_zeros(1)
    with _own_parameters(module, experts, change):
        made = forward(rows, numbers.unsqueeze(-1), weights.new_ones((len(rows), 1)))
    return made[:0] if is_empty else made


@contextmanager
def _own_parameters(
    module: nn.Module, experts: int, change: Callable[[str, torch.Tensor], torch.Tensor] | None
) -> Iterator[None]:
    """Within it a module sees its part of each parameter as a plain tensor, and that it has so many experts."""
    sharded, count = dict(module._parameters), module.__dict__["num_experts"]
    try:
        for name, parameter in sharded.items():
            if isinstance(parameter, DTensor):
                own = parameter.to_local()
                module._parameters[name] = own if change is None else change(name, own)
        module.__dict__["num_experts"] = experts
        yield
    finally:
        module._parameters.update(sharded)
        module.__dict__["num_experts"] = count
