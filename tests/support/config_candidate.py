"""The planner's candidate that a resolved config is: what `planner.settings.overrides` wrote, read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autolaunch_strategies.config import AXES, CP_BACKEND_SPECS, CP_BACKENDS, cp_backend, parse_recompute
from autolaunch_strategies.planner.candidate import (
    FULL,
    NO_RECOMPUTE,
    PIPELINE_SPECS,
    PIPELINES,
    SELECTIVE,
    Candidate,
)
from autolaunch_strategies.schedules.schedule import fitting_microbatches


def candidate_of(config: Mapping[str, Any], heads: int | None = None) -> Candidate:
    """The candidate that a resolved config is.

    Args:
        config: of a job, with mesh, dp, mp, pp, cp, recompute and data; the sizes of the mesh are known.
        heads: attention heads of the model; decides where `cp.ulysses` is left open.
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
    return Candidate(**fields, ep=config.get("ep", 1), compile=int(bool(config.get("compile"))))


def _pipeline(pp: Mapping[str, Any], sizes: Mapping[str, int], accumulated: int, batch: int | None) -> dict[str, int]:
    schedule, parts = pp["schedule"], pp["microbatches"]
    if parts is None and accumulated > 1:
        parts, accumulated = accumulated, 1
    assert accumulated == 1, "the planner knows no pipelines that accumulate batches"
    if parts is None:
        assert batch is not None, "neither the number of microbatches nor the batch is known"
        parts = fitting_microbatches(schedule, sizes["pp"], pp["virtual_stages"], None, batch // sizes["dp"])
    pipeline = PIPELINES.index("exact" if pp["loss"] == "exact" else schedule)
    return {
        "pipeline": pipeline,
        "virtual_stages": pp["virtual_stages"] or PIPELINE_SPECS[pipeline].least_stages,
        "split": int(pp["split"] == "balanced" or isinstance(pp["split_spec"], Mapping)),
        "microbatches": parts,
    }
