"""How many numbers a model has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Counts:
    """Of the parameters of a whole model."""

    parameters: int
    trained: int
    """Of them, those that are not frozen."""


def count_parameters(module: nn.Module) -> Counts:
    """Count the parameters of `module`, before anything is sharded or taken out of it.

    A parameter that holds packed numbers says in an attribute `packs` how many these are.
    """
    sizes = [(getattr(item, "packs", item.numel()), item.requires_grad) for item in module.parameters()]
    return Counts(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))
