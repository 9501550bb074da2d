"""All axes together: what a parallel run is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autolaunch_strategies.config.context import ContextParallel, context_parallel
from autolaunch_strategies.config.data_parallel import DP_NAMES, DataParallel
from autolaunch_strategies.config.errors import ConfigError, nearest
from autolaunch_strategies.config.mesh_shape import MeshShape, mesh_of_sizes, parse_mesh
from autolaunch_strategies.config.model_parallel import MP_NAMES, ModelParallel
from autolaunch_strategies.config.options import from_mapping
from autolaunch_strategies.config.pipeline import PP_NAMES, PipelineParallel
from autolaunch_strategies.config.precision import FLOAT8_RECIPES
from autolaunch_strategies.config.recompute import Recompute, parse_recompute

RANDOM_NUMBERS = ("by_rank", "by_position")
"""Whether dropout draws from a generator on each rank, or a number for each place in the run, equal on every mesh."""

COMPILE_MODES = ("default", "max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead")
"""Of `torch.compile`; the last two run what is compiled as CUDA graphs."""
CUDA_GRAPHS = COMPILE_MODES[2:]


@dataclass
class ParallelConfig:
    """Everything the engine needs to know: the mesh, one config per axis, recomputation and compilation."""

    mesh: MeshShape = field(default_factory=MeshShape)
    dp: DataParallel = field(default_factory=DataParallel)
    mp: ModelParallel | None = None
    pp: PipelineParallel | None = None
    cp: ContextParallel | None = None
    recompute: Recompute = field(default_factory=Recompute)
    compile: bool | str = False
    random_numbers: str = "by_rank"
    ep: int = 1
    """Over how many ranks of dp-shard x cp x mp the experts of a mixture are shared out."""
    float8: str | None = None
    """The recipe by which linear layers of blocks multiply in float8; None if they don't."""

    @property
    def expert_ranks(self) -> int:
        """Over how many ranks experts are shared out, or sharded: dp x cp x mp, of one replica where state is sharded.

        Raises:
            ConfigError: as `DataParallel.split`.
        """
        replicas, shards = self.dp.split(self.mesh.dp)
        return (shards if self.dp.sharding_level else replicas) * self.mesh.cp * self.mesh.mp

    @property
    def ulysses(self) -> int:
        """How many neighbours along cp exchange heads for positions: a divisor of the size of cp."""
        return 1 if self.cp is None or self.mesh.cp == 1 else self.cp.split(self.mesh.cp)[1]


def parallel_config(
    mesh: str | int | MeshShape | Mapping[str, Any] = 1,
    dp: DataParallel | Mapping[str, Any] | int | str | None = None,
    mp: ModelParallel | Mapping[str, Any] | str | None = None,
    pp: PipelineParallel | Mapping[str, Any] | str | None = None,
    cp: ContextParallel | Mapping[str, Any] | str | None = None,
    recompute: Any = "none",
    recompute_save: Iterable[str] = ("mm", "attention"),
    compile: bool | str = False,
    random_numbers: str = "by_rank",
    ep: int = 1,
    float8: str | None = None,
    recompute_budget: float | None = None,
) -> ParallelConfig:
    """Build a `ParallelConfig` from what people write in Python or YAML.

    Args:
        mesh: a shape (``"4x2"``), a number of ranks, or ``{dp: 4, mp: 2, order: [...]}``.
        dp: a `DataParallel`, its fields as a mapping, a sharding level, or ddp, zero1, zero2, fsdp, hsdp.
        mp: a `ModelParallel`, its fields as a mapping, or none, auto, tensor_parallel, seq_parallel.
        pp: a `PipelineParallel`, its fields as a mapping, or none, exact, or the name of a schedule.
        cp: a `ContextParallel`, its fields as a mapping, or none, or the name of a backend.
        compile: whether blocks are compiled, or one of `COMPILE_MODES`.
        random_numbers: one of `RANDOM_NUMBERS`.
        ep: over how many ranks the experts of a mixture are shared out.
        float8: one of `FLOAT8_RECIPES`' recipes; None: nothing multiplies in float8.
        recompute, recompute_save, recompute_budget: as `parse_recompute` reads them.

    Raises:
        ConfigError: an unknown field, a wrong shape or a wrong value.
    """
    if isinstance(mesh, Mapping):
        mesh = mesh_of_sizes(mesh)
    elif not isinstance(mesh, MeshShape):
        mesh = parse_mesh(mesh)
    if isinstance(dp, str):
        if dp not in DP_NAMES:
            close = nearest(dp, DP_NAMES)
            problem = "no such way" + (f"; did you mean {close}?" if close else "")
            raise ConfigError(f"dp={dp}", problem, ", ".join(DP_NAMES), f"dp={close or 'fsdp'}")
        dp = DP_NAMES[dp]
    if isinstance(dp, int):
        dp = {"sharding_level": dp}
    data_parallel = dp if isinstance(dp, DataParallel) else from_mapping(DataParallel, dp or {}, "dp")
    if isinstance(mp, str):
        if mp not in MP_NAMES:
            raise ConfigError(f"mp={mp}", "no such plan", ", ".join(MP_NAMES))
        mp = MP_NAMES[mp]
    model_parallel = from_mapping(ModelParallel, mp, "mp") if isinstance(mp, Mapping) else mp
    if isinstance(pp, str):
        if pp not in PP_NAMES:
            raise ConfigError(f"pp={pp}", "no such pipeline", ", ".join(PP_NAMES))
        pp = PP_NAMES[pp]
    pipeline = from_mapping(PipelineParallel, pp, "pp") if isinstance(pp, Mapping) else pp
    if isinstance(compile, str) and compile not in COMPILE_MODES:
        close = nearest(compile, COMPILE_MODES)
        raise ConfigError(
            f"compile={compile}",
            "no such mode" + (f"; did you mean {close}?" if close else ""),
            f"true, false, {', '.join(COMPILE_MODES)}",
            f"compile={close or 'true'}",
        )
    if random_numbers not in RANDOM_NUMBERS:
        close = nearest(str(random_numbers), RANDOM_NUMBERS)
        raise ConfigError(
            f"random_numbers={random_numbers}",
            "no such numbers" + (f"; did you mean {close}?" if close else ""),
            ", ".join(RANDOM_NUMBERS),
            f"random_numbers={close or 'by_position'}",
        )
    if not isinstance(ep, int) or isinstance(ep, bool) or ep < 1:
        raise ConfigError(f"ep={ep}", "not a degree", "a whole number of 1 or more", "ep=2")
    if float8 is not None and float8 not in FLOAT8_RECIPES.values():
        raise ConfigError(f"float8={float8}", "no such recipe", ", ".join(FLOAT8_RECIPES.values()), "float8=rowwise")
    return ParallelConfig(
        mesh,
        data_parallel,
        model_parallel,
        pipeline,
        context_parallel(cp),
        parse_recompute(recompute, recompute_save, recompute_budget),
        compile,
        random_numbers,
        ep,
        float8,
    )
