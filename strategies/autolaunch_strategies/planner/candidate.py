"""One way to run a training, and many of them as columns. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import (
    CP_BACKEND_SPECS,
    CP_BACKENDS,
    SCHEDULE_SPECS,
    ConfigError,
    ContextBackend,
    MeshShape,
    ScheduleSpec,
)

PIPELINE_SPECS = [
    ScheduleSpec("none", least_stages=1, most_stages=1, complexity=0),
    ScheduleSpec(
        "exact",
        least_stages=1,
        most_stages=1,
        all_forward_first=True,
        any_loss=True,
        complexity=1,
        first_look=True,
    ),
    *SCHEDULE_SPECS.values(),
]
"""What is true of each option of the group pp, in the order of `Candidate.pipeline`. Whoever predicts other schedules
adds them at the end: they are never proposed."""

PIPELINES = tuple(spec.name for spec in PIPELINE_SPECS)
"""The names of those that are proposed."""

NO_RECOMPUTE, SELECTIVE, FULL = 0, -1, 1
"""Values of `Candidate.recompute`; n > 1 is every n-th block."""


def recompute_code(mode: str | int) -> int:
    """`Candidate.recompute` of a mode of `Recompute`.

    Raises:
        ConfigError: a mode that is not predicted.
    """
    if isinstance(mode, int):
        return mode
    codes = {"none": NO_RECOMPUTE, "selective": SELECTIVE, "full": FULL}
    if mode not in codes:
        unknown = {
            "offload": "how fast tensors move to the host and back is not in its profiles",
            "budget": "what is computed again is chosen when blocks are compiled",
        }
        raise ConfigError(
            f"recompute={mode}",
            f"the planner doesn't predict it: {unknown[mode]}",
            f"{', '.join(codes)}, or a number n for every n-th block; or a mesh of your own with recompute={mode}",
            "recompute=full",
        )
    return codes[mode]


@dataclass(frozen=True)
class Candidate:
    """One way to run a training: values as in the config, by number where the config has names."""

    dp: int = 1
    mp: int = 1
    pp: int = 1
    cp: int = 1
    level: int = 0
    """dp.sharding_level."""
    replicate: int = 1
    """dp.replicate: replicas of what is sharded; at level 0 all of dp."""
    sequence_parallel: int = 0
    """1: mp=seq_parallel."""
    pipeline: int = 0
    """Index in `PIPELINE_SPECS`; 0 with one rank along pp."""
    virtual_stages: int = 1
    split: int = 0
    """0: blocks shared out evenly; 1: balanced by time (written as `pp.split_spec`)."""
    microbatches: int = 1
    """Parts of a rank's share of the batch: of the pipeline, or accumulated without one."""
    recompute: int = NO_RECOMPUTE
    backend: int = 0
    """Index in `CP_BACKENDS`."""
    ulysses: int = 1
    """Neighbours along cp that exchange heads (cp for ulysses, 1 for gather and ring)."""
    ep: int = 1
    """Over how many ranks of dp x cp x mp (of dp those of one replica) the experts of a mixture are shared out."""
    compile: int = 0
    """1: blocks are compiled."""

    @property
    def ranks(self) -> int:
        """How many devices it needs."""
        return self.dp * self.mp * self.pp * self.cp

    @property
    def mesh(self) -> MeshShape:
        """Its mesh, in the default rank order."""
        return MeshShape(self.dp, self.mp, self.pp, self.cp)

    @property
    def schedule(self) -> ScheduleSpec:
        """What is true of its pipeline."""
        return PIPELINE_SPECS[self.pipeline]

    @property
    def pipeline_name(self) -> str:
        """The option of the group pp."""
        return self.schedule.name

    @property
    def backend_name(self) -> str:
        """The option of the group cp."""
        return CP_BACKENDS[self.backend]

    @property
    def context_backend(self) -> ContextBackend:
        """What is true of the backend."""
        return CP_BACKEND_SPECS[self.backend_name]

    @property
    def recompute_name(self) -> str | int:
        """The value of `recompute=`."""
        return {NO_RECOMPUTE: "none", SELECTIVE: "selective", FULL: "full"}.get(self.recompute, self.recompute)


FIELDS = tuple(item.name for item in fields(Candidate))

Ints = NDArray[np.int64]


def of_backends(attribute: str, backend: Ints) -> NDArray[Any]:
    """[n]: an attribute of `ContextBackend` for each of these backends, indices in `CP_BACKENDS`."""
    return np.asarray([getattr(spec, attribute) for spec in CP_BACKEND_SPECS.values()])[backend]


def of_schedules(attribute: str, pipeline: Ints) -> NDArray[Any]:
    """[n]: an attribute of `ScheduleSpec` for each of these pipelines, indices in `PIPELINE_SPECS`."""
    return np.asarray([getattr(spec, attribute) for spec in PIPELINE_SPECS])[pipeline]


def distinct_rows(columns: Sequence[NDArray[Any]]) -> tuple[Ints, Ints]:
    """For rows of columns [n]: (index of the first of each distinct row, [n]: which of these each row equals)."""
    code, bound = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns if len(code) else ():
        low = int(column.min())
        span = int(column.max()) - low + 1
        bound *= span
        if bound >= 2**62:
            _, first, inverse = np.unique(np.stack(columns, 1), axis=0, return_index=True, return_inverse=True)
            return first, inverse.reshape(-1)
        code = code * span + (column - low)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


class Candidates:
    """Many candidates as int64 columns [n], one attribute per field of `Candidate`."""

    dp: Ints
    mp: Ints
    pp: Ints
    cp: Ints
    level: Ints
    replicate: Ints
    sequence_parallel: Ints
    pipeline: Ints
    virtual_stages: Ints
    split: Ints
    microbatches: Ints
    recompute: Ints
    backend: Ints
    ulysses: Ints
    ep: Ints
    compile: Ints

    def __init__(self, **columns: Any) -> None:
        """Columns [n] by the names of `FIELDS`; scalars are repeated, absent ones have the default."""
        values = {name: columns.pop(name, getattr(Candidate, name)) for name in FIELDS}
        assert not columns, f"no such columns: {sorted(columns)}"
        arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, dtype=np.int64)) for value in values.values()))
        for name, array in zip(FIELDS, arrays, strict=True):
            setattr(self, name, array)

    @classmethod
    def of(cls, rows: Iterable[Candidate]) -> Candidates:
        """These candidates as columns."""
        rows = list(rows)
        return cls(**{name: [getattr(row, name) for row in rows] for name in FIELDS})

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, index: int) -> Candidate:
        return Candidate(**{name: int(getattr(self, name)[index]) for name in FIELDS})

    def select(self, which: Any) -> Candidates:
        """Those that a mask or an array of indices names."""
        return Candidates(**{name: getattr(self, name)[which] for name in FIELDS})

    def as_they_run(self, refused: Collection[str]) -> Candidates:
        """Without sequence parallelism where a model has no place for it: a plan that asks for it runs without.

        Args:
            refused: as `ModelProfile.refused`.
        """
        if "sequence_parallel" not in refused:
            return self
        columns = {name: getattr(self, name) for name in FIELDS}
        return Candidates(**{**columns, "sequence_parallel": np.zeros_like(self.sequence_parallel)})

    @property
    def is_sharded(self) -> NDArray[np.bool_]:
        """Whether dp shards any state."""
        return np.asarray((self.level > 0) & (self.dp * self.cp > 1))

    @property
    def shard(self) -> Ints:
        """Over how many ranks the state is sharded: dp x cp / replicate; 1 at level 0."""
        return np.where(self.level == 0, 1, self.dp * self.cp // self.replicate)

    @property
    def expert_ranks(self) -> Ints:
        """Among how many ranks experts are shared out and sharded, as `ParallelConfig.expert_ranks`."""
        return self.dp // np.where(self.level == 0, 1, self.replicate) * self.cp * self.mp

    @property
    def expert_parts(self) -> Ints:
        """Of how many parts of the experts a rank has one, before dp shards it: ep; without it mp."""
        return np.where(self.ep > 1, self.ep, self.mp)

    @property
    def expert_shard(self) -> Ints:
        """Over how many ranks the state of such a part is sharded: efsdp; 1 at level 0."""
        return np.where(self.level == 0, 1, self.expert_ranks // self.expert_parts)
