"""Parameters with hooks on their gradients, which a plan can't shard: it puts other parameters in their places.

A hook is written for the gradient of the whole parameter (one row of a mask for each token, say). Of a sharded one a
rank has a part, and on a GPU backward passes run in a thread in which nothing makes it look whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from autolaunch_strategies.plan.rules import Match
from autolaunch_strategies.tensor.share import placed_by
from autolaunch_strategies.tensor.styles.base import hooked
from autolaunch_strategies.torch_private.gradient_hooks import has_gradient_hooks


def refuse_hooked(model: nn.Module, matches: Iterable[Match], ranks: int) -> None:
    """Raise ConfigError if rules shard a parameter on which somebody has put hooks, be it under several names.

    What torch's styles and those of a user shard is not seen here, but when they are applied.
    """
    patterns: dict[nn.Parameter, list[str]] = {}
    for match, parameter, _ in placed_by(model, matches, ranks):
        if has_gradient_hooks(parameter):
            patterns.setdefault(parameter, []).append(match.rule.pattern)
    for name, parameter in model.named_parameters():
        if parameter in patterns:
            raise hooked(name, patterns[parameter])
