"""A value against the field of a config that it is for: its type, its choices, its limits."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Union

from autolaunch_strategies.config.errors import ConfigError, nearest

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
    if isinstance(fitted, int | float) and not isinstance(fitted, bool) and (limits := _broken(fitted, item.metadata)):
        return fitted, ConfigError(where(path, value), "out of range", limits)
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
            nouns.append(f"a list of {_NOUNS[typing.get_origin(inner) or inner].split()[-1]}s")
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
        write = f"{path}=[{written(value)}]"
    return f"must be {' or '.join(nouns)}", allowed if item.metadata.get("choices") or "null" in allowed else "", write


_LIMITS = {
    "ge": (lambda value, limit: value >= limit, "{} or more"),
    "gt": (lambda value, limit: value > limit, "more than {}"),
    "le": (lambda value, limit: value <= limit, "{} or less"),
    "lt": (lambda value, limit: value < limit, "less than {}"),
}


def limits_text(metadata: Mapping[str, Any]) -> str:
    """The limits of a field in words, `0 or more, less than 1`; empty if it has none."""
    return ", ".join(words.format(metadata[name]) for name, (_, words) in _LIMITS.items() if name in metadata)


def _broken(value: float, metadata: Mapping[str, Any]) -> str:
    holds = all(test(value, metadata[name]) for name, (test, _) in _LIMITS.items() if name in metadata)
    return "" if holds else limits_text(metadata)
