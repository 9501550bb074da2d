"""What a parallel run is, as plain data: the mesh and one dataclass per axis, their parsing and their static checks.

Imports no torch, so that the command can check a config in milliseconds; and nothing of ours, except for the rules of
schedules and cuts when a pipeline is checked.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

AXES = ("dp", "mp", "pp", "cp")
"""The axes in the order in which `AxBxCxD` names them."""

DEFAULT_ORDER = ("pp", "dp", "cp", "mp")
"""Outermost to innermost: ranks that differ in the last axis only are neighbours."""

AXIS_SPELLINGS = {"dp": "dp", "mp": "mp", "tp": "mp", "pp": "pp", "cp": "cp"}


class ConfigError(ValueError):
    """One thing that is wrong with a config, and what to write instead.

    Args:
        where: the key and the value as the person would write them, e.g. ``mesh=2x0``.
        problem: what is wrong, in one sentence without a full stop.
        allowed: what is allowed (may be empty).
        write: the line to write (may be empty).
    """

    def __init__(self, where: str, problem: str = "", allowed: str = "", write: str = "") -> None:
        self.where, self.problem, self.allowed, self.write = where, problem, allowed, write
        super().__init__(where, problem, allowed, write)  # all of it, so that it survives pickling

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.problem}" if self.problem else self.where]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.write:
            lines.append(f"  write:   {self.write}")
        return "\n".join(lines)


class ConfigErrors(ValueError):
    """Several `ConfigError`s found in one look; `str()` is all of them, one after the other."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = list(errors)
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def raise_all(errors: list[ConfigError]) -> None:
    """Raise the one error there is, or all of them together; return if there is none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigErrors(errors)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.45) -> str:
    """The known name that `name` was most likely meant to be, or an empty string.

    Args:
        cutoff: how alike they must be at least, from 0 (not at all) to 1 (the same).
    """
    known = list(known)
    swapped = [other for other in known if sorted(other) == sorted(name)]  # the commonest slip: modle
    return next(iter(swapped or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


# --- the mesh ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the four axes and the order in which ranks are laid out; one size may be -1 until `resolve`."""

    dp: int = 1
    mp: int = 1
    pp: int = 1
    cp: int = 1
    order: tuple[str, ...] = DEFAULT_ORDER

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        """How many ranks the mesh has. `assert`s that no size is left open."""
        assert -1 not in self.sizes.values(), "the mesh still has an open size; call resolve() first"
        return math.prod(self.sizes.values())

    @property
    def name(self) -> str:
        """Short canonical text that `parse_mesh` reads back: `2x2x2`, without trailing ones."""
        sizes = [str(self.sizes[axis]) for axis in AXES]
        while len(sizes) > 1 and sizes[-1] == "1":
            sizes.pop()
        return "x".join(sizes)

    def resolve(self, world_size: int, where: str = "mesh") -> MeshShape:
        """Fill the size written as -1 so that the mesh has `world_size` ranks.

        Raises:
            ConfigError: the other sizes do not divide `world_size`.
        """
        open_axis = next((axis for axis, size in self.sizes.items() if size == -1), None)
        if open_axis is None:
            return self
        rest = math.prod(size for size in self.sizes.values() if size != -1)
        if world_size % rest:
            raise ConfigError(
                where,
                f"{open_axis}=-1 takes what is left of {world_size} devices, "
                f"but the other axes need multiples of {rest}",
                allowed=f"other axes whose product divides {world_size}",
            )
        filled: dict[str, Any] = {open_axis: world_size // rest}
        return dataclasses.replace(self, **filled)


_SIZE = r"-1|\d+"
_BY_SHAPE = re.compile(rf"(?:{_SIZE})(?:x(?:{_SIZE}))*")
_BY_NAME = re.compile(rf"[a-z]+(?:{_SIZE})(?:x[a-z]+(?:{_SIZE}))*")
_MESH_ALLOWED = "dp, mp, pp, cp sizes in this order (8, 4x2, 2x2x2) or by name (dp4xmp2, dp-1xmp2)"


def looks_like_mesh(text: str) -> bool:
    """Whether `text` is meant as a mesh shape (right or wrong) and not as the name of a preset."""
    return re.fullmatch(r"-?\d[\dx.\-_]*|(?:[a-z]{2}-?\d+)(?:x[a-z]*-?\d*)*", text) is not None


def parse_mesh(text: str | int, order: Iterable[str] | str = DEFAULT_ORDER) -> MeshShape:
    """Read a mesh shape: ``8``, ``4x2``, ``2x2x2``, ``dp4xmp2``, ``dp-1xmp2`` (`tp` is another spelling of `mp`).

    Raises:
        ConfigError: what is wrong with it, in one line.
    """
    where = f"mesh={text}"
    text = str(text).strip().lower()
    if _BY_SHAPE.fullmatch(text):
        parts = text.split("x")
        if len(parts) > len(AXES):
            raise ConfigError(where, f"{len(parts)} sizes, but there are four axes", _MESH_ALLOWED)
        named = list(zip(AXES, parts, strict=False))
    elif _BY_NAME.fullmatch(text):
        named = []
        for part in text.split("x"):
            found = re.fullmatch(rf"([a-z]+)({_SIZE})", part)
            assert found is not None
            if found[1] not in AXIS_SPELLINGS:
                raise ConfigError(where, f"no axis is called {found[1]!r}", _MESH_ALLOWED)
            named.append((AXIS_SPELLINGS[found[1]], found[2]))
    else:
        raise ConfigError(where, "not a mesh shape", _MESH_ALLOWED)
    sizes: dict[str, int] = {}
    for axis, digits in named:
        if axis in sizes:
            raise ConfigError(where, f"the axis {axis} is given twice", _MESH_ALLOWED)
        if len(digits) > 1 and digits[0] == "0":
            raise ConfigError(where, f"a size with a leading zero: {digits}", _MESH_ALLOWED)
        sizes[axis] = int(digits)
        if sizes[axis] == 0:
            raise ConfigError(where, "an axis of size 0", "every size is 1 or more; one may be -1 (what is left)")
    if list(sizes.values()).count(-1) > 1:
        raise ConfigError(where, "more than one size is -1", "every size is 1 or more; one may be -1 (what is left)")
    return MeshShape(**sizes, order=parse_order(order))


def parse_order(order: Iterable[str] | str) -> tuple[str, ...]:
    """Read a rank order, outermost axis first: ``pp,dp,cp,mp`` or a list of these names.

    Raises:
        ConfigError: it does not name each of the four axes once.
    """
    names = order.replace(" ", "").split(",") if isinstance(order, str) else [str(name) for name in order]
    axes = tuple(AXIS_SPELLINGS.get(name, name) for name in names)
    if sorted(axes) != sorted(AXES):
        raise ConfigError(
            f"mesh.order={','.join(names)}",
            "it must name each of the four axes once",
            "outermost to innermost, e.g. pp,dp,cp,mp",
            f"mesh.order=[{','.join(DEFAULT_ORDER)}]",
        )
    return axes


# --- the axes ----------------------------------------------------------------------------------------------------


def option(
    help: str, default: Any = dataclasses.MISSING, *, choices: Iterable[Any] | None = None, **limits: Any
) -> Any:
    """A dataclass field with a sentence of help, its choices and its limits (`ge=`, `gt=`, `le=`) as metadata."""
    metadata = {"help": help, "choices": None if choices is None else tuple(choices), **limits}
    if isinstance(default, dict | list):
        value = default
        return field(default_factory=lambda: type(value)(value), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataParallel:
    """How the ranks of the dp axis share the work and the state."""

    sharding_level: int = option(
        "What is sharded over dp: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
        3,
        choices=(0, 1, 2, 3),
    )
    replicate: int | None = option("Hybrid sharding: how many replicas of the sharded model.", None, ge=1)
    shard: int | None = option("Hybrid sharding: over how many ranks each replica is sharded.", None, ge=1)
    param_dtype: str | None = option(
        "Type in which sharded parameters are gathered and computed with (null: the type they are stored in).",
        None,
        choices=("fp32", "bf16", "fp16", None),
    )
    reduce_dtype: str | None = option(
        "Type in which gradients are summed over dp (null: the type they are computed in).",
        None,
        choices=("fp32", "bf16", "fp16", None),
    )
    cpu_offload: bool = option("Keep sharded parameters, gradients and optimizer state in host memory.", False)

    def split(self, dp: int) -> tuple[int, int]:
        """(replicas, shards): into how many copies and shards the `dp` ranks of the axis hold the state.

        Raises:
            ConfigError: `replicate * shard` is not `dp`, or is set where nothing is sharded.
        """
        if self.sharding_level == 0:
            if (self.shard or 1) != 1 or (self.replicate or dp) != dp:
                raise ConfigError(
                    f"dp.sharding_level=0 with dp.replicate={_yaml(self.replicate)} dp.shard={_yaml(self.shard)}",
                    "level 0 shards nothing",
                    "levels 1, 2 and 3 with dp.replicate and dp.shard",
                    "dp=hsdp dp.replicate=...",
                )
            return dp, 1
        replicate, shard = self.replicate, self.shard
        if replicate is None and shard is None:
            return 1, dp
        if replicate is None:
            replicate = dp // shard if shard and dp % shard == 0 else -1
        if shard is None:
            shard = dp // replicate if replicate > 0 and dp % replicate == 0 else -1
        if replicate * shard != dp or min(replicate, shard) < 1:
            pairs = ", ".join(f"{r} x {dp // r}" for r in range(1, dp + 1) if dp % r == 0)
            raise ConfigError(
                f"dp.replicate={_yaml(self.replicate)} dp.shard={_yaml(self.shard)}",
                f"their product must be the size of the dp axis, {dp}",
                f"replicate x shard = {pairs}",
            )
        return replicate, shard


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


@dataclass
class ModelParallel:
    """How the ranks of the mp axis divide the layers of a model."""

    name: str = option("Which plan this is; set by the group.", "auto")
    base: str = option(
        "Rules that mp.plan is laid over: `model` (the model's own, or else derived), `derive`, or `none`.",
        "model",
        choices=("model", "derive", "none"),
    )
    sequence_parallel: bool = option("Divide activations between blocks along the sequence, too.", False)
    plan: dict[str, Any] = option(
        "Rules of your own, `pattern: style`; one with a pattern of the base takes its place, null removes it.", {}
    )


SCHEDULES = (
    "gpipe",
    "1f1b",
    "looped_bfs",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
)
"""Pipeline schedules by name; the path of a CSV file is one, too."""


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
        "themselves, {name or pattern: BEGINNING | END} (null: the blocks that the model's structure shows).",
        None,
    )
    global_spec: Any = option("Modules with parameters that run on every stage: a name or a list of names.", None)


CP_BACKENDS = ("gather", "ring", "ulysses", "usp")
"""How the ranks of the cp axis compute attention, by name."""

_CP_SPELLINGS = {"p2p": "ring", "all2all": "ulysses"}


def cp_backend(name: Any, where: str = "cp.backend") -> str:
    """The name of a backend of `CP_BACKENDS`; `p2p` (Paddle's) is another one for ring, `all2all` for ulysses.

    Raises:
        ConfigError: no backend is called so.
    """
    found = _CP_SPELLINGS.get(name, name) if isinstance(name, str) else name
    if found in CP_BACKENDS:
        return str(found)
    close = nearest(str(name), (*CP_BACKENDS, *_CP_SPELLINGS))
    raise ConfigError(
        f"{where}={_yaml(name)}",
        "no backend is called so" + (f"; did you mean {close}?" if close else ""),
        f"{', '.join(CP_BACKENDS)} (p2p is ring, all2all is ulysses)",
        f"{where}={close}" if close and where == "cp.backend" else "",
    )


def divides_alike(one: str, other: str) -> bool:
    """Whether two backends have the same positions on a rank: gather and ring have."""
    alike = ("gather", "ring")
    return one == other or (one in alike and other in alike)


def ulysses_degree(cp: int, heads: int | None) -> int:
    """How many neighbours along cp exchange heads for positions (ulysses), if `cp.ulysses` does not say it.

    The rest of them is the ring. Of several: the most that divide the heads, as an all-to-all costs less than as many
    steps of a ring, with two places of the ring left at least. A prime `cp` cannot be both: it is ulysses alone if it
    divides the heads, else a ring alone.

    Args:
        cp: the size of the cp axis.
        heads: attention heads of one rank of mp; None if they are not known: then the least that is more than one, as
            it asks least of them, and of a prime `cp` a ring, which asks nothing.

    Returns:
        a divisor of `cp`, and of `heads`.
    """
    between = [part for part in range(2, cp) if cp % part == 0]
    if heads is None:
        return between[0] if between else 1
    fitting = [part for part in between or [cp] if heads % part == 0]
    return max(fitting, default=1)


@dataclass
class ContextParallel:
    """How the ranks of the cp axis divide sequences, and how attention sees all of them."""

    name: str = option("Which way this is; set by the group.", "gather")
    backend: str = option(
        "How attention gets keys and values of other ranks: `gather` has all of them at once (any mask), `ring` passes "
        "them around (least memory), `ulysses` exchanges heads for positions (heads % (mp x cp) = 0), `usp` is "
        "ulysses among neighbours and a ring around (p2p is ring, all2all is ulysses).",
        "gather",
        choices=(*CP_BACKENDS, *_CP_SPELLINGS),
    )
    ulysses: int | None = option(
        "backend=usp: neighbours that exchange heads for positions; the rest of cp is the ring (null: the most below "
        "cp that divide the heads).",
        None,
        ge=1,
    )
    pad: bool = option("Pad sequences whose length is no multiple of 2 x cp, instead of refusing them.", False)
    plan: dict[str, Any] = option(
        "Where sequences are divided, if not in every block: `pattern: PrepareContextParallel` for layers that get "
        "them, `pattern: ContextParallel` for layers that call attention.",
        {},
    )

    def __post_init__(self) -> None:
        self.backend = cp_backend(self.backend)

    def split(self, cp: int, heads: int | None = None) -> tuple[int, int]:
        """(ring, ulysses): how many places of a ring, and how many ranks at each, the `cp` ranks of the axis are.

        Args:
            heads: attention heads of one rank of mp, if they are known.

        Raises:
            ConfigError: `ulysses` does not divide `cp`, or is set for a backend that has a ring alone or none.
        """
        if self.backend != "usp":
            if self.ulysses is not None:
                raise ConfigError(
                    f"cp.ulysses={self.ulysses} with cp.backend={self.backend}",
                    f"only usp has two ways at once; {self.backend} does the same on all ranks",
                    "cp.ulysses=null, or cp=usp",
                    f"cp=usp cp.ulysses={self.ulysses}",
                )
            return (1, cp) if self.backend == "ulysses" else (cp, 1)
        ulysses = ulysses_degree(cp, heads) if self.ulysses is None else self.ulysses
        if not isinstance(ulysses, int) or isinstance(ulysses, bool) or ulysses < 1 or cp % ulysses:
            fitting = [part for part in range(1, cp + 1) if cp % part == 0]
            raise ConfigError(
                f"cp.ulysses={self.ulysses}",
                f"{cp} ranks of cp cannot be cut into groups of {ulysses}",
                f"cp.ulysses of {', '.join(map(str, fitting))}, or null",
                "cp.ulysses=null",
            )
        return cp // ulysses, ulysses


RECOMPUTE_MODES = ("none", "full", "selective")


@dataclass
class Recompute:
    """Activation checkpointing: what is computed again in the backward pass instead of being kept."""

    mode: str | int = "none"
    """`none`, `full` (every block), an integer n (every n-th block) or `selective` (keep the outputs of `save`)."""
    save: tuple[str, ...] = ("mm", "attention")
    """Selective only: operators whose outputs are kept: `mm`, `attention`, `collective`, or `aten.<name>`."""


def parse_recompute(value: Any, save: Iterable[str] = ("mm", "attention")) -> Recompute:
    """Read ``recompute=``: none, full, selective, or an integer n >= 1 for every n-th block.

    Raises:
        ConfigError: anything else.
    """
    mode = "none" if value in (None, False) else "full" if value is True else value
    if isinstance(mode, str) and mode.isdecimal():
        mode = int(mode)
    if not (mode in RECOMPUTE_MODES or (isinstance(mode, int) and mode >= 1)):
        raise ConfigError(
            f"recompute={value}",
            "no such way of activation checkpointing",
            "none, full, selective, or a number n for every n-th block",
        )
    return Recompute(mode, tuple(save))


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

    @property
    def ulysses(self) -> int:
        """How many neighbours along cp exchange heads for positions: a divisor of the size of cp."""
        return 1 if self.cp is None or self.mesh.cp == 1 else self.cp.split(self.mesh.cp)[1]

    def check(self) -> list[ConfigError]:
        """Every problem that can be seen without a model and without a device; an empty list if there is none."""
        errors = []
        try:
            self.dp.split(self.mesh.dp)
        except ConfigError as error:
            errors.append(error)
        if self.dp.cpu_offload and self.dp.sharding_level == 0:
            errors.append(
                ConfigError(
                    "dp.cpu_offload=true with dp.sharding_level=0",
                    "only sharded state can be kept in host memory",
                    "dp.sharding_level 1, 2 or 3",
                    "dp.sharding_level=3 dp.cpu_offload=true",
                )
            )
        if self.mesh.mp != 1 and self.mp is None:
            errors.append(
                ConfigError(
                    f"mesh={self.mesh.name} with mp=none",
                    f"the mesh has {self.mesh.mp} ranks along mp, but mp=none uses only one",
                    "mp=auto, tensor_parallel, seq_parallel, or a plan of your own",
                    "mp=auto",
                )
            )
        if self.mesh.mp != 1 and self.compile:
            errors.append(
                ConfigError(
                    f"compile={str(self.compile).lower()} with mesh={self.mesh.name}",
                    "torch.compile does not follow tensors that are divided along mp through a block",
                    "compile=false, or a mesh with mp of size 1",
                    "compile=false",
                )
            )
        errors += self._check_pipeline()
        errors += self._check_context()
        return errors

    def _check_context(self) -> list[ConfigError]:
        if self.cp is None:
            if self.mesh.cp == 1:
                return []
            return [
                ConfigError(
                    f"mesh={self.mesh.name} with cp=none",
                    f"the mesh has {self.mesh.cp} ranks along cp, but cp=none uses only one",
                    f"cp={', '.join(CP_BACKENDS)}",
                    "cp=gather",
                )
            ]
        if self.mesh.cp == 1 and self.cp.backend == "usp":
            return []  # a size that fits another mesh
        try:
            self.cp.split(self.mesh.cp)
        except ConfigError as error:
            return [error]
        return []

    def _check_pipeline(self) -> list[ConfigError]:
        from autolaunch_strategies.pipeline.schedule import check_schedule
        from autolaunch_strategies.pipeline.split import parse_spec

        if self.pp is None:
            if self.mesh.pp == 1:
                return []
            return [
                ConfigError(
                    f"mesh={self.mesh.name} with pp=none",
                    f"the mesh has {self.mesh.pp} ranks along pp, but pp=none uses only one",
                    f"pp=exact, or a schedule for losses that are means over samples: pp={', '.join(SCHEDULES)}",
                    "pp=exact",
                )
            ]
        try:
            parse_spec(self.pp.split_spec)
            errors = []
        except ConfigError as error:
            errors = [error]
        if self.mesh.pp > 1:
            return errors + check_schedule(self.pp, self.mesh.pp, self.pp.microbatches)
        # On one rank no schedule is run; what is wrong whatever the mesh is told all the same.
        return errors if self.pp.schedule.endswith(".csv") else errors + check_schedule(self.pp, 1, None)


MP_NAMES: dict[str, ModelParallel | None] = {
    "none": None,
    "auto": ModelParallel(),
    "tensor_parallel": ModelParallel("tensor_parallel"),
    "seq_parallel": ModelParallel("seq_parallel", sequence_parallel=True),
}
"""What the names of the group mp mean."""


PP_NAMES: dict[str, PipelineParallel | None] = {
    "none": None,
    "exact": PipelineParallel(),
    **{name: PipelineParallel(name, "microbatch", name) for name in SCHEDULES},
}
"""What the names of the group pp mean."""


CP_NAMES: dict[str, ContextParallel | None] = {
    "none": None,
    **{name: ContextParallel(name, name) for name in CP_BACKENDS},
}
"""What the names of the group cp mean."""


def parallel_config(
    mesh: str | int | MeshShape | Mapping[str, Any] = 1,
    dp: DataParallel | Mapping[str, Any] | int | None = None,
    mp: ModelParallel | Mapping[str, Any] | str | None = None,
    pp: PipelineParallel | Mapping[str, Any] | str | None = None,
    cp: ContextParallel | Mapping[str, Any] | str | None = None,
    recompute: Any = "none",
    recompute_save: Iterable[str] = ("mm", "attention"),
    compile: bool | str = False,
) -> ParallelConfig:
    """Build a `ParallelConfig` from what people write in Python or YAML.

    Args:
        mesh: a shape (``"4x2"``), a number of ranks, or ``{dp: 4, mp: 2, order: [...]}``.
        dp: a `DataParallel`, its fields as a mapping, or a sharding level.
        mp: a `ModelParallel`, its fields as a mapping, or none, auto, tensor_parallel, seq_parallel.
        pp: a `PipelineParallel`, its fields as a mapping, or none, exact, or the name of a schedule.
        cp: a `ContextParallel`, its fields as a mapping, or none, or the name of a backend.

    Raises:
        ConfigError: an unknown field, a wrong shape or a wrong value.
    """
    if isinstance(mesh, Mapping):
        known = {key: mesh[key] for key in AXES if key in mesh}
        mesh = MeshShape(**known, order=parse_order(mesh.get("order") or DEFAULT_ORDER))
    elif not isinstance(mesh, MeshShape):
        mesh = parse_mesh(mesh)
    if isinstance(dp, int):
        dp = {"sharding_level": dp}
    data_parallel = dp if isinstance(dp, DataParallel) else _from_mapping(DataParallel, dp or {}, "dp")
    if isinstance(mp, str):
        if mp not in MP_NAMES:
            raise ConfigError(f"mp={mp}", "no such plan", ", ".join(MP_NAMES))
        mp = MP_NAMES[mp]
    model_parallel = _from_mapping(ModelParallel, mp, "mp") if isinstance(mp, Mapping) else mp
    if isinstance(pp, str):
        if pp not in PP_NAMES:
            raise ConfigError(f"pp={pp}", "no such pipeline", ", ".join(PP_NAMES))
        pp = PP_NAMES[pp]
    pipeline = _from_mapping(PipelineParallel, pp, "pp") if isinstance(pp, Mapping) else pp
    return ParallelConfig(
        mesh,
        data_parallel,
        model_parallel,
        pipeline,
        _context_parallel(cp),
        parse_recompute(recompute, recompute_save),
        compile,
    )


def _context_parallel(cp: ContextParallel | Mapping[str, Any] | str | None) -> ContextParallel | None:
    if isinstance(cp, str):
        return CP_NAMES["none" if cp == "none" else cp_backend(cp, "cp")]
    if cp is None or isinstance(cp, ContextParallel):
        return cp
    if not isinstance(cp, Mapping):
        raise ConfigError(
            f"cp={type(cp).__name__}",
            "not what the axis cp does",
            "the name of a backend, a mapping, or autolaunch_strategies.config.ContextParallel",
            "cp='gather'",
        )
    made: ContextParallel = _from_mapping(ContextParallel, cp, "cp")
    return made


def _from_mapping(cls: type, values: Mapping[str, Any], where: str) -> Any:
    fields = {item.name: item for item in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            close = nearest(str(key), fields)
            raise ConfigError(
                f"{where}.{key}",
                "no such key" + (f"; did you mean {where}.{close}?" if close else ""),
                ", ".join(fields),
            )
        choices = fields[key].metadata.get("choices")
        if choices and (value not in choices or isinstance(value, bool) != isinstance(choices[0], bool)):
            raise ConfigError(f"{where}.{key}={value}", "not one of the choices", ", ".join(_yaml(c) for c in choices))
    return cls(**values)
