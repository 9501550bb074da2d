"""The modules and parameters of a model, once each, level by level.

`nn.Module.modules` and `parameters` make names on their way and pass each item up through every level: what looks at a
model in every step takes these, which need a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`model` and every module within it."""
    modules: dict[nn.Module, None] = {}
    level = [model]
    while level:
        modules.update(dict.fromkeys(level))
        holders = [module._modules for module in level if module._modules]
        level = [part for parts in holders for part in parts.values() if part is not None and part not in modules]
    return list(modules)


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of modules, not of those in them, at this moment: sharding puts others there for a while."""
    parameters = [parameter for module in modules for parameter in module._parameters.values()]
    return list({id(parameter): parameter for parameter in parameters if parameter is not None}.values())
