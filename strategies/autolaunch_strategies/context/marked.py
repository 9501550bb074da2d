"""What a plan says about context parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from autolaunch_strategies.plan.context import is_context_style
from autolaunch_strategies.plan.rules import Match
from autolaunch_strategies.tensor.styles.base import Region
from autolaunch_strategies.tensor.styles.build import build_style


@dataclass
class Marked:
    """Names of modules that a plan marks, and a backend for each."""

    regions: dict[str, str] = field(default_factory=dict)
    """Modules that get sharded sequences; without any, every block is one."""
    attention: dict[str, str] = field(default_factory=dict)
    """Modules that call attention."""

    def within(self, prefix: str) -> Marked:
        """The same, with names that begin with `prefix`."""
        return Marked(
            {prefix + name: backend for name, backend in self.regions.items()},
            {prefix + name: backend for name, backend in self.attention.items()},
        )


def marked_by(model: nn.Module, matches: Iterable[Match], backend: str) -> Marked:
    """What the matches of a plan mark in `model`.

    Args:
        backend: what the cp axis does.

    Raises:
        ConfigError: a style that can't be made, or stands at a parameter, or shards sequences in another way.
    """
    region = Region(model, context_backend=backend)
    for match in matches:
        for spec in match.rule.styles:
            if is_context_style(spec):
                style = build_style(spec, f"{match.rule.source}: {match.rule.pattern}")
                style.apply(region, match.module, model.get_submodule(match.module), match.only)
    return Marked(region.context_regions, region.context_attention)
