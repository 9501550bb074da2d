"""A candidate as settings of the config, and the candidate that a config is. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autolaunch_strategies.config import (
    AXES,
    CP_BACKEND_SPECS,
    CP_BACKENDS,
    SCHEDULES,
    ConfigError,
    cp_backend,
    parse_recompute,
)
from autolaunch_strategies.planner.candidate import FULL, NO_RECOMPUTE, PIPELINES, SELECTIVE, Candidate
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.stages import cut
from autolaunch_strategies.schedules.schedule import default_virtual_stages, fitting_microbatches

LEVELS = ("ddp", "zero1", "zero2", "fsdp")
"""The option of the group dp for each sharding level."""


def overrides(candidate: Candidate, profile: ModelProfile, recipe: Recipe) -> list[str]:
    """What to write on the command line to run a candidate; of axes with one rank, nothing.

    Every key that says how a batch is cut is there, so that none that was set before remains. A balanced cut is written
    out, by the names of the blocks that end the stages: what the runtime would find balanced may be another one.
    """
    c = candidate
    assert c.pipeline < len(PIPELINES) and c.pipeline_name in ("none", "exact", *SCHEDULES), "not in the runtime"
    found = [f"mesh={c.mesh.name}"]
    hybrid = c.level > 0 and c.replicate > 1
    found.append(f"dp={'hsdp' if hybrid and c.level == 3 else LEVELS[c.level]}")
    if hybrid:
        found.append(f"dp.replicate={c.replicate}")
    if c.mp > 1:
        found.append(f"mp={'seq_parallel' if c.sequence_parallel else 'auto'}")
    if c.pp > 1:
        found += [f"pp={c.pipeline_name}", f"pp.microbatches={c.microbatches}"]
        if c.virtual_stages != _usual_stages(c.pipeline_name):
            found.append(f"pp.virtual_stages={c.virtual_stages}")
        if c.split:
            ends = ", ".join(f"{name}: END" for name in cut_names(candidate, profile))
            found.append(f"pp.split_spec={{{ends}}}")
    if c.cp > 1:
        found.append(f"cp={c.backend_name}")
        if c.context_backend.is_mixed:
            found.append(f"cp.ulysses={c.ulysses}")
    found.append(f"recompute={c.recompute_name}")
    found.append(f"data.microbatches={c.microbatches if c.pp == 1 else 1}")
    return found


def cut_names(candidate: Candidate, profile: ModelProfile) -> list[str]:
    """The blocks that end every stage but the last."""
    c = candidate
    sizes = cut(profile, c.pipeline_name, c.pp, c.virtual_stages, c.split).sizes
    return [profile.block_names[end - 1] for end in sizes.cumsum()[:-1]]


def candidate_of(config: Mapping[str, Any], heads: int | None = None) -> Candidate:
    """The candidate that a resolved config is.

    Args:
        config: of a job, with mesh, dp, mp, pp, cp, recompute and data; the sizes of the mesh are known.
        heads: attention heads of the model; decides where `cp.ulysses` is left open.

    Raises:
        ConfigError: it accumulates batches that a pipeline cuts again, or has a schedule of its own: the planner knows
            nothing of that.
    """
    sizes = {axis: int(config["mesh"][axis]) for axis in AXES}
    assert min(sizes.values()) > 0, "the mesh has an open size"
    fields: dict[str, Any] = {**sizes, "replicate": sizes["dp"]}
    dp = config["dp"]
    if sizes["dp"] * sizes["cp"] > 1 and dp["sharding_level"]:
        replicate, shard = dp.get("replicate"), dp.get("shard")
        fields["level"] = dp["sharding_level"]
        fields["replicate"] = replicate or (sizes["dp"] // shard if shard else 1)
    if sizes["mp"] > 1 and config["mp"] is not None:
        fields["sequence_parallel"] = int(config["mp"]["sequence_parallel"])
    accumulated = config["data"].get("microbatches", 1)
    if sizes["pp"] > 1:
        fields |= _pipeline(config["pp"], sizes, accumulated, config["data"].get("batch_size"))
    else:
        fields["microbatches"] = accumulated
    if sizes["cp"] > 1:
        cp = config["cp"]
        backend = cp_backend(cp["backend"])
        alone = heads // sizes["mp"] if heads is not None and heads % sizes["mp"] == 0 else None
        fields["backend"] = CP_BACKENDS.index(backend)
        fields["ulysses"] = CP_BACKEND_SPECS[backend].neighbours(sizes["cp"], alone, cp.get("ulysses"))
    mode = parse_recompute(config["recompute"]).mode
    fields["recompute"] = {"none": NO_RECOMPUTE, "selective": SELECTIVE, "full": FULL}.get(str(mode), mode)
    return Candidate(**fields)


def _pipeline(pp: Mapping[str, Any], sizes: Mapping[str, int], accumulated: int, batch: int | None) -> dict[str, int]:
    schedule = pp["schedule"]
    if schedule not in SCHEDULES:
        raise ConfigError(f"pp.schedule={schedule}", "the planner knows no tables", ", ".join(("exact", *SCHEDULES)))
    parts = pp["microbatches"]
    if parts is None and accumulated > 1:
        parts, accumulated = accumulated, 1
    if accumulated > 1:
        raise ConfigError(
            f"data.microbatches={accumulated} with pp.microbatches={parts}",
            "the planner knows pipelines that cut the whole batch of a rank, and none that accumulate such batches",
            "data.microbatches=1",
            f"data.microbatches=1 pp.microbatches={accumulated * parts}",
        )
    if parts is None:
        assert batch is not None, "neither the number of microbatches nor the batch is known"
        parts = fitting_microbatches(schedule, sizes["pp"], pp["virtual_stages"], None, batch // sizes["dp"])
    return {
        "pipeline": PIPELINES.index("exact" if pp["loss"] == "exact" else schedule),
        "virtual_stages": pp["virtual_stages"] or _usual_stages("exact" if pp["loss"] == "exact" else schedule),
        "split": int(pp["split"] == "balanced" or isinstance(pp["split_spec"], Mapping)),
        "microbatches": parts,
    }


def _usual_stages(pipeline: str) -> int:
    return default_virtual_stages(pipeline) if pipeline in SCHEDULES else 1
