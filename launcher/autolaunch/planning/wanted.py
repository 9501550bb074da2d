"""What a person has said of the way to run, so that the planner chooses only the rest. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autolaunch.config.command_line import typed_keys
from autolaunch_strategies.config import AXES, CP_BACKENDS, ConfigError, parse_mesh, parse_recompute

CHOSEN_GROUPS = ("mesh", "dp", "mp", "pp", "cp", "ep", "recompute", "compile")
"""Groups and keys of which the planner sets what nobody has typed (and `data.microbatches`)."""


def wanted_by(overrides: Iterable[str], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Field of `planner.candidate.Candidate` -> the values that what was typed leaves for it.

    A field that means nothing for a candidate (the pipeline of one that has no stages) is not restricted by it.

    Args:
        overrides: what was typed.
        config: what it was resolved to.

    Raises:
        ConfigError: something typed that the planner can't choose the rest for.
    """
    from autolaunch_strategies.planner.candidate import PIPELINES, recompute_code
    from autolaunch_strategies.planner.enumerate import several_replicas

    typed = typed_keys(overrides)
    wanted: dict[str, tuple[int, ...]] = {}
    if "mesh" in typed:
        sizes = parse_mesh(typed["mesh"].strip("'\"")).sizes if _is_shape(typed["mesh"]) else config["mesh"]
        wanted |= {axis: (int(sizes[axis]),) for axis in AXES if sizes[axis] != -1}
    for axis in AXES:
        if f"mesh.{axis}" in typed and config["mesh"][axis] != -1:
            wanted[axis] = (int(config["mesh"][axis]),)
    if "ep" in typed:
        wanted["ep"] = (config["ep"],)
    elif config["dp"]["reduce_dtype"] == "fp16":
        wanted["ep"] = (1,)  # which is refused together
    _refuse(typed, "dp.shard", "the planner counts replicas", "dp.replicate=...")
    _refuse(typed, "mp.overlap", "the planner predicts no overlap along mp", "mesh=1x4 mp.overlap=true")
    _refuse(typed, "pp.split_spec", "the planner says itself where to cut", "pp.split=balanced or pp.split=even")
    if _is_typed("dp", typed):
        wanted["level"] = (config["dp"]["sharding_level"],)
        if config["dp"]["replicate"] is not None:
            # The number that comes with hsdp is nothing that was said.
            said = "dp.replicate" in typed or config["cluster"] is None
            wanted["replicate"] = (config["dp"]["replicate"],) if said else several_replicas(_devices(config))
    if _is_typed("mp", typed):
        if config["mp"] is None:
            wanted["mp"] = (1,)
        else:
            wanted["sequence_parallel"] = (int(config["mp"]["sequence_parallel"]),)
    if _is_typed("pp", typed):
        pp = config["pp"]
        if pp is None:
            wanted["pp"] = (1,)
        else:
            if pp["schedule"].endswith(".csv"):
                _refuse({"pp.schedule": ""}, "pp.schedule", "the planner knows no tables", "pp=1f1b")
            if "pp" in typed or "pp.schedule" in typed or "pp.loss" in typed:
                wanted["pipeline"] = (PIPELINES.index("exact" if pp["loss"] == "exact" else pp["schedule"]),)
            if pp["virtual_stages"] is not None:
                wanted["virtual_stages"] = (pp["virtual_stages"],)
            if "pp.split" in typed:
                wanted["split"] = (int(pp["split"] == "balanced"),)
            if pp["microbatches"] is not None:
                wanted["microbatches"] = (pp["microbatches"],)
    if _is_typed("cp", typed):
        if config["cp"] is None:
            wanted["cp"] = (1,)
        else:
            wanted["backend"] = (CP_BACKENDS.index(config["cp"]["backend"]),)
            if config["cp"]["ulysses"] is not None:
                wanted["ulysses"] = (config["cp"]["ulysses"],)
    if "recompute" in typed:
        wanted["recompute"] = (recompute_code(parse_recompute(config["recompute"]).mode),)
    if "compile" in typed:
        wanted["compile"] = (int(bool(config["compile"])),)
    if "data.microbatches" in typed:
        wanted["microbatches"] = (config["data"]["microbatches"],)
    if "microbatches" not in config["data"] and not _is_typed("pp", typed):
        wanted["microbatches"] = (1,)  # a data module of one's own hands out its batches as it likes
    return wanted


def _devices(config: Mapping[str, Any]) -> int:
    return int(config["cluster"]["nodes"] * config["cluster"]["devices_per_node"])


def _is_typed(group: str, typed: Mapping[str, str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for key in typed)


def _is_shape(value: str) -> bool:
    return any(letter.isdigit() for letter in value)


def _refuse(typed: Mapping[str, str], key: str, problem: str, write: str) -> None:
    if key in typed:
        raise ConfigError(f"{key} with cluster=", problem, write=write)
