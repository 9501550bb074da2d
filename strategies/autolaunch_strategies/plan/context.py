"""Rules that say where sequences are sharded along cp, and how they go with those for mp. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from autolaunch_strategies.config import ConfigError, ContextParallel, check_shards_as, cp_backend, parallel_config
from autolaunch_strategies.plan.rules import Rule, StyleSpec, read_plan

CONTEXT_STYLES = ("PrepareContextParallel", "ContextParallel")
"""Styles that speak of cp; every other one speaks of mp."""

_PADDLE_BACKEND = cp_backend("p2p")  # the default of its styles


def read_context_plan(plan: Any, backend: str | None, source: str = "cp.plan") -> list[Rule]:
    """Read and check a plan that has nothing but styles for cp. A rule of null is left out.

    Args:
        backend: what the axis does; None where it has one rank, so that nothing is sharded.

    Raises:
        ConfigError: as `read_plan`; a style for mp; one that names a backend which shards sequences in another way.
    """
    rules = read_plan(plan, source)
    for rule in rules:
        for style in rule.styles:
            if not is_context_style(style):
                raise ConfigError(
                    f"{source}: {rule.pattern}: {style.name}",
                    "this is nothing that cp does",
                    f"{' and '.join(CONTEXT_STYLES)}; all others stand in the plan for mp",
                )
    if backend is not None:
        check_backends(rules, backend)
    return rules


def check_backends(rules: Iterable[Rule], backend: str) -> None:
    """Refuse styles in any plan that name a backend which shards sequences in another way than the axis does.

    Raises:
        ConfigError: there is such a style.
    """
    for rule in rules:
        for style in rule.styles:
            named = _backend_of(style)
            if named is not None:
                check_shards_as(named, backend, f"{rule.source}: {rule.pattern}: {style.name}")


def with_context_plan(base: Iterable[Rule], cp: ContextParallel | None) -> list[Rule]:
    """The rules of `cp.plan` behind those of a plan for mp; of one pattern both are applied.

    Raises:
        ConfigError: as `read_context_plan`, and as `check_backends` for styles within `base`.
    """
    if cp is None:
        return list(base)
    base = list(base)
    check_backends(base, cp.backend)
    return [*base, *read_context_plan(cp.plan, cp.backend)]


def context_rules(rules: Iterable[Rule]) -> list[Rule]:
    """The rules without what they say of mp: all that is left of a plan where mp has one rank."""
    return _rules_with(rules, of_context=True)


def other_rules(rules: Iterable[Rule]) -> list[Rule]:
    """The rules without what they say of cp: the inverse of `context_rules`."""
    return _rules_with(rules, of_context=False)


def _rules_with(rules: Iterable[Rule], of_context: bool) -> list[Rule]:
    kept = []
    for rule in rules:
        styles = tuple(style for style in rule.styles if is_context_style(style) == of_context)
        if styles or (rule.removes_nothing and not of_context):
            kept.append(dataclasses.replace(rule, styles=styles))
    return kept


def context_config(cp_config: Mapping[str, Any], others: Iterable[Rule] = ()) -> ContextParallel:
    """What ``cp_config={"parallelize_plan": {pattern: style or [style, ...]}}`` of `parallelize` means.

    Beside the plan it may have fields of `ContextParallel`: backend, ulysses, pad. Without a backend it is the one that
    styles name, or else p2p (ring).

    Args:
        cp_config: as of `parallelize`, and not changed; {} if there is none.
        others: rules for mp, in which styles for cp may stand, too.

    Raises:
        ConfigError: an unknown key, an empty plan, a wrong style or value, styles that name backends which shard
            sequences in different ways.
    """
    fields = [item.name for item in dataclasses.fields(ContextParallel) if item.name not in ("name", "plan")]
    if unknown := [key for key in cp_config if key not in ("parallelize_plan", *fields)]:
        raise ConfigError(f"cp_config[{unknown[0]!r}]", "no such key", ", ".join(("parallelize_plan", *fields)))
    source = "cp_config['parallelize_plan']"
    plan = cp_config.get("parallelize_plan")
    if isinstance(plan, Mapping) and not plan:
        raise ConfigError(
            source, "there is no rule in it", "rules, or no parallelize_plan: then every block gets sharded sequences"
        )
    rules = [*others, *read_plan(plan, source)]
    backend = cp_config.get("backend")
    if backend is None:
        named = (_backend_of(style) for rule in rules for style in rule.styles)
        backend = next((name for name in named if name is not None), _PADDLE_BACKEND)
    backend = cp_backend(backend, "cp_config['backend']")
    check_backends(others, backend)
    read_context_plan(plan, backend, source)
    values = {key: cp_config[key] for key in ("ulysses", "pad") if key in cp_config}
    config = parallel_config(cp={"name": "parallelize", "backend": backend, "plan": dict(plan or {}), **values}).cp
    assert config is not None
    return config


def is_context_style(style: StyleSpec) -> bool:
    """Whether a style speaks of cp, be it by name, by import path, or an object of its class."""
    if style.instance is not None:
        return any(base.__name__ in CONTEXT_STYLES for base in type(style.instance).__mro__)
    return style.name.rpartition(".")[2] in CONTEXT_STYLES


def _backend_of(style: StyleSpec) -> str | None:
    """The backend that a style for cp names, if it names one."""
    if not is_context_style(style):
        return None
    named = style.arguments.get("backend") if style.instance is None else style.instance.backend
    return None if named is None else cp_backend(named, f"{style.name}: backend")
