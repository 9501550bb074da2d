"""Whether ranks do the same collectives in the same order, and what one sends another one receives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import TYPE_CHECKING, Any

from autolaunch_strategies.config import MeshShape
from autolaunch_strategies.mesh.rank_mesh import coordinates

if TYPE_CHECKING:
    from autolaunch_strategies.dry_run.trace import Exchange


def disagreements(exchanges: Mapping[int, Sequence[Exchange]]) -> list[str]:
    """Where two ranks would wait for each other for ever, or read what was not meant: a sentence for each pair.

    Args:
        exchanges: of each pretended rank, in order.
    """
    found = []
    for one, other in combinations(sorted(exchanges), 2):
        mine, theirs = exchanges[one], exchanges[other]
        for group in dict.fromkeys(item.ranks for item in (*mine, *theirs) if not item.is_message):
            if one in group and other in group:
                pairs = zip_longest(
                    *([item for item in row if item.ranks == group and not item.is_message] for row in (mine, theirs))
                )
                found += _first_difference(one, other, pairs, f"collective of the group of {len(group)} ranks")
        for sender, receiver in ((one, other), (other, one)):
            sent = [item for item in exchanges[sender] if item.kind == "send" and item.peer == receiver]
            received = [item for item in exchanges[receiver] if item.kind == "recv_" and item.peer == sender]
            sizes = zip_longest([item.bytes for item in sent], [item.bytes for item in received])
            for number, (bytes_sent, bytes_received) in enumerate(sizes, 1):
                if bytes_sent != bytes_received:
                    found.append(
                        f"message {number} from rank {sender} to rank {receiver}: {_bytes(bytes_sent)} sent, "
                        f"{_bytes(bytes_received)} received"
                    )
                    break
    return found


def unlike(exchanges: Mapping[int, Sequence[Exchange]], shape: MeshShape) -> list[str]:
    """Where a rank does other collectives along some axes than one at another place of all axes but pp.

    Ranks of a group do the same if what they do along axes does not depend on where they stand, so one rank elsewhere
    along every axis tells of all of them. Where it differs, `disagreements` of ranks of one group says more.
    """
    found = []
    for one, other in combinations(sorted(exchanges), 2):
        if coordinates(shape, one)["pp"] != coordinates(shape, other)["pp"]:
            continue
        mine, theirs = (_by_likeness(exchanges[rank], shape) for rank in (one, other))
        for key in dict.fromkeys([*mine, *theirs]):
            pairs = zip_longest(mine.get(key, []), theirs.get(key, []))
            found += _first_difference(one, other, pairs, f"collective of groups of {len(key)} ranks")
    return found


def _by_likeness(exchanges: Iterable[Exchange], shape: MeshShape) -> dict[Any, list[Exchange]]:
    """Collectives by where the ranks of their group stand beside the first of them."""
    keys: dict[tuple[int, ...], Any] = {}
    rows: dict[Any, list[Exchange]] = {}
    for item in exchanges:
        if item.is_message:
            continue
        if item.ranks not in keys:
            places = [coordinates(shape, rank) for rank in item.ranks]
            keys[item.ranks] = tuple(tuple(place[axis] - places[0][axis] for axis in place) for place in places)
        rows.setdefault(keys[item.ranks], []).append(item)
    return rows


def _first_difference(one: int, other: int, pairs: Iterable[tuple[Exchange | None, ...]], what: str) -> list[str]:
    for number, (mine, theirs) in enumerate(pairs, 1):
        if mine is None or theirs is None or (mine.kind, mine.bytes) != (theirs.kind, theirs.bytes):
            return [f"{what}, number {number}: rank {one} has {_words(mine)}, rank {other} {_words(theirs)}"]
    return []


def _words(item: Exchange | None) -> str:
    return "none" if item is None else f"{item.kind.strip('_')} of {item.bytes} bytes"


def _bytes(size: int | None) -> str:
    return "nothing" if size is None else f"{size} bytes"
