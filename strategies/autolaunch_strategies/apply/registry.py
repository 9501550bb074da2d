"""Which modules are parallelised, and what was applied to each: one registry for trainers and plain loops.

What was applied holds its module. So it is kept in the module, where both are freed together, and not in a dict with
weak keys, whose values would hold the keys for ever.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from autolaunch_strategies.apply.order import Parallelized

_ATTRIBUTE = "_autolaunch_applied"
_MODULES: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Applied:
    """Holds what was applied to a module; a copy of the module has none, as nothing was applied to that one."""

    def __init__(self, parallelized: Parallelized | None) -> None:
        self.parallelized = parallelized

    def __deepcopy__(self, memo: dict[int, Any]) -> _Applied:
        return _Applied(None)

    def __reduce__(self) -> tuple[type[_Applied], tuple[None]]:
        return _Applied, (None,)


def register(applied: Parallelized) -> None:
    """Keep what was applied to `applied.module`, as long as that module lives."""
    applied.module.__dict__[_ATTRIBUTE] = _Applied(applied)
    _MODULES.add(applied.module)


def applied_to(module: nn.Module) -> Parallelized | None:
    """What was applied to this very module; None if nothing was."""
    held = module.__dict__.get(_ATTRIBUTE)
    applied = None if held is None else held.parallelized
    return applied if applied is not None and applied.module is module else None


def all_applied() -> list[Parallelized]:
    """What was applied to each module that is alive."""
    return [applied for module in _MODULES if (applied := applied_to(module)) is not None]
