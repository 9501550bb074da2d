"""A value against the field of a config that it is for: its type, its choices, its limits."""

from __future__ import annotations

import dataclasses
import math
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Union

from autolaunch_strategies.config.errors import ConfigError, nearest
from autolaunch_strategies.config.spelling import quoted

Where = Callable[[str, Any], str]
"""Says where the value of a dotted key came from, as the person wrote it: the command line or a YAML file."""

_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}


def written(value: Any) -> str:
    """A value as one would type it behind `key=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    return str(value)


def typed(key: str, value: Any) -> str:
    """The plainest `Where`: `key=value`."""
    return f"{key}={written(value)}"


def checked_value(
    value: Any, item: dataclasses.Field[Any], hint: Any, path: str, where: Where = typed
) -> tuple[Any, ConfigError | None]:
    """(the value in the type of its field, what is wrong with it).

    Args:
        hint: the type of the field.
        path: its dotted key.
    """
    options = alternatives(hint)
    fitted = _fit(value, options)
    if fitted is _MISFIT:
        return value, ConfigError(where(path, value), *_type_problem(value, options, item, path))
    choices = item.metadata.get("choices")
    # True == 1 in Python, but `true` is not one of 0, 1, 2, 3.
    if choices is not None and not any(
        fitted == choice and isinstance(fitted, bool) == isinstance(choice, bool) for choice in choices
    ):
        names = [written(choice) for choice in choices]
        close = next((name for name in names if name.startswith(f"{written(value)}-")), "")
        close = (
            close or item.metadata.get("foreign_names", {}).get(written(value)) or nearest(written(value), names, 0.85)
        )
        return fitted, ConfigError(
            where(path, value), "not one of the choices", ", ".join(names), f"{path}={close}" if close else ""
        )
    numbers = [number for number in (fitted if isinstance(fitted, list) else [fitted]) if _is_number(number)]
    limits = limits_text(item.metadata)
    if not all(isinstance(number, int) or math.isfinite(number) for number in numbers):
        or_null = " or null" if types.NoneType in options else ""
        return fitted, ConfigError(where(path, value), "not a finite number", f"{limits or 'a number'}{or_null}")
    if any(_breaks(number, item.metadata) for number in numbers):
        counted = "share" in item.metadata and isinstance(fitted, float) and fitted.is_integer() and fitted > 0
        return fitted, ConfigError(
            where(path, value), "out of range", limits, f"{path}={int(fitted)}" if counted else ""
        )
    return fitted, None


_MISFIT = object()


def alternatives(wanted: Any) -> tuple[Any, ...]:
    """The plain types that a hint allows: `int | None` is (int, NoneType), `list[float]` is (list[float],)."""
    return typing.get_args(wanted) if typing.get_origin(wanted) in (Union, types.UnionType) else (wanted,)


def _fit(value: Any, options: tuple[Any, ...]) -> Any:
    """`value` as one of the types, or `_MISFIT`."""
    if Any in options or (value is None and types.NoneType in options):
        return value
    if isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's, too
    plain = [typing.get_origin(option) or option for option in options]
    if type(value) in plain:
        if isinstance(value, list):
            (inner,) = next(typing.get_args(option) for option in options if typing.get_origin(option) is list)
            items = [_fit(item, (inner,)) for item in value]
            return _MISFIT if any(item is _MISFIT for item in items) else items
        return value
    if float in plain and type(value) is int:
        return float(value)
    if str in plain and type(value) in (int, float):
        return str(value)  # name=2026 is a text that looks like a number
    return _MISFIT


def _type_problem(
    value: Any, options: tuple[Any, ...], item: dataclasses.Field[Any], path: str
) -> tuple[str, str, str]:
    nouns = []
    for option in options:
        if typing.get_origin(option) is list:
            (inner,) = typing.get_args(option)
            noun = _NOUNS.get(typing.get_origin(inner) or inner)  # none of list[Any], which takes whatever there is
            nouns.append(f"a list of {noun.split()[-1]}s" if noun else "a list")
        elif option is not types.NoneType:
            nouns.append(_NOUNS[typing.get_origin(option) or option])
    if item.metadata.get("choices"):
        allowed = ", ".join(written(choice) for choice in item.metadata["choices"])
    else:
        allowed = " or ".join(nouns) + (" or null" if types.NoneType in options else "")
    write = ""
    if int in options and isinstance(value, float) and value.is_integer():
        write = f"{path}={int(value)}"
    elif typing.get_origin(options[0]) is list and _fit([value], options) is not _MISFIT:
        first = quoted(value) if isinstance(value, str) else written(value)
        rest = _default_list(item)[1:] if _is_number(value) else []  # a number of several: the others as they were
        typed = f"[{','.join([first, *map(written, rest)])}]"
        # In a list of mappings a key can't be typed alone.
        write = f"{path}: {typed}" if "[" in path else shlex.quote(f"{path}={typed}")
    return f"must be {' or '.join(nouns)}", allowed if item.metadata.get("choices") or "null" in allowed else "", write


def _default_list(item: dataclasses.Field[Any]) -> list[Any]:
    """The default of a field that is a list; empty if it is none."""
    default = None if item.default_factory is dataclasses.MISSING else item.default_factory()
    return default if isinstance(default, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_LIMITS = {
    "ge": (lambda value, limit: value >= limit, "{} or more"),
    "gt": (lambda value, limit: value > limit, "more than {}"),
    "le": (lambda value, limit: value <= limit, "{} or less"),
    "lt": (lambda value, limit: value < limit, "less than {}"),
    "share": (lambda value, limit: isinstance(value, int) or value <= limit, "with a decimal point {} or less"),
}
"""Limits of numbers, and of each number of a list; `share` is that of a float where a whole number is a count."""


def limits_text(metadata: Mapping[str, Any]) -> str:
    """The limits of a field in words, `0 or more, less than 1`; empty if it has none."""
    return ", ".join(words.format(metadata[name]) for name, (_, words) in _LIMITS.items() if name in metadata)


def _breaks(value: float, metadata: Mapping[str, Any]) -> bool:
    return not all(test(value, metadata[name]) for name, (test, _) in _LIMITS.items() if name in metadata)
