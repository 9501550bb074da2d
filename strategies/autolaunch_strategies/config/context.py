"""The axis cp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.context_backends import (
    CP_BACKEND_SPECS,
    CP_BACKENDS,
    CP_SPELLINGS,
    ContextBackend,
    backends_that,
)
from autolaunch_strategies.config.errors import ConfigError, nearest
from autolaunch_strategies.config.options import as_yaml, from_mapping, option
from autolaunch_strategies.config.spelling import to_write

_SPELLINGS = ", ".join(f"{spelling} is {name}" for spelling, name in CP_SPELLINGS.items())
_MIXED = backends_that(lambda spec: spec.is_mixed)


def cp_backend(name: Any, where: str = "cp.backend") -> str:
    """The name of a backend of `CP_BACKENDS`, from that or another spelling of it (`p2p` is Paddle's for ring).

    Raises:
        ConfigError: no backend is called so.
    """
    backend = CP_SPELLINGS.get(name, name) if isinstance(name, str) else name
    if backend in CP_BACKENDS:
        return str(backend)
    close = nearest(str(name), (*CP_BACKENDS, *CP_SPELLINGS))
    raise ConfigError(
        f"{where}={as_yaml(name)}",
        "no backend is called so" + (f"; did you mean {close}?" if close else ""),
        f"{', '.join(CP_BACKENDS)} ({_SPELLINGS})",
        f"{where}={close}" if close and where == "cp.backend" else "",
    )


def check_shards_as(backend: str, axis: str, where: str) -> None:
    """Refuse a backend for a part of the model that has other positions on a rank than that of the axis has.

    Args:
        where: what names the backend, as `ConfigError.where`.

    Raises:
        ConfigError: it has.
    """
    if CP_BACKEND_SPECS[backend].shards_as(CP_BACKEND_SPECS[axis]):
        return
    alike = backends_that(lambda spec: not spec.exchanges_heads)
    raise ConfigError(
        f"{where} with backend={backend} and cp.backend={axis}",
        "sequences are sharded in one way in the whole model",
        f"one backend for all ({' and '.join(alike)} shard alike), or none in the plan",
        f"cp={backend}",
    )


@dataclass
class ContextParallel:
    """How sequences are sharded over the ranks of the cp axis, and how attention sees all of them."""

    name: str = option("Which backend this is; set by the group.", "gather")
    backend: str = option(
        "How attention gets keys and values of other ranks: "
        + ", ".join(f"`{spec.name}` {spec.help}" for spec in CP_BACKEND_SPECS.values())
        + f" ({_SPELLINGS}).",
        "gather",
        choices=(*CP_BACKENDS, *CP_SPELLINGS),
    )
    ulysses: int | None = option(
        f"backend={' or '.join(_MIXED)}: neighbours that exchange heads for positions; the rest of cp is the ring "
        "(null: the most below cp that divide the heads).",
        None,
        ge=1,
    )
    pad: bool = option("Pad sequences whose length is no multiple of 2 x cp; false refuses them.", True)
    plan: dict[str, Any] = option(
        "Where sequences are sharded, if not in every block: `pattern: PrepareContextParallel` for layers that get "
        "them, `pattern: ContextParallel` for layers that call attention.",
        {},
    )

    def __post_init__(self) -> None:
        self.backend = cp_backend(self.backend)

    @property
    def spec(self) -> ContextBackend:
        """What is true of the backend."""
        return CP_BACKEND_SPECS[self.backend]

    def to_write(self, field: str, value: str) -> str:
        """The line that sets a field, for whoever wrote this config."""
        return to_write(f"cp.{field}", value, "cp_config" if self.name == "parallelize" else "")

    def split(self, cp: int, heads: int | None = None) -> tuple[int, int]:
        """(ring, ulysses): how many places of a ring, and how many ranks at each, the `cp` ranks of the axis are.

        Args:
            heads: attention heads of one rank of mp, if they are known.

        Raises:
            ConfigError: `ulysses` does not divide `cp`, or is set for a backend that has a ring alone or none.
        """
        if self.ulysses is not None and not self.spec.is_mixed:
            raise ConfigError(
                f"cp.ulysses={self.ulysses} with cp.backend={self.backend}",
                f"only {' and '.join(_MIXED)} has neighbours in a ring; {self.backend} does the same on all ranks",
                f"cp.ulysses=null, or cp={' or cp='.join(_MIXED)}",
                f"cp={_MIXED[0]} cp.ulysses={self.ulysses}",
            )
        ulysses = self.spec.neighbours(cp, heads, self.ulysses)
        if not isinstance(ulysses, int) or isinstance(ulysses, bool) or ulysses < 1 or cp % ulysses:
            fitting = [part for part in range(1, cp + 1) if cp % part == 0]
            raise ConfigError(
                f"cp.ulysses={self.ulysses}",
                f"{cp} ranks of cp cannot be cut into groups of {ulysses}",
                f"cp.ulysses of {', '.join(map(str, fitting))}, or null",
                "cp.ulysses=null",
            )
        return cp // ulysses, ulysses


CP_NAMES: dict[str, ContextParallel | None] = {
    "none": None,
    **{name: ContextParallel(name, name) for name in CP_BACKENDS},
}
"""What the names of the group cp mean."""


def context_parallel(cp: ContextParallel | Mapping[str, Any] | str | None) -> ContextParallel | None:
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
    config: ContextParallel = from_mapping(ContextParallel, cp, "cp")
    return config
