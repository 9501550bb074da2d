"""The mesh of a run for fewer ranks than it had: the same training, as checkpoints load on any mesh. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autolaunch.config.across_keys import check
from autolaunch.config.microbatches import with_batch_parts
from autolaunch.config.sequence_parts import with_sequence_parts
from autolaunch.job import ResolvedJob
from autolaunch_strategies.config import AXES

KEPT_FIRST = ("mp", "pp", "cp", "dp")
"""Which axes keep their size where there is a choice: those that cut the model, as it may not fit otherwise."""


def on_fewer_ranks(job: ResolvedJob, most: int, least: int) -> ResolvedJob | None:
    """The same job on the largest mesh of `least` to `most` ranks that it can run on; None if there is none.

    No axis grows. The batch of a step stays what it is, and so do the parts in which it is accumulated, by which the
    position in a checkpoint is counted: a rank's share of each grows.
    """
    for sizes in _shapes(job.config, most, least):
        config = {**job.config, "mesh": {**job.config["mesh"], **sizes}}
        if (devices := config["launch"]["devices"]) is not None:
            config["launch"] = {**config["launch"], "devices": min(devices, most)}
        mesh, errors = check(config, job.output_dir)
        if not errors:
            config = with_sequence_parts(with_batch_parts(config, mesh.pp), mesh)
            return replace(job, config=config, world_size=mesh.size, choices={**job.choices, "mesh": mesh.name})
    return None


def _shapes(config: Mapping[str, Any], most: int, least: int) -> list[dict[str, int]]:
    """Sizes of the axes, none larger than now, the best first."""
    now = {axis: config["mesh"][axis] for axis in AXES}
    choices: dict[str, Any] = {axis: range(1, size + 1) for axis, size in now.items()}
    if "_target_" in config["data"]:
        choices["dp"] = [
            now["dp"]
        ]  # a data module of one's own gives every rank its batch: fewer would make it smaller
    shapes = [dict(zip(AXES, sizes, strict=True)) for sizes in itertools.product(*choices.values())]
    fitting = [sizes for sizes in shapes if least <= math.prod(sizes.values()) <= most]
    return sorted(
        fitting,
        key=lambda sizes: (-math.prod(sizes.values()), [sizes[axis] != now[axis] for axis in KEPT_FIRST]),
    )
