"""A composed config against `autolaunch.config.schema`: types, choices, limits and unknown keys, all at once.

Hydra composes plain YAML, so this is where `trainer.max_steps=abc` is found. Torch-free.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from autolaunch.config.schema import FAMILIES, MISSING, Job, default_of, last_step
from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.config.values import Where, alternatives, checked_value, typed, written


@cache
def field_types(schema: type) -> dict[str, Any]:
    """The types of a schema's fields, by name."""
    return typing.get_type_hints(schema)


def node_schema(key: str, values: Any) -> tuple[type | None, bool]:
    """(schema, open) of the node at a dotted key: its dataclass, if it has one; whether it takes keys of any name."""
    if key in FAMILIES:
        values = values if isinstance(values, Mapping) else {}
        if values.get("_target_") is not None and "custom" in FAMILIES[key]:
            return FAMILIES[key]["custom"], True
        return FAMILIES[key].get(str(values.get("name"))), False
    schema: Any = Job
    for part in key.split(".") if key else []:
        if not isinstance(schema, type) or not dataclasses.is_dataclass(schema):
            return None, True
        schema = group_schema(field_types(schema).get(part))
    if not isinstance(schema, type) or not dataclasses.is_dataclass(schema):
        return None, True
    # An optimizer class of one's own has arguments of its own.
    return schema, key == "optimizer" and bool(values) and values.get("_target_") is not None


def validate(config: Mapping[str, Any], where: Where = typed) -> tuple[dict[str, Any], list[ConfigError]]:
    """Check a composed and resolved config.

    Returns:
        The config with every key of the schema (absent ones at their defaults, whole numbers where the schema has
        floats turned into floats), and every problem found; the config is of use only if there is none.
    """
    errors: list[ConfigError] = []
    checked = _node(config, "", where, errors)
    if not errors:
        checked["trainer"]["max_steps"] = last_step(checked["trainer"])
    return checked, errors


def _node(values: Mapping[str, Any], key: str, where: Where, errors: list[ConfigError]) -> dict[str, Any]:
    schema, is_open = node_schema(key, values)
    if key in FAMILIES and schema is None:
        errors.append(_unknown_family(key, values, where))
        return dict(values)
    assert schema is not None
    prefix = f"{key}." if key else ""
    fields = {item.name: item for item in dataclasses.fields(schema)}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name in fields:
            checked[name] = _value(value, fields[name], field_types(schema)[name], path, where, errors)
        elif is_open:
            checked[name] = value
            if value == MISSING:
                errors.append(ConfigError(path, "must be given", write=f"{path}=..."))
        else:
            errors.append(_unknown(path, value, fields, where))
    for name, item in fields.items():
        if name not in checked:
            checked[name] = _default(item, f"{prefix}{name}", errors)
    return checked


def _default(item: dataclasses.Field[Any], path: str, errors: list[ConfigError]) -> Any:
    value = default_of(item)
    if value == MISSING:
        errors.append(ConfigError(path, "must be given", help_of(item), f"+{path}=..."))
    return value


def _value(
    value: Any, item: dataclasses.Field[Any], wanted: Any, path: str, where: Where, errors: list[ConfigError]
) -> Any:
    if value == MISSING:
        errors.append(ConfigError(path, "must be given", help_of(item), f"{path}=..."))
        return value
    if group_schema(wanted) is not None or path in FAMILIES:
        if isinstance(value, Mapping):
            return _node(value, path, where, errors)
        if value is None and types.NoneType in alternatives(wanted):
            return None
        errors.append(
            ConfigError(where(path, value), "is a group of keys, not a single value", write=f"autolaunch --info {path}")
        )
        return value
    fitted, error = checked_value(value, item, wanted, path, where)
    errors += [] if error is None else [error]
    return fitted


def group_schema(wanted: Any) -> type | None:
    """The dataclass of a hint `Group` or `Group | None`; None of any other."""
    classes = (option for option in alternatives(wanted) if isinstance(option, type))
    return next((option for option in classes if dataclasses.is_dataclass(option)), None)


def schemas_of(group: str) -> dict[str, type]:
    """The schemas of a config group: by name where its options have their own, else one without a name, or none."""
    if group in FAMILIES:
        return FAMILIES[group]
    schema = group_schema(field_types(Job).get(group))
    return {} if schema is None else {"": schema}


def is_list(key: str) -> bool:
    """Whether the value of a dotted key is a list, and nothing else."""
    group, _, name = key.rpartition(".")
    schemas = FAMILIES[group].values() if group in FAMILIES else [node_schema(group, {})[0]]
    return any(typing.get_origin(field_types(schema).get(name)) is list for schema in schemas if schema is not None)


def help_of(item: dataclasses.Field[Any]) -> str:
    """The sentence of help of a field; empty if it has none."""
    return str(item.metadata.get("help", ""))


def _unknown_family(key: str, values: Mapping[str, Any], where: Where) -> ConfigError:
    known = [name for name in FAMILIES[key] if name != "custom"]
    takes_classes = "custom" in FAMILIES[key]
    name = values.get("name")
    if name is None:
        return ConfigError(
            key,
            f"has neither {key}.name nor {key}._target_" if takes_classes else f"has no {key}.name",
            ", ".join(known),
            f"+{key}.name={known[0]}",
        )
    close = nearest(str(name), known)
    return ConfigError(
        where(f"{key}.name", name),
        f"no such {key}" + (f"; did you mean {close}?" if close else ""),
        ", ".join(known) + (f", or a {key} of your own with _target_" if takes_classes else ""),
        f"{key}={close}" if close else "",
    )


def alike(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known key that was meant, or an empty string. Stricter than `nearest`, as there are many keys."""
    return nearest(name, known, cutoff)


def keys_text(parent: str, keys: Iterable[str]) -> tuple[str, str]:
    """(allowed, write) of an error about a key that is like none: the keys if they are few, else who lists them."""
    keys = list(keys)
    if len(keys) <= 10:
        return ", ".join(keys), ""
    return "", f"autolaunch --info {parent}" if parent else "autolaunch --help"


def _unknown(path: str, value: Any, fields: Mapping[str, Any], where: Where) -> ConfigError:
    parent, _, name = path.rpartition(".")
    close = alike(name, fields)
    if not parent and name in ("experiment", "search"):
        return ConfigError(
            where(path, value),
            f"the keys of the {name} file ended up under `{name}`",
            "a file that begins with the line `# @package _global_`",
        )
    meant = f"{parent}.{close}" if parent and close else close
    return ConfigError(
        where(path, value),
        "no such key" + (f"; did you mean {meant}?" if close else ""),
        *(
            ("", "" if isinstance(value, Mapping) else f"{meant}={written(value)}")
            if close
            else keys_text(parent, fields)
        ),
    )
