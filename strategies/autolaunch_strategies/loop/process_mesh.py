"""Which ranks stand where: a named array of ranks, as Paddle's ProcessMesh. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from autolaunch_strategies.config import AXES, AXIS_SPELLINGS, ConfigError, MeshShape, parse_mesh

_ALLOWED = "dp, mp (or tp), pp, cp, each once"


class ProcessMesh:
    """Ranks as nested lists, one level per axis: ``ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])``.

    The array decides the layout: ranks 0 and 1 above hold parts of one replica, ranks 0 and 2 are replicas.

    Args:
        mesh: every rank from 0 to n - 1 once, nested as deep as there are names.
        dim_names: the axis of each level, outermost first: dp, mp (or tp), pp, cp.

    Raises:
        ConfigError: a ragged array, a rank twice or missing, an unknown axis, or one twice.
    """

    def __init__(self, mesh: Sequence[Any], dim_names: Sequence[str]) -> None:
        where = f"ProcessMesh(dim_names={list(dim_names)})"
        self.shape = _sizes(mesh, where)
        self.process_ids = list(_flat(mesh))
        unknown = [name for name in dim_names if name not in AXIS_SPELLINGS]
        if unknown:
            raise ConfigError(where, f"no axis is called {unknown[0]!r}", _ALLOWED)
        self.dim_names = tuple(AXIS_SPELLINGS[name] for name in dim_names)
        if len(set(self.dim_names)) != len(self.dim_names):
            raise ConfigError(where, "an axis is named twice", _ALLOWED)
        if len(self.shape) != len(self.dim_names):
            raise ConfigError(
                where, f"{len(self.shape)} dims of ranks, but {len(self.dim_names)} names", "as many names"
            )
        if sorted(self.process_ids) != list(range(len(self.process_ids))):
            raise ConfigError(where, f"the ranks are {self.process_ids}", "every rank from 0 to n - 1 once")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.process_ids)

    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis; 1 if the mesh does not name it."""
        return dict(zip(self.dim_names, self.shape, strict=True)).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` stands along each named axis, e.g. which share of the batch is its own (``["dp"]``)."""
        place, position = self.place(rank), {}
        for name, size in zip(reversed(self.dim_names), reversed(self.shape), strict=True):
            place, position[name] = divmod(place, size)
        return position

    def place(self, rank: int) -> int:
        """How many ranks stand before `rank` in the array, read row by row."""
        return self.process_ids.index(rank)

    def to_shape(self) -> MeshShape:
        """The sizes of all four axes, and their order as given here."""
        sizes = {axis: self.axis_size(axis) for axis in AXES}
        return MeshShape(**sizes, order=(*(axis for axis in AXES if axis not in self.dim_names), *self.dim_names))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.dim_names, tuple(self.process_ids)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.dim_names, self.shape, strict=True))
        return f"ProcessMesh({sizes}, ranks={self.process_ids})"


def _sizes(mesh: Any, where: str) -> tuple[int, ...]:
    if not isinstance(mesh, list | tuple):
        raise ConfigError(where, f"ranks are nested lists, not {mesh!r}", "e.g. [[0, 1], [2, 3]]")
    if not any(isinstance(item, list | tuple) for item in mesh):
        wrong = [item for item in mesh if not isinstance(item, int) or isinstance(item, bool)]
        if wrong or not mesh:
            raise ConfigError(where, f"not a rank: {wrong[0]!r}" if wrong else "a list without ranks", "integers")
        return (len(mesh),)
    if not all(isinstance(item, list | tuple) for item in mesh):
        raise ConfigError(where, "some ranks are nested deeper than others", "lists of equal length and depth")
    inner = {_sizes(item, where) for item in mesh}
    if len(inner) != 1:
        raise ConfigError(where, "lists of different lengths", "lists of equal length and depth")
    return (len(mesh), *inner.pop())


def _flat(mesh: Any) -> Iterator[int]:
    for item in mesh:
        if isinstance(item, int):
            yield item
        else:
            yield from _flat(item)


_GLOBAL: list[ProcessMesh] = []


def set_mesh(mesh: Any) -> None:
    """Make `mesh` (what `parallelize` takes) that which it uses if it gets none."""
    _GLOBAL[:] = [process_mesh(mesh)]


def get_mesh() -> ProcessMesh | None:
    """What `set_mesh` was given, or None."""
    return _GLOBAL[0] if _GLOBAL else None


def process_mesh(mesh: Any) -> ProcessMesh:
    """`mesh` as a ProcessMesh: it is one, a shape as MeshStrategy takes it, or torch's DeviceMesh with named dims.

    Of a shape all four axes are there, and one size may be -1: what the processes that were started leave.

    Raises:
        ConfigError: none of them, or not a shape.
    """
    if isinstance(mesh, ProcessMesh):
        return mesh
    if isinstance(mesh, str | int | MeshShape):
        shape = mesh if isinstance(mesh, MeshShape) else parse_mesh(mesh)
        shape = shape.resolve(int(os.environ.get("WORLD_SIZE", "1")))
        ranks: list[Any] = list(range(shape.size))
        for axis in reversed(shape.order[1:]):
            ranks = [ranks[start : start + shape.sizes[axis]] for start in range(0, len(ranks), shape.sizes[axis])]
        return ProcessMesh(ranks, shape.order)
    places, names = getattr(mesh, "mesh", None), getattr(mesh, "mesh_dim_names", None)
    if places is None or not names:
        raise ConfigError(
            "mesh",
            f"not a mesh with named dims: {mesh!r}",
            'a shape (8, "4x2", "dp4xmp2"), ProcessMesh, or DeviceMesh with mesh_dim_names',
        )
    mesh = ProcessMesh(places.tolist(), names)
    assert math.prod(mesh.shape) == mesh.size
    return mesh
