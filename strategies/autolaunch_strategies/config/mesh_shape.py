"""The axes, and the sizes that a mesh has along each: their text and their order."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.errors import ConfigError, nearest


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, and what is true of the ranks along it."""

    name: str
    depth: int
    """Its place in the usual order of ranks, 0 outermost: ranks along the innermost axis are neighbours."""
    same_data: bool
    """Whether these ranks are given the same batch, so that their random numbers have to agree."""
    shards_state: bool
    """Whether parameters, gradients and optimizer state are sharded over them."""
    dims: tuple[str, ...]
    """Of which dims of torch's mesh it is made, outermost first; those of size 1 are left out."""
    spellings: tuple[str, ...] = ()
    """Other names for it in `mesh=`."""


AXIS_TABLE = (
    Axis("dp", depth=1, same_data=False, shards_state=True, dims=("dp_replicate", "dp_shard")),
    Axis("mp", depth=3, same_data=True, shards_state=False, dims=("mp",), spellings=("tp",)),
    Axis("pp", depth=0, same_data=True, shards_state=False, dims=("pp",)),
    Axis("cp", depth=2, same_data=True, shards_state=True, dims=("cp_ring", "cp_ulysses", "cp")),
)
"""All axes, in the order in which `AxBxCxD` names them."""

AXES = tuple(axis.name for axis in AXIS_TABLE)
"""Their names, in this order."""

DEFAULT_ORDER = tuple(axis.name for axis in sorted(AXIS_TABLE, key=lambda axis: axis.depth))
"""Outermost to innermost: ranks that differ in the last axis only are neighbours."""

SAME_DATA_AXES = tuple(axis.name for axis in AXIS_TABLE if axis.same_data)
"""Ranks along these work on the same batch."""

SHARDING_AXES = tuple(axis.name for axis in AXIS_TABLE if axis.shards_state)
"""State is sharded over the ranks along these, taken together."""

AXIS_SPELLINGS = {spelling: axis.name for axis in AXIS_TABLE for spelling in (axis.name, *axis.spellings)}
"""What an axis may be called -> its name."""


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
            match = re.fullmatch(rf"([a-z]+)({_SIZE})", part)
            assert match is not None
            if match[1] == "ep":
                axes = "x".join(other for other in text.split("x") if other != part) or match[2]
                problem = "ep is no axis, but a degree beside the mesh: it is borrowed from dp x cp x mp"
                raise ConfigError(where, problem, _MESH_ALLOWED, f"mesh={axes} ep={match[2]}")
            if match[1] not in AXIS_SPELLINGS:
                raise ConfigError(where, f"no axis is called {match[1]!r}", _MESH_ALLOWED)
            named.append((AXIS_SPELLINGS[match[1]], match[2]))
    else:
        meant = text.strip("x")
        readable = _BY_SHAPE.fullmatch(meant) or _BY_NAME.fullmatch(meant)
        raise ConfigError(where, "not a mesh shape", _MESH_ALLOWED, f"mesh={meant}" if readable else "")
    sizes: dict[str, int] = {}
    for axis, digits in named:
        if axis in sizes:
            raise ConfigError(where, f"the axis {axis} is given twice", _MESH_ALLOWED)
        if len(digits) > 1 and digits[0] == "0":
            raise ConfigError(where, f"a size with a leading zero: {digits}", _MESH_ALLOWED)
        sizes[axis] = int(digits)
        if sizes[axis] == 0:
            meant = re.sub(r"(?<!\d)0", "1", text)
            allowed = "every size is 1 or more; one may be -1 (what is left)"
            raise ConfigError(where, "an axis of size 0", allowed, f"mesh={meant}")
    if list(sizes.values()).count(-1) > 1:
        raise ConfigError(where, "more than one size is -1", "every size is 1 or more; one may be -1 (what is left)")
    return MeshShape(**sizes, order=parse_order(order))


def mesh_of_sizes(sizes: Mapping[str, Any]) -> MeshShape:
    """Read a mesh from ``{dp: 4, tp: 2, order: [...]}``: axes by any of their spellings; those left out have size 1.

    Raises:
        ConfigError: a key that is no axis, an axis twice, a size that is no whole number of 1 or more (one may be -1).
    """
    order = sizes.get("order") or DEFAULT_ORDER
    parts: list[str] = []
    for key, size in sizes.items():
        if key == "order":
            continue
        if key not in AXIS_SPELLINGS:
            close = nearest(str(key), AXIS_SPELLINGS)
            raise ConfigError(
                f"mesh.{key}",
                "no such key" + (f"; did you mean mesh.{close}?" if close else ""),
                f"{', '.join(AXES)} (tp is mp), order",
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < -1:
            raise ConfigError(f"mesh.{key}={size}", "not a size", "a whole number of 1 or more; one may be -1")
        parts.append(f"{key}{size}")
    return parse_mesh("x".join(parts), order) if parts else MeshShape(order=parse_order(order))


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
