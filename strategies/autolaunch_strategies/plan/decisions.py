"""What is decided about each module while a plan is derived."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autolaunch_strategies.plan.rules import StyleSpec

COLUMN, ROW = StyleSpec("ColWiseParallel"), StyleSpec("RowWiseParallel")
COLUMN_GATHERED = StyleSpec("ColWiseParallel", {"gather_output": True})


@dataclass
class Decisions:
    """What happens to which module, by its full name: styles (none: it stays whole) and why."""

    styles: dict[str, tuple[StyleSpec, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def decide(self, name: str, styles: Iterable[StyleSpec], reason: str) -> None:
        """Decide about a module; a later decision takes the place of an earlier one."""
        self.styles[name], self.reasons[name] = tuple(styles), reason

    def add(self, name: str, styles: Iterable[StyleSpec], reason: str, first: bool = False) -> None:
        """Add styles to what is decided already, behind it or (`first`) before it."""
        before, said = self.styles.get(name, ()), self.reasons.get(name, "")
        self.styles[name] = (*styles, *before) if first else (*before, *styles)
        self.reasons[name] = f"{said}; {reason}" if said else reason

    def forget(self, name: str) -> None:
        """Decide nothing about a module."""
        self.styles.pop(name, None)
        self.reasons.pop(name, None)

    def planned(self) -> set[str]:
        """Modules whose parameters are sharded."""
        return {
            name
            for name, styles in self.styles.items()
            if any(style in (COLUMN, ROW, COLUMN_GATHERED) or style.name == "GatherWhenUsed" for style in styles)
        }
