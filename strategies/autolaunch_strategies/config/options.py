"""Fields of configs with help, choices and limits, and their reading from mappings."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from autolaunch_strategies.config.errors import ConfigError, nearest
from autolaunch_strategies.config.values import checked_value


def option(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    choices: Iterable[Any] | None = None,
    foreign_names: Mapping[str, str] | None = None,
    **limits: Any,
) -> Any:
    """A dataclass field with a sentence of help, its choices and its limits (`ge=`, `gt=`, `le=`) as metadata.

    Args:
        foreign_names: what other tools call a choice -> the choice.
    """
    metadata = {
        "help": help,
        "choices": None if choices is None else tuple(choices),
        "foreign_names": foreign_names or {},
        **limits,
    }
    if isinstance(default, dict | list):
        value = default
        return field(default_factory=lambda: type(value)(value), metadata=metadata)
    return field(default=default, metadata=metadata)


def as_yaml(value: Any) -> str:
    """A value as a message shows it: None is `null`."""
    return "null" if value is None else str(value)


def from_mapping(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """An object of a dataclass with these fields, checked as if they stood in a YAML file.

    Raises:
        ConfigError: a field that it has not, or a value of another type, or that is not one of its choices, or out of
            its limits; called `where.field`.
    """
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    checked = {}
    for key, value in values.items():
        if key not in fields:
            close = nearest(str(key), fields)
            raise ConfigError(
                f"{where}.{key}",
                "no such key" + (f"; did you mean {where}.{close}?" if close else ""),
                ", ".join(fields),
            )
        checked[key], error = checked_value(value, fields[key], hints[key], f"{where}.{key}")
        if error is not None:
            raise error
    return cls(**checked)
