"""How much of a model each rank along mp holds, as a plan shards it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from autolaunch_strategies.plan.rules import Match
from autolaunch_strategies.tensor.styles.build import build_style

_NAMED = 3
"""How many of the parameters that stay whole are named."""


def share_per_rank(
    model: nn.Module, matches: Iterable[Match], ranks: int, parts: Mapping[nn.Parameter, int] = MappingProxyType({})
) -> tuple[float, dict[str, float]]:
    """(the part of all numbers that a rank holds at most, kind of parameter that stays whole -> its part).

    The numbers in the name of a kind are `*`. What torch's styles and those of a user shard counts as whole.

    Args:
        parts: parameters of which a rank holds one of so many parts whatever the plan is, as of experts.
    """
    sharded: dict[int, int] = {}
    for _, parameter, dim in placed_by(model, matches, ranks):
        sharded.setdefault(id(parameter), dim)  # the first rule to name it wins
    total = held = 0
    whole: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        part = parameter.numel()
        if id(parameter) in sharded and part:
            size = parameter.shape[sharded[id(parameter)]]
            part = part // size * -(-size // ranks)
        elif parameter in parts:
            part //= parts[parameter]
        else:
            whole[re.sub(r"\d+", "*", name)] += part
        total, held = total + parameter.numel(), held + part
    return held / max(total, 1), {name: count / max(total, 1) for name, count in whole.most_common()}


def placed_by(model: nn.Module, matches: Iterable[Match], ranks: int) -> Iterator[tuple[Match, nn.Parameter, int]]:
    """What rules place, in order: (the rule's match, a parameter, the dim along which it is sharded)."""
    modules = dict(model.named_modules())
    for match in matches:
        module = modules[match.module]
        for spec in match.rule.styles:
            style = build_style(spec, f"{match.rule.source}: {match.rule.pattern}")
            for name, dim in style.sharded_dims(module, match.only, ranks).items():
                yield match, module.get_parameter(name), dim


def forestalled(model: nn.Module, matches: Sequence[Match], ranks: int) -> list[str]:
    """A warning for every rule of `mp.plan` that means to shard layers which rules before it shard along other dims."""
    first: dict[int, tuple[Match, int]] = {}
    before: dict[str, dict[str, str]] = {}
    others: set[str] = set()
    for match, parameter, dim in placed_by(model, matches, ranks):
        placed, along = first.setdefault(id(parameter), (match, dim))
        if placed.module == match.module and along != dim:  # else it is the same, or tied to another module's
            before.setdefault(match.rule.pattern, {})[placed.rule.pattern] = placed.rule.source
        else:
            others.add(match.rule.pattern)
    of_plan = {match.rule.pattern for match in matches if match.rule.source == "mp.plan"}
    return [
        f"mp.plan: {pattern} shards nothing: the first rule counts, and before it stands {', '.join(rules)}"
        + ("" if "mp.plan" in rules.values() else " (null removes it)")
        for pattern, rules in before.items()
        if pattern in of_plan - others
    ]


def share_in_words(share: float, whole: dict[str, float]) -> str:
    """One line for people."""
    line = f"each rank holds {share:.0%} of the parameters"
    named = [f"{name} {part:.0%}" for name, part in whole.items() if part >= 0.005][:_NAMED]
    return f"{line}; whole on all of them: {', '.join(named)}" if named else line
