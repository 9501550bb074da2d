"""Which positions of a sequence stand on which rank of the cp axis, and with whom a rank exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from autolaunch_strategies.torch_private.modes import outside_of_modes


@dataclass(frozen=True)
class Layout:
    """How a sequence of `size` positions is sharded over `ranks`.

    The ranks are `ring` x `ulysses`, the latter varying fastest. Around the ring the sequence is cut into 2·ring
    chunks of equal length, of which place r holds chunk r and chunk 2·ring-1-r ("head-tail"): so every place has the
    same share of a causal mask. The two chunks of a place, one after the other, are sharded over its `ulysses` ranks
    in contiguous parts. With a ring of one place each rank holds one contiguous part of the whole sequence.

    Every rank holds `local` positions in ascending order. If 2·ranks does not divide `size`, the last of them lie
    behind the end of the sequence (>= size): padding.
    """

    size: int
    ranks: int
    ulysses: int = 1

    @property
    def ring(self) -> int:
        """Places around the ring."""
        return self.ranks // self.ulysses

    @property
    def local(self) -> int:
        """Positions per rank, padding included."""
        return 2 * -(-self.size // (2 * self.ranks))

    @property
    def is_padded(self) -> bool:
        """Whether some rank holds padding."""
        return self.local * self.ranks != self.size

    @property
    def chunk(self) -> int:
        """Length of one of the 2·ring chunks: half of what the ranks of one place of the ring hold together."""
        return self.local * self.ulysses // 2

    def padded_positions(self, rank: int) -> torch.Tensor:
        """Global positions that `rank` holds, [local] int64, ascending; those >= size are padding."""
        return _positions(self, rank)

    def positions(self, rank: int) -> torch.Tensor:
        """As `padded_positions` without padding: [valid(rank)]."""
        return _positions(self, rank)[: self.valid(rank)]

    def repeated_positions(self, rank: int, device: torch.device) -> torch.Tensor:
        """As `padded_positions` with the last position of the sequence in the place of padding, on a device."""
        return _repeated(self, rank, device)

    def valid(self, rank: int) -> int:
        """How many of the positions that `rank` holds belong to the sequence."""
        place, part = divmod(rank, self.ulysses)
        return min(max(self.valid_at(place) - part * self.local, 0), self.local)

    def valid_at(self, place: int) -> int:
        """How many of the positions that the ranks of a place hold together belong to the sequence; they come first."""
        return _valid_at(self, place)

    def chunk_starts(self, place: int) -> tuple[int, int]:
        """Where the two chunks of a place of the ring begin."""
        return place * self.chunk, (2 * self.ring - 1 - place) * self.chunk


@lru_cache(maxsize=1024)
def layout_of(size: int, ranks: int, ulysses: int = 1) -> Layout:
    """The layout, the same object every time: what is remembered by it is found without comparing numbers."""
    return Layout(size, ranks, ulysses)


@lru_cache(maxsize=1024)
def _valid_at(layout: Layout, place: int) -> int:
    return sum(min(max(layout.size - start, 0), layout.chunk) for start in layout.chunk_starts(place))


@lru_cache(maxsize=1024)
def _positions(layout: Layout, rank: int) -> torch.Tensor:
    place, part = divmod(rank, layout.ulysses)
    with outside_of_modes():  # what is kept must be a real tensor, whatever is being made when it is first asked for
        both = torch.cat([torch.arange(start, start + layout.chunk) for start in layout.chunk_starts(place)])
        return both[part * layout.local : (part + 1) * layout.local]


@lru_cache(maxsize=256)
def _repeated(layout: Layout, rank: int, device: torch.device) -> torch.Tensor:
    with outside_of_modes():
        return _positions(layout, rank).clamp(max=layout.size - 1).to(device)


@dataclass(frozen=True)
class Peers:
    """The ranks along cp with which this one shares sequences.

    Rank numbers are those within `group`: place · ulysses + part (see `Layout`).
    """

    group: dist.ProcessGroup
    """All of them."""
    ring: dist.ProcessGroup | None
    """Those of the same part at the other places of the ring; None if the ring has one place."""
    ulysses: dist.ProcessGroup | None
    """Those of the same place; None if there is one."""

    @property
    def rank(self) -> int:
        """The number of this rank within `group`."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    def layout(self, size: int) -> Layout:
        """How a sequence of `size` positions is sharded over them."""
        return layout_of(size, self.group.size(), 1 if self.ulysses is None else self.ulysses.size())
