"""Plans as documents: reading, checking, merging and matching rules. Imports no torch.

A plan maps patterns over module names to a style or a list of styles, in order. In YAML a style is its name
(``RowWiseParallel``), its name with arguments (``{SequenceParallelDisable: {need_transpose: false}}``) or a class of
the user's own (``{_target_: my.Style, ...}``).
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autolaunch_strategies.config import ConfigError, cp_backend, nearest
from autolaunch_strategies.plan.patterns import compile_pattern, nearest_names

log = logging.getLogger(__name__)

STYLES: dict[str, dict[str, type]] = {
    "ColWiseParallel": {"gather_output": bool, "shard_dim": int},
    "RowWiseParallel": {"is_input_parallel": bool},
    "GatherWhenUsed": {"parameters": list},
    "DivideExperts": {},
    "SequenceParallelBegin": {"need_transpose": bool},
    "SequenceParallelEnd": {"need_transpose": bool},
    "SequenceParallelEnable": {},
    "SequenceParallelDisable": {"need_transpose": bool},
    "PrepareContextParallel": {"backend": str},
    "ContextParallel": {"backend": str},
    "PrepareLayerInput": {"fn": object},
    "PrepareLayerOutput": {"fn": object},
}
"""The styles that have a name, and the types of their arguments."""


@dataclass(frozen=True)
class StyleSpec:
    """One style as a plan names it: by `name` and arguments, or an object (`instance`) that Python code put there."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    instance: Any = None

    def to_yaml(self) -> Any:
        """The shortest way to write it in a plan."""
        if self.instance is not None:
            return f"<{self.name}>"
        if "." in self.name:
            return {"_target_": self.name, **self.arguments}
        return {self.name: dict(self.arguments)} if self.arguments else self.name


@dataclass(frozen=True)
class Rule:
    """A pattern, what happens to the modules that it matches, why, and who says so."""

    pattern: str
    styles: tuple[StyleSpec, ...]
    reason: str = ""
    source: str = "mp.plan"
    removes_nothing: bool = False
    """Whether it is what is left of a null for a rule that there is not, to be told."""

    def to_yaml(self) -> Any:
        """The right-hand side of the rule in a plan."""
        specs = [style.to_yaml() for style in self.styles]
        return specs[0] if len(specs) == 1 else specs


def read_plan(plan: Any, source: str = "mp.plan", reasons: Mapping[str, str] | None = None) -> list[Rule]:
    """Read and check a plan: a mapping of patterns to styles. A rule of null is left out (see `merge_plans`).

    Raises:
        ConfigError: not a mapping, a pattern that is none, an unknown style or argument.
    """
    if plan is None:
        return []
    if not isinstance(plan, Mapping):
        raise ConfigError(source, f"a plan is a mapping of patterns to styles, not {type(plan).__name__}")
    rules = []
    for pattern, styles in plan.items():
        if not isinstance(pattern, str):
            raise ConfigError(
                f"{source}: {pattern!r}", "a pattern is text", "names of modules, with * or regular expressions"
            )
        compile_pattern(pattern)
        if styles is None:
            continue
        listed = styles if isinstance(styles, list | tuple) else [styles]
        specs = tuple(_read_style(style, f"{source}: {pattern}") for style in listed)
        rules.append(Rule(pattern, specs, (reasons or {}).get(pattern, ""), source))
    return rules


def merge_plans(base: Iterable[Rule], plan: Mapping[str, Any] | None, source: str = "mp.plan") -> list[Rule]:
    """`plan` over `base`: a rule with the same pattern takes the place of the base's, null removes it, others follow.

    A null for a pattern that the base does not have stays, as a rule that removes nothing, for `match_rules` to tell.

    Raises:
        ConfigError: as `read_plan`.
    """
    changed = {rule.pattern: rule for rule in read_plan(plan, source)}
    removed = {pattern for pattern, styles in (plan or {}).items() if styles is None}
    base = list(base)
    kept = [changed.pop(rule.pattern, rule) for rule in base if rule.pattern not in removed]
    idle = removed - {rule.pattern for rule in base}
    return [
        *kept,
        *changed.values(),
        *(Rule(pattern, (), source=source, removes_nothing=True) for pattern in sorted(idle)),
    ]


def _read_style(style: Any, where: str) -> StyleSpec:
    arguments: Mapping[str, Any]
    if isinstance(style, str):
        name, arguments = style, {}
    elif isinstance(style, Mapping) and "_target_" in style:
        return StyleSpec(style["_target_"], {key: value for key, value in style.items() if key != "_target_"})
    elif isinstance(style, Mapping) and len(style) == 1:
        name, arguments = next(iter(style.items()))
        arguments = arguments or {}
    elif isinstance(style, Mapping | list | int | float | bool) or style is None:
        raise ConfigError(where, f"not a style: {style!r}", "a name, {Name: {argument: value}}, or {_target_: ...}")
    else:
        return StyleSpec(type(style).__name__, {}, instance=style)
    if name == "ExpertParallel":  # as plan.yaml calls what `ep` does
        raise ConfigError(
            where, "experts are found by their structure, no rule is needed: `ep` shares them out", "ep=N", "ep=2"
        )
    if name not in STYLES:
        same_beginning = [known for known in STYLES if known[:3].lower() == str(name)[:3].lower()]
        close = nearest(str(name), same_beginning or STYLES)
        raise ConfigError(
            where, f"no style is called {name!r}" + (f"; did you mean {close}?" if close else ""), ", ".join(STYLES)
        )
    known = STYLES[name]
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            where, f"the arguments of {name} are a mapping, not {arguments!r}", ", ".join(known) or "none"
        )
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(where, f"{name} has no argument {key!r}", ", ".join(known) or "it takes none")
        if known[key] is not object and not (isinstance(value, known[key]) or value is None):
            raise ConfigError(where, f"{name}.{key}={value!r}", f"a value of type {known[key].__name__}")
        if key == "backend" and value is not None:
            cp_backend(value, f"{where}: {name}: backend")
    return StyleSpec(name, dict(arguments))


@dataclass(frozen=True)
class Match:
    """A rule that applies to a module, or to the one parameter `only` of it."""

    rule: Rule
    module: str
    only: str | None


def match_rules(
    rules: Iterable[Rule], parameters: Mapping[str, Iterable[str]], prefix: str = ""
) -> tuple[list[Match], list[str]]:
    """Which rule applies where: modules in the order of the model, for each its rules in the order of the plan.

    Args:
        parameters: module name -> names of the parameters that it holds itself, in the order of the model.
        prefix: what a pattern may have in front of the names, too (``model.``). Where that is the name of another
            module or parameter, it means that one: the root is not ``model`` if it has a child ``model``.

    Returns:
        the matches, and a warning for every rule that matches or removes nothing, with the nearest names.
    """
    listed = list(rules)
    rules = [rule for rule in listed if not rule.removes_nothing]
    names_of_parameters = {f"{name}.{own}" if name else own for name, names in parameters.items() for own in names}
    used: set[int] = set()
    matches = []

    def means(pattern: re.Pattern[str], name: str, known: Collection[str]) -> bool:
        with_prefix = (prefix + name).rstrip(".")
        spellings = [name] if with_prefix in known else [name, with_prefix]
        return any(spelling and pattern.fullmatch(spelling) for spelling in spellings)

    for name, own in parameters.items():
        for index, rule in enumerate(rules):
            pattern = compile_pattern(rule.pattern)
            if means(pattern, name, parameters):
                matches.append(Match(rule, name, None))
                used.add(index)
                continue
            for parameter in own:
                full = f"{name}.{parameter}" if name else parameter
                if means(pattern, full, names_of_parameters):
                    matches.append(Match(rule, name, parameter))
                    used.add(index)
    warnings = []
    for index, rule in enumerate(rules):
        if index not in used:
            close = nearest_names(rule.pattern, [name for name in parameters if name])
            meant = f"; the nearest names are {', '.join(close)}" if close else ""
            warnings.append(f"{rule.source}: {rule.pattern} matches nothing{meant}")
    patterns = [rule.pattern for rule in rules]
    for rule in listed:
        if rule.removes_nothing:
            similar = nearest(rule.pattern, patterns)
            known = f"did you mean {similar}?" if similar else f"there are {', '.join(patterns) or 'none'}"
            warnings.append(f"{rule.source}: {rule.pattern}: null removes nothing, no rule has this pattern; {known}")
    return matches, warnings


def check_callable(fn: Any, where: str) -> Callable[..., Any]:
    """`fn` if it can be called with `process_mesh=`.

    Raises:
        ConfigError: it can't.
    """
    if not callable(fn):
        raise ConfigError(where, f"fn is not a function: {fn!r}", "fn(process_mesh=mesh) that returns a hook")
    try:
        inspect.signature(fn).bind(process_mesh=None)
    except (TypeError, ValueError):
        raise ConfigError(where, "fn does not take process_mesh", "fn(process_mesh=mesh) that returns a hook") from None
    return fn
