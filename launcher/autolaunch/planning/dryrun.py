"""dryrun: the real code of some ranks of a mesh of any size, run for a step on this machine, without devices."""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autolaunch.job import PARALLEL_KEYS, ResolvedJob, write_beside
from autolaunch.launch.place import Place
from autolaunch.models.own_plan import own_plan
from autolaunch.report.dryrun_screen import show_dryrun
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch.tasks.first_batch import first_batch
from autolaunch.tasks.run_parts import constructed, quiet_lightning
from autolaunch_strategies.config import (
    CP_BACKENDS,
    FLOAT8_RECIPES,
    SCHEDULE_SPECS,
    ConfigError,
    ParallelConfig,
    lightning_precision,
    parallel_config,
)
from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.dry_run.forks import Caller, result_of, start
from autolaunch_strategies.dry_run.ranks import pretend_and_compare, refuse_what_cannot_be_pretended
from autolaunch_strategies.dry_run.step import PretendedRank, Training
from autolaunch_strategies.lightning.first_step import first_step
from autolaunch_strategies.mesh.rank_mesh import coordinates
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.pipeline.placement import pipe_rank
from autolaunch_strategies.schedules.schedule import fitting_microbatches, placement

FILE = "dryrun.json"
NOT_COMPILED = (
    "compile was left out: what is compiled allocates by itself; memory, and the plan beside it, are those "
    "of the same without it"
)


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Run a step of the chosen ranks; show and write `<output_dir>/dryrun.json`. Returns the summary.

    Raises:
        ConfigError: what can't be run without devices, or what a run would refuse; ranks whose collectives differ.
    """
    started, config = time.time(), job.config | {"compile": False}
    parallel = parallel_config(
        **{key: config[key] for key in PARALLEL_KEYS}, float8=FLOAT8_RECIPES.get(config["precision"])
    )
    refuse_what_cannot_be_pretended(parallel)
    gc.freeze()  # looking for garbage in what a step makes does not go through all of torch each time
    with quiet_lightning():
        training = training_of(config, parallel)
        rows = _rows(training.batch())
        planner = start(lambda caller: _predict(config, parallel, rows, caller))  # meanwhile
        try:
            ranks, wrong = pretend_and_compare(training, config["rank"])
            predicted, why_not = result_of(planner) or (None, "the planner's process has ended")
        finally:
            planner.end()
    accounts = [account_of(rank, parallel, predicted[rank.pipe_rank] if predicted else None) for rank in ranks]
    if why_not:
        accounts[0]["notes"].append(f"without a plan beside it: {why_not}")
    if job.config["compile"]:
        accounts[0]["notes"].append(NOT_COMPILED)
    write_beside(
        job.output_dir / FILE, json.dumps({"mesh": parallel.mesh.name, "ranks": accounts, "wrong": wrong}, indent=2)
    )
    summary = {
        "task": "dryrun",
        "status": "failed" if wrong else "finished",
        "world_size": parallel.mesh.size,
        "mesh": parallel.mesh.name,
        "peak_memory_bytes": max(rank.total for rank in ranks),
        "seconds": time.time() - started,
    }
    write_summary(job.output_dir, summary)
    show_dryrun(accounts, wrong, parallel.mesh.name, job.output_dir / FILE, Terminal())
    if wrong:
        raise ConfigError(
            f"mesh={parallel.mesh.name}",
            "ranks of one group do not do the same: " + "; ".join(wrong),
            "one order on all",
        )
    return summary


def training_of(config: Mapping[str, Any], parallel: ParallelConfig) -> Training:
    """What the ranks of a resolved job train.

    Raises:
        ConfigError: no batch can be had, the precision was not tried, or the module optimizes by itself.
    """
    clips = config["trainer"]["gradient_clip_val"]
    return Training(
        parallel,
        lambda: _built(config),
        lambda module, first: first_step(module, lambda: first),
        first_batch(config, parallel.mesh.dp),
        config["trainer"]["accumulate_grad_batches"] or config["data"].get("microbatches", 1),
        _precision(lightning_precision(config["precision"])),
        own_plan(config),
        clips,
    )


def _built(config: Mapping[str, Any]) -> tuple[Any, Construction | None]:
    """The module of a job, without memory if its constructor can run so."""
    module, construction, _ = constructed(config)
    if not module.automatic_optimization:
        raise ConfigError(
            f"dryrun with {type(module).__name__}",
            "it calls its optimizers itself, which have no values here to work with",
            "a module with automatic optimization, or a run",
        )
    return module, construction


def _precision(name: str) -> Any:
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

    if name == "bf16-mixed":
        return MixedPrecision("bf16-mixed", "cpu")
    if name in ("bf16-true", "16-true"):
        return HalfPrecision(name)  # type: ignore[arg-type]  # one of its literals
    if name in ("32-true", "32", 32):
        return Precision()
    raise ConfigError(f"dryrun with precision={name}", "was not tried", "32-true, bf16-true, bf16-mixed")


def _rows(batch: Any) -> int:
    """Samples of a batch, counted by its first tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)


def _predict(config: Mapping[str, Any], parallel: ParallelConfig, rows: int, caller: Caller) -> None:
    """In a process of its own: `predicted_memory`, whatever happens to it."""
    try:
        caller.tell(predicted_memory(config, parallel, rows))
    except Exception as error:  # the ranks have their figures without it
        caller.tell((None, f"the planner fails: {type(error).__name__}: {first_line(error)}"))


def predicted_memory(
    config: Mapping[str, Any], parallel: ParallelConfig, rows: int
) -> tuple[list[dict[str, float]] | None, str]:
    """(what the planner says of each pipe rank, ""), or (None, why it says nothing).

    Bytes by `planner.memory.PIECES`, without what allocators waste, and with as many tokens for every expert: as here.
    """
    from dataclasses import replace

    from autolaunch.planning.choice import profile_of
    from autolaunch_strategies.planner.constants import Constants
    from autolaunch_strategies.planner.hardware import Hardware, Link
    from autolaunch_strategies.planner.memory import memory_account

    bare, link = replace(Constants(), context_bytes=0.0, fragmentation=0.0, imbalance=1.0), Link(1e9, 1e-4)
    here = Hardware("cpu", "cpu", 1, 1, 1.0, {"fp32": 1.0, "bf16": 1.0}, 1.0, link, link, constants=bare)
    try:
        profile, recipe = profile_of(config, "cpu")
    except ConfigError as error:
        return None, f"{error.where}: {error.problem}"
    candidate = candidate_of(config, parallel, rows)
    if len(profile.blocks) < parallel.mesh.pp * candidate.virtual_stages > 1:
        return None, f"{profile.name} has {len(profile.blocks)} repeated blocks, and the planner cuts between such"
    return memory_account(profile, recipe, here, candidate), ""


def candidate_of(config: Mapping[str, Any], parallel: ParallelConfig, rows: int) -> Any:
    """A resolved job as the planner's `Candidate`; `rows` of a rank's batch."""
    from autolaunch_strategies.planner.candidate import PIPELINES, Candidate, recompute_code

    mesh, pp = parallel.mesh, parallel.pp
    pipeline = "none"
    microbatches = config["trainer"]["accumulate_grad_batches"] or config["data"].get("microbatches", 1)
    virtual = 1
    if mesh.pp > 1 and pp is not None:
        pipeline = "exact" if pp.loss == "exact" else pp.schedule
        microbatches = fitting_microbatches(pp.schedule, mesh.pp, pp.virtual_stages, pp.microbatches, rows) or rows
        virtual = pp.virtual_stages or SCHEDULE_SPECS[pp.schedule].least_stages
    return Candidate(
        **mesh.sizes,
        level=parallel.dp.sharding_level,
        replicate=parallel.dp.split(mesh.dp)[0],
        sequence_parallel=int(mesh.mp > 1 and parallel.mp is not None and parallel.mp.sequence_parallel),
        pipeline=PIPELINES.index(pipeline),
        virtual_stages=virtual,
        microbatches=microbatches,
        recompute=recompute_code(parallel.recompute.mode),
        compile=int(bool(parallel.compile)),
        backend=CP_BACKENDS.index(parallel.cp.backend if mesh.cp > 1 and parallel.cp is not None else "gather"),
        ulysses=parallel.ulysses,
        ep=parallel.ep,
    )


def account_of(rank: PretendedRank, parallel: ParallelConfig, predicted: Mapping[str, float] | None) -> dict[str, Any]:
    """One rank as plain data: memory at the peak, and what it exchanged, equal things counted."""
    collectives = Counter(
        (item.kind.strip("_"), _axes(item.ranks, parallel), item.bytes)
        for item in rank.exchanges
        if not item.is_message
    )
    messages = Counter(
        (item.kind.strip("_"), item.peer, item.bytes) for item in rank.exchanges if item.peer is not None
    )
    return {
        "rank": rank.rank,
        "place": rank.coordinate,
        "stage": rank.pipe_rank,
        "memory": {**rank.memory, "total": rank.total},
        "held": rank.held,
        "notes": list(rank.notes),
        **({"predicted": dict(predicted)} if predicted is not None else {}),
        "collectives": [
            {"kind": kind, "axes": axes, "bytes": size, "count": count}
            for (kind, axes, size), count in collectives.items()
        ],
        "messages": [
            {
                "kind": kind,
                "peer": peer,
                "at": _place_of(peer, rank, parallel),
                "bytes": size,
                "count": count,
            }
            for (kind, peer, size), count in messages.items()
        ],
    }


def _place_of(peer: int, rank: PretendedRank, parallel: ParallelConfig) -> str:
    """Where a rank stands that another one sends to: on another stage, numbered as `pipe_rank` is, or along an axis."""
    there = coordinates(parallel.mesh, peer)
    if parallel.pp is not None and there["pp"] != rank.coordinate["pp"]:
        rank_of_stage = placement(parallel.pp, parallel.mesh.pp)
        return f"stage {pipe_rank(rank_of_stage, parallel.mesh.pp, there['pp'])}"
    return " ".join(f"{axis}{place}" for axis, place in there.items() if place != rank.coordinate[axis])


def _axes(ranks: tuple[int, ...], parallel: ParallelConfig) -> str:
    """Along which axes the ranks of a group differ."""
    places = [coordinates(parallel.mesh, rank) for rank in ranks]
    return " x ".join(axis for axis in places[0] if len({place[axis] for place in places}) > 1) or "itself"
