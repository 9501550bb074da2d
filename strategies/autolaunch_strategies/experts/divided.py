"""What a plan for mp does to experts: what it gathers, for want of a rule, is divided, or left to the degree `ep`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from torch import nn

from autolaunch_strategies.experts.find import countable_mixtures
from autolaunch_strategies.plan.derive import SOURCE as DERIVED
from autolaunch_strategies.plan.rest import can_be_shared
from autolaunch_strategies.plan.rules import Match, Rule, StyleSpec
from autolaunch_strategies.plan.transformers_plans import SOURCE as OF_TRANSFORMERS
from autolaunch_strategies.tensor.weighted_experts import are_only_multiplied

_WHY = "each rank computes with some of the experts; results are added up"


def without_experts(
    model: nn.Module, rules: list[Rule], matches: Iterable[Match], experts: Container[nn.Module]
) -> tuple[list[Rule], list[Match]]:
    """(rules, matches) of a plan without what another degree shares out: the modules `experts` and what they hold."""
    modules = dict(model.named_modules())
    matches = [match for match in matches if modules[match.module] not in experts]
    rest: dict[int, Rule] = {}
    for match in matches:
        if [style.name for style in match.rule.styles] == ["GatherWhenUsed"] and id(match.rule) not in rest:
            (style,) = match.rule.styles
            inside = {name for name, part in modules[match.module].named_modules() if part in experts}
            names = [name for name in style.arguments.get("parameters", ()) if name.rpartition(".")[0] not in inside]
            if "parameters" in style.arguments and len(names) < len(style.arguments["parameters"]):
                styles = (StyleSpec("GatherWhenUsed", {"parameters": names}),) if names else ()
                rest[id(match.rule)] = replace(match.rule, styles=styles)
    return (
        [rest.get(id(rule), rule) for rule in rules if rest.get(id(rule), rule).styles],
        [
            replace(match, rule=rest.get(id(match.rule), match.rule))
            for match in matches
            if rest.get(id(match.rule), match.rule).styles
        ],
    )


def divide_experts(
    model: nn.Module, rules: list[Rule], matches: Iterable[Match], ranks: int
) -> tuple[list[Rule], list[Match]]:
    """(rules, matches) of a plan in which experts are divided that it would gather; rules of a user stay.

    Args:
        ranks: along mp, each of which needs an expert.
    """
    matches = list(matches)
    mixtures = {
        item.name
        for item in countable_mixtures(model)
        if can_be_shared(item.experts, ranks) and are_only_multiplied(item.module, model) is not False
    }
    divided: dict[int, Rule] = {}
    for rule in rules:
        named = {match.module for match in matches if match.rule is rule}
        gathers = [style.name for style in rule.styles] == ["GatherWhenUsed"]
        if gathers and rule.source in (DERIVED, OF_TRANSFORMERS) and named <= mixtures:
            divided[id(rule)] = replace(rule, styles=(StyleSpec("DivideExperts"),), reason=_WHY)
    return (
        [divided.get(id(rule), rule) for rule in rules],
        [replace(match, rule=divided.get(id(match.rule), match.rule)) for match in matches],
    )
