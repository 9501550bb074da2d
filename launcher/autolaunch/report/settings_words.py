"""A mesh and the options of its axes in few words, as they are named wherever a configuration is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autolaunch_strategies.config import AXES, ConfigError, parse_mesh

SHARDED = {
    1: "optimizer state",
    2: "gradients, optimizer state",
    3: "parameters, gradients, optimizer state",
}
"""What each sharding level of dp shards."""

_DP_WORDS = {
    "ddp": "every rank holds all of it",
    "zero1": f"{SHARDED[1]} sharded",
    "zero2": f"{SHARDED[2]} sharded",
    "fsdp": f"{SHARDED[3]} sharded",
    "hsdp": f"{SHARDED[3]} sharded within replicas",
}


def mesh_words(mesh: str | Mapping[str, int]) -> str:
    """A mesh's axes in words: ``dp 16 × mp 8``."""
    sizes = _mesh_sizes(mesh)
    if sizes is None:
        return str(mesh)
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 device"


def mesh_name(mesh: str | Mapping[str, int]) -> str:
    """A mesh as it may be typed, axes by name: ``dp16xmp8``."""
    sizes = _mesh_sizes(mesh)
    if sizes is None:
        return str(mesh)
    return "x".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "1"


def _mesh_sizes(mesh: str | Mapping[str, int]) -> dict[str, int] | None:
    if isinstance(mesh, Mapping):
        return {axis: int(mesh.get(axis, 1)) for axis in AXES}
    try:
        return parse_mesh(mesh).sizes
    except ConfigError:
        return None


def option_words(overrides: Iterable[str]) -> list[str]:
    """What overrides choose beside the mesh, in few words; what is off, or is of an axis without ranks, is left out."""
    return [option.words for option in _options(overrides)]


def option_differences(overrides: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """What overrides choose that others don't, and what they leave out of the axes that they use."""
    here, there = _options(overrides), _options(chosen)
    words = {option.words for option in there}
    settings, groups = {option.setting for option in here}, {option.group for option in here}
    more = [option for option in here if option.words not in words]
    changed = {option.group for option in more if option.setting in AXES}
    gone = [
        _OFF.get(option.setting, f"without {option.words}")
        for option in there
        if option.setting not in settings
        and (option.group not in AXES or option.group in groups - changed)
        and option.setting not in AXES
    ]
    return [*(option.words for option in more), *gone]


def option_rows(overrides: Iterable[str]) -> list[tuple[str, str]]:
    """(axis or group, what is chosen there), one for each that is used."""
    rows: dict[str, list[str]] = {}
    for option in _options(overrides):
        rows.setdefault(option.group, []).append(option.words.removeprefix(f"{option.group} "))
    if rows.get("dp") and (promise := _DP_WORDS.get(rows["dp"][0])):
        rows["dp"].append(promise)
    order = (*AXES, "data", "recompute", "compile")
    names = [*(name for name in order if name in rows), *(name for name in rows if name not in order)]
    return [(name, " · ".join(rows[name])) for name in names]


@dataclass(frozen=True)
class _Option:
    group: str
    """An axis, or the group of another key."""
    setting: str
    """The key; alike for keys that mean the same."""
    words: str


_WORDS = {
    "dp.sharding_level": "level {}",
    "dp.replicate": "{} replicas",
    "dp.shard": "{} ranks each",
    "pp.virtual_stages": "{} stages per rank",
    "pp.split": "cuts {}",
    "pp.split_spec": "balanced cuts",
    "cp.ulysses": "ulysses of {}",
    "data.microbatches": "{} microbatches",
    "pp.microbatches": "{} microbatches",
    "recompute": "recompute {}",
    "compile": "compiled blocks",
}

_OFF = {
    "microbatches": "1 microbatch",
    "recompute": "no recompute",
    "compile": "not compiled",
    "pp.virtual_stages": "usual stages per rank",
    "pp.split_spec": "even cuts",
    "dp.replicate": "1 replica",
}


def _options(overrides: Iterable[str]) -> list[_Option]:
    pairs = [(item.lstrip("+").partition("=")[::2], item) for item in overrides]
    sizes = next((_mesh_sizes(value) for (key, value), _ in pairs if key == "mesh"), None)
    unused = {"dp"} if sizes and sizes["dp"] * sizes["cp"] == 1 else set()
    options = []
    for (key, value), item in pairs:
        group = key.partition(".")[0]
        setting = "microbatches" if key in ("data.microbatches", "pp.microbatches") else key
        off = value in ("none", "null", "", "false") or (setting == "microbatches" and value == "1")
        if key == "mesh" or group in unused or off:
            continue
        if key == "recompute" and value.isdigit():
            value = "full" if value == "1" else f"every {value} blocks"
        words = value if key in AXES else _WORDS[key].format(value) if key in _WORDS else item.lstrip("+")
        options.append(_Option(group if "." in key or key in _WORDS or key in AXES else key, setting, words))
    return options
