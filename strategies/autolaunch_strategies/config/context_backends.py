"""Which backends of context parallelism there are, and what is true of each: data that checks, runs and predictions
read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ContextBackend:
    """One way to compute attention over sequences that are sharded over the cp axis.

    The ranks of the axis are places of a ring, of as many neighbours each. Between places keys and values are gathered
    or passed round; neighbours exchange heads for positions. A backend may have one of them, or both.
    """

    name: str
    help: str
    """What it does; the sentence begins with its name."""
    spellings: tuple[str, ...] = ()
    """Other names by which `cp.backend` takes it."""
    foreign_names: tuple[str, ...] = ()
    """What else other tools call it: not taken, but a message says which one is meant."""
    gathers_keys: bool = False
    """Keys and values of all places are on every rank at once, for one attention call."""
    passes_keys: bool = False
    """Keys and values go round a ring, and attention is computed piece by piece with those at hand. So weights of
    attention cannot be dropped out, and a mask cannot have a gradient (a learned bias)."""
    exchanges_heads: bool = False
    """Neighbours exchange heads for positions, so that each has whole sequences of some heads: their number has to
    divide that of the heads."""
    complexity: int = 0
    """Of backends that are as fast the least is chosen."""

    @property
    def is_mixed(self) -> bool:
        """Whether it has both places and neighbours, so that `cp.ulysses` says how many neighbours a place has."""
        return self.exchanges_heads and (self.gathers_keys or self.passes_keys)

    def neighbours(self, cp: int, heads: int | None = None, ulysses: int | None = None) -> int:
        """How many of the `cp` ranks exchange heads with each other.

        Args:
            heads: attention heads of one rank of mp, if they are known.
            ulysses: what `cp.ulysses` says; None leaves it open.
        """
        if not self.exchanges_heads:
            return 1
        if not self.is_mixed:
            return cp
        return ulysses_degree(cp, heads) if ulysses is None else ulysses

    def shards_as(self, other: ContextBackend) -> bool:
        """Whether both have the same positions on a rank, so that modules of one model may have either."""
        return self is other or not (self.exchanges_heads or other.exchanges_heads)


CP_BACKEND_SPECS = {
    spec.name: spec
    for spec in (
        ContextBackend("gather", "has all of them at once (any mask)", foreign_names=("allgather",), gathers_keys=True),
        ContextBackend("ring", "passes them around (least memory)", spellings=("p2p",), passes_keys=True),
        ContextBackend(
            "ulysses",
            "exchanges heads for positions (heads % (mp x cp) = 0)",
            spellings=("all2all",),
            exchanges_heads=True,
            complexity=1,
        ),
        ContextBackend(
            "usp",
            "is ulysses among neighbours and a ring around",
            passes_keys=True,
            exchanges_heads=True,
            complexity=2,
        ),
    )
}
"""By name. A new one of the same parts is an entry here, and a file of its name in conf/cp. Another way for keys and
values to travel is also a `KeyExchange` in context/attention, and its cost in planner/time and planner/memory."""

CP_BACKENDS = tuple(CP_BACKEND_SPECS)
"""Their names."""

CP_SPELLINGS = {spelling: spec.name for spec in CP_BACKEND_SPECS.values() for spelling in spec.spellings}
"""Other names that are taken -> the name."""


def backends_that(is_so: Callable[[ContextBackend], bool]) -> list[str]:
    """Their names, in order."""
    return [spec.name for spec in CP_BACKEND_SPECS.values() if is_so(spec)]


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
