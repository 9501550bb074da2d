"""Whether ranks do the same collectives in the same order, and what one sends another one receives. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, zip_longest
from typing import TYPE_CHECKING

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


def _first_difference(one: int, other: int, pairs: Iterable[tuple[Exchange | None, ...]], what: str) -> list[str]:
    for number, (mine, theirs) in enumerate(pairs, 1):
        if mine is None or theirs is None or (mine.kind, mine.bytes) != (theirs.kind, theirs.bytes):
            return [f"{what}, number {number}: rank {one} has {_words(mine)}, rank {other} {_words(theirs)}"]
    return []


def _words(item: Exchange | None) -> str:
    return "none" if item is None else f"{item.kind.strip('_')} of {item.bytes} bytes"


def _bytes(size: int | None) -> str:
    return "nothing" if size is None else f"{size} bytes"
