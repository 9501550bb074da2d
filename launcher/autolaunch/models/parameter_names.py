"""Parameters by patterns over their names, or over those of the modules around them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.patterns import compile_pattern, nearest_names, with_parents

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their names; one that is tied stands under each of its names."""


def matching(pattern: str, parameters: Named, key: str, of: str, write: str) -> set[int]:
    """The ids of the parameters whose name, or that of a module around them, `pattern` matches.

    Args:
        pattern: as in plans, over whole dotted names.
        key: which one gives the pattern, for messages.
        of: whose parameters they are, in a word.
        write: what to type for another pattern, which takes the place of `{}`.

    Raises:
        ConfigError: it matches nothing, or is no pattern.
    """
    where = f"{key}: {pattern}"
    try:
        compiled = compile_pattern(pattern)
    except ConfigError as error:
        raise ConfigError(where, error.problem, error.allowed) from error
    matches = {id(parameter) for name, parameter in parameters if any(map(compiled.fullmatch, with_parents(name)))}
    if not matches:
        close = nearest_names(pattern, dict.fromkeys(part for name, _ in parameters for part in with_parents(name)))
        meant = f"; near it: {', '.join(close)}" if close else ""
        raise ConfigError(
            where,
            f"no parameter or module of {of} has this name{meant}",
            "names, with * for one part, or regular expressions over whole names",
            write.format(close[0]) if close else "",
        )
    return matches
