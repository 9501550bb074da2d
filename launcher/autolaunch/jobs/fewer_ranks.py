"""The mesh of a run for fewer ranks than it had: the same training, as checkpoints load on any mesh. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
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

    No axis grows. The batch of a step stays what it is; where a rank's share of it grows, more of it is accumulated
    (`data.microbatches`), so that a forward pass has no more sequences than before.
    """
    for sizes in _shapes(job.config, most, least):
        for parts in _microbatches(job.config, sizes):
            config = _changed(job.config, sizes, parts, most)
            mesh, errors = check(config, job.output_dir)
            if not errors:
                config = with_sequence_parts(with_batch_parts(config, mesh.pp), mesh)
                choices = {**job.choices, "mesh": mesh.name}
                return replace(job, config=config, world_size=mesh.size, choices=choices)
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


def _microbatches(config: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[int | None]:
    """Values of data.microbatches to try: for a forward pass as large as now, else as it is; None: there is no key."""
    data = config["data"]
    batch, parts = data.get("batch_size"), data.get("microbatches")
    if "_target_" in data or batch is None or parts is None:
        yield None
        return
    sequences = batch / (config["mesh"]["dp"] * parts * _pipelined(config, config["mesh"]["pp"]))
    share = sizes["dp"] * _pipelined(config, sizes["pp"])
    for number in range(parts, batch // share + 1):
        if batch % (share * number) == 0 and batch / (share * number) <= sequences:
            yield number
            break
    yield parts


def _pipelined(config: Mapping[str, Any], pp: int) -> int:
    """Microbatches of the pipeline."""
    return 1 if pp == 1 or config["pp"] is None else config["pp"]["microbatches"] or 1


def _changed(config: Mapping[str, Any], sizes: Mapping[str, int], parts: int | None, most: int) -> dict[str, Any]:
    changed = {**config, "mesh": {**config["mesh"], **sizes}}
    if parts is not None:
        changed["data"] = {**config["data"], "microbatches": parts}
    if config["launch"]["devices"] is not None:
        changed["launch"] = {**config["launch"], "devices": min(config["launch"]["devices"], most)}
    return changed
