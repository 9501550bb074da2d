"""Model (tensor) parallelism: a plan applied to a model, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autolaunch_strategies.plan.context import is_context_style
from autolaunch_strategies.plan.rules import Match, Rule, match_rules
from autolaunch_strategies.tensor.sharding_errors import explained, remember_plan
from autolaunch_strategies.tensor.styles.base import Region
from autolaunch_strategies.tensor.styles.build import build_style
from autolaunch_strategies.tensor.views import MixedTensors
from autolaunch_strategies.torch_private.modes import is_active, without_torch_functions


@dataclass
class ModelParallelModule:
    """A model with a plan applied: the context in which it runs, and an account of what was done."""

    model: nn.Module
    mode: MixedTensors | None = None
    replaced: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Forward and backward passes of the model run within it."""
        if self.mode is None or is_active(self.mode):  # blocks that are computed again, in a backward pass
            yield
            return
        try:
            with self.mode:
                yield
        except Exception as error:
            explanation = explained(error)
            if explanation is None:
                raise
            raise explanation from error

    def begin(self) -> None:
        """Let gradients arrive sharded as their parameters are. Called once, when every parameter has its values."""
        if self.mode is None:
            return
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh == self.mode.replicate.mesh:
                trained = parameter.requires_grad
                parameter.requires_grad_(True)  # frozen ones can't take hooks, and may be trained later
                parameter.register_post_accumulate_grad_hook(_place_gradient)
                parameter.requires_grad_(trained)


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh | None,
    matches: list[Match],
    absent: Callable[[nn.Module], bool] = lambda module: False,
) -> ModelParallelModule:
    """Apply the rules that match modules of `model` to it in place; parameters may be on meta.

    What no rule places stays a plain parameter, whole on every rank. What rules say of cp is left to `marked_by`.

    Args:
        mesh: the 1-D mesh of the mp axis; None if it has one rank: then nothing is done.
        matches: what `matched` returned; the model may have been cut since.
        absent: whether a module belongs to another stage of a pipeline; rules for it are left to that.

    Raises:
        ConfigError: a style that does not fit its module.
    """
    if mesh is None:
        return ModelParallelModule(model)
    remember_plan(model, matches)
    mode = MixedTensors(mesh)
    region = Region(model, mesh, mode.replicate)
    modules = dict(model.named_modules())
    for match in matches:
        if absent(modules[match.module]):
            continue
        for spec in match.rule.styles:
            if is_context_style(spec):
                continue
            style = build_style(spec, f"{match.rule.source}: {match.rule.pattern}")
            style.apply(region, match.module, modules[match.module], match.only)
    return ModelParallelModule(model, mode, region.replaced)


def matched(model: nn.Module, rules: list[Rule], prefix: str = "") -> tuple[list[Match], list[str]]:
    """Which rule applies to which module of `model`, and warnings (see `match_rules`)."""
    parameters = {name: list(module._parameters) for name, module in model.named_modules()}
    return match_rules(rules, parameters, prefix)


def account_of_plan(rules: list[Rule], matches: list[Match], warnings: list[str]) -> dict[str, Any]:
    """What a plan does, as plain data: every rule with its reason, and what it matches."""
    matched: dict[str, list[str]] = {}
    for match in matches:
        matched.setdefault(match.rule.pattern, []).append(match.module + (f".{match.only}" if match.only else ""))
    plan = {rule.pattern: rule.to_yaml() for rule in rules if rule.pattern in matched}
    return {
        "plan": plan,
        "reasons": {rule.pattern: rule.reason or rule.source for rule in rules if rule.pattern in matched},
        "modules": {pattern: len(names) for pattern, names in matched.items()},
        **({"warnings": warnings} if warnings else {}),
    }


@torch.no_grad()
def _place_gradient(parameter: torch.Tensor) -> None:
    with without_torch_functions():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
