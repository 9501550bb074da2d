"""The axis pp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.options import option
from autolaunch_strategies.config.schedules import SCHEDULES


@dataclass
class PipelineParallel:
    """How the ranks of the pp axis divide a model into stages, and in which order they work."""

    name: str = option("Which pipeline this is; set by the group.", "exact")
    loss: str = option(
        "`exact`: the loss sees the whole batch, whatever it computes. `microbatch`: it is the mean over microbatches "
        "(less memory, any schedule); refused if the first step shows that this is another loss.",
        "exact",
        choices=("exact", "microbatch"),
    )
    schedule: str = option(
        f"Order of work: {', '.join(SCHEDULES)}, or the path of a CSV file, one row per rank (0F0,0F1,0B0,...); "
        "all but gpipe need pp.loss=microbatch. What each does: --info pp.",
        "gpipe",
    )
    microbatches: int | None = option(
        "Equal parts into which each batch of a rank is cut (null: data.microbatches if above 1, else chosen: up to "
        "four per rank). More of them leave ranks idle for less time, but each has its own cost.",
        None,
        ge=1,
    )
    virtual_stages: int | None = option(
        "Stages per rank (null: what the schedule needs: 1 for gpipe and 1f1b, else 2).", None, ge=1
    )
    split: str = option(
        "`even`: as many blocks for each stage; `balanced`: by cost, the embedding and the head counted.",
        "even",
        choices=("even", "balanced"),
    )
    split_spec: Any = option(
        "Where to cut: a prefix of numbered blocks (model.layers), a list of names and prefixes, or the cuts "
        "themselves, {name or pattern: BEGINNING | END}; name@n is call n, from 0, of a module that is called several "
        "times (null: the blocks that the model's structure shows, calls of one that repeats, or its parts by cost).",
        None,
    )
    allow_batch_statistics: bool = option(
        "Let batch norm take its statistics from one microbatch at a time: another result than on one device.", False
    )
    global_spec: Any = option("Modules with parameters that run on every stage: a name or a list of names.", None)


PP_NAMES: dict[str, PipelineParallel | None] = {
    "none": None,
    "exact": PipelineParallel(),
    **{name: PipelineParallel(name, "microbatch", name) for name in SCHEDULES},
}
"""What the names of the group pp mean."""
