"""The axis cp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.errors import ConfigError, nearest
from autolaunch_strategies.config.options import as_yaml, from_mapping, option

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
        f"{where}={as_yaml(name)}",
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
    made: ContextParallel = from_mapping(ContextParallel, cp, "cp")
    return made
