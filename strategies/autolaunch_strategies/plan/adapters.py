"""Plans for models with adapters: made for the model without them, and carried over to what they put in its place.

PEFT puts an adapter in the place of a layer `q_proj`, with the layer inside as `q_proj.base_layer` and two small ones
beside it, of which `lora_A` reads what the layer reads and `lora_B` gives what it gives. A module that is trained whole
becomes two copies, `lm_head.original_module` and `lm_head.modules_to_save.default`. Of adapters of other kinds (IA3,
LoHa, ...) nothing is known here: a plan is derived for the model as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from autolaunch_strategies.plan.patterns import matching
from autolaunch_strategies.plan.rules import Rule, StyleSpec

_OF_PARAMETERS = ("ColWiseParallel", "RowWiseParallel", "GatherWhenUsed")
"""Styles that shard parameters; the others are about what goes into a module and comes out of it."""


@dataclass(frozen=True)
class _Adapter:
    """What stands in the place of a layer."""

    module: nn.Module
    paths: tuple[str, ...]
    """Where the layer is in it; of several copies the one that is used first."""

    @property
    def layer(self) -> nn.Module:
        """The layer that the model would have without it."""
        return self.module.get_submodule(self.paths[0])


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[dict[str, str]]:
    """Within it `model` has its own layers where adapters stand.

    Yields:
        Name of each adapter -> where in it the layer is. Empty, and nothing is changed, if there are none.
    """
    adapters = _adapters(model)
    places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in adapters}
    for name, (parent, key) in places.items():
        parent._modules[key] = adapters[name].layer
    try:
        yield {name: adapter.paths[0] for name, adapter in adapters.items()}
    finally:
        for name, (parent, key) in places.items():
            parent._modules[key] = adapters[name].module


def carried_over(rules: Iterable[Rule], model: nn.Module) -> list[Rule]:
    """The rules for `model` with its adapters, from rules for `model` without them; the same if there are none.

    A rule that matches nothing without adapters is about them, and stays as it is.
    """
    adapters = _adapters(model)
    if not adapters:
        return list(rules)
    with without_adapters(model):
        plain = _names(model)
    names = _names(model)
    return [item for rule in rules for item in _carried_over(rule, adapters, plain, names)]


def _carried_over(rule: Rule, adapters: Mapping[str, _Adapter], plain: list[str], names: list[str]) -> Iterator[Rule]:
    matches = [] if rule.removes_nothing else matching(rule.pattern, plain)
    within = {name: holder for name in matches if (holder := _holder(name, adapters)) is not None}
    if not within:
        yield rule
        return
    if outside := [name for name in matches if name not in within]:
        yield replace(rule, pattern=_listed(outside))
    replaced = [name for name in within if name in adapters]
    around = tuple(style for style in rule.styles if style.name not in _OF_PARAMETERS)
    if around and replaced:
        yield replace(rule, pattern=_pattern(rule.pattern, "", replaced, names), styles=around)
    inner = tuple(style for style in rule.styles if style not in around)
    targets: dict[str, tuple[str, tuple[StyleSpec, ...], list[str]]] = {}
    """what is added to the pattern, the styles, and the names that are meant, one entry for each of the first two."""

    def add(addition: str, styles: tuple[StyleSpec, ...], name: str) -> None:
        targets.setdefault(repr((addition, styles)), (addition, styles, []))[2].append(name)

    for name, holder in within.items():
        rest = name.removeprefix(holder)
        if hasattr(adapters[holder].module, "parameter_name"):
            continue  # PEFT puts a sum in the place of a parameter while it is used, which has to be whole
        for path in adapters[holder].paths:
            styles = rule.styles if rest else inner
            if styles or not rule.styles:
                add("" if rest else f".{path}", styles, f"{holder}.{path}{rest}")
        for path, style in () if rest else _beside(adapters[holder].module, inner):
            add(f".{path}", (style,), f"{holder}.{path}")
    for addition, styles, wanted in targets.values():
        yield replace(rule, pattern=_pattern(rule.pattern, addition, wanted, names), styles=styles)


def _beside(adapter: nn.Module, styles: Iterable[StyleSpec]) -> Iterator[tuple[str, StyleSpec]]:
    """(name of a small layer beside the layer of an adapter, its style), from the styles of that layer."""
    for style in styles:
        side = {"ColWiseParallel": "lora_B", "RowWiseParallel": "lora_A"}.get(style.name, "")
        layers = adapter._modules.get(side)
        for name, layer in () if layers is None else layers.named_children():
            if isinstance(layer, nn.Linear):
                yield f"{side}.{name}", style


def _adapters(model: nn.Module) -> dict[str, _Adapter]:
    """The outermost adapters by name."""
    adapters: dict[str, _Adapter] = {}
    for name, module in model.named_modules():
        if name and _holder(name, adapters) is None and (paths := _paths(module)):
            adapters[name] = _Adapter(module, paths)
    return adapters


def _paths(module: nn.Module) -> tuple[str, ...]:
    """Where in `module` the layer is in whose place it stands; nothing if it is no adapter."""
    if "lora_A" in module._modules and isinstance(module._modules.get("base_layer"), nn.Module):
        below = _paths(module.get_submodule("base_layer"))
        return tuple(f"base_layer.{path}" for path in below) or ("base_layer",)
    copies = module._modules.get("modules_to_save")
    if isinstance(copies, nn.ModuleDict) and isinstance(module._modules.get("original_module"), nn.Module):
        return (*(f"modules_to_save.{key}" for key in copies), "original_module")
    return ()


def _holder(name: str, adapters: Mapping[str, _Adapter]) -> str | None:
    """The adapter that `name` is, or is in."""
    while name:
        if name in adapters:
            return name
        name = name.rpartition(".")[0]
    return None


def _names(model: nn.Module) -> list[str]:
    modules = list(model.named_modules(remove_duplicate=False))
    parameters = (f"{name}.{key}".lstrip(".") for name, module in modules for key in module._parameters)
    return [*(name for name, _ in modules if name), *parameters]


def _pattern(pattern: str, addition: str, wanted: list[str], names: list[str]) -> str:
    """`pattern` with something behind it if that matches what is wanted and no more, else the names."""
    longer = f"({pattern}){addition}" if addition and "|" in pattern else f"{pattern}{addition}"
    return longer if set(matching(longer, names)) == set(wanted) else _listed(wanted)


def _listed(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))
