"""data.streaming: rows that are tokenised as they are read, in an order that can be left and taken up again."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from autolaunch.data.encoders import Encoder
from autolaunch.data.examples import ExampleSequences
from autolaunch.data.order import permuted, shared_out
from autolaunch.data.prepared import Prepared, in_memory
from autolaunch.data.rows import MOST_TOLD, BadRow, Rows, bad_row_errors
from autolaunch_strategies.config import ConfigError, raise_all

BLOCK_ROWS = 1024
"""`data.shuffle_buffer` where nothing is said."""


@dataclass(frozen=True)
class Position:
    """The sequence of a stream that comes next."""

    epoch: int = 0
    shard: int = 0
    """How many sources of rows were read to their end in this epoch."""
    mark: Any = None
    """Where in the next one its block begins; see `Rows.read`."""
    block: int = 0
    """How many blocks of this epoch were before."""
    taken: int = 0
    """Sequences of the block that were handed out."""


@dataclass(frozen=True)
class Drawn:
    """A sequence of a block."""

    block: ExampleSequences
    index: int


@dataclass
class RowStream:
    """Sequences of rows that are read in order, as many blocks of `block_rows` rows.

    What is packed together stands in one block, and a block is shuffled as a whole: to find a place again, one block
    is read once more, whatever came before.

    Args:
        number: of this stream among others.
        shuffle: also the order of the sources of rows, anew in every epoch.
        sequences: makes them of the examples of a block.
        on_bad: see `prepare`.
        tell: whether this process tells of rows that are left out.
    """

    rows: Sequence[Rows]
    number: int
    seed: int
    shuffle: bool
    block_rows: int
    encoder: Encoder
    sequences: Callable[[Prepared], ExampleSequences]
    on_bad: str
    tell: bool = False
    bad: int = field(default=0, init=False)

    def read(self, at: Position, endless: bool) -> Iterator[tuple[Drawn, Position]]:
        """(a sequence, the position behind it) of each sequence from `at` on, in this epoch or in all that follow.

        Raises:
            ConfigError, ConfigErrors: rows are bad, and that was not to be skipped; or an epoch has no sequences.
        """
        while True:
            is_empty = at == Position(at.epoch)
            for start, behind, block in _ahead(self._blocks(at)):
                order = np.arange(len(block))
                if self.shuffle and len(block):
                    order = permuted(order, len(block), self.seed, start.epoch, self.number, start.block)
                for taken, index in enumerate(order.tolist()[at.taken :], start=at.taken + 1):
                    is_empty = False
                    yield Drawn(block, index), replace(start, taken=taken) if taken < len(block) else behind
                at = behind
            if is_empty:
                raise ConfigError(
                    f"data.path: {', '.join(rows.name for rows in self.rows)}", "there is nothing in it to train on"
                )
            if not endless:
                return
            at = Position(at.epoch + 1)

    def _blocks(self, at: Position) -> Iterator[tuple[Position, Position, ExampleSequences]]:
        """(where it begins, what follows it, its sequences) of the blocks of an epoch, from that of `at` on."""
        order = np.arange(len(self.rows))
        if self.shuffle:
            order = permuted(order, len(order), self.seed, at.epoch, self.number)
        start = replace(at, taken=0)
        reader = None
        while start.shard < len(order):
            rows: list[tuple[int, int, Any]] = []
            shard, mark = start.shard, start.mark
            while shard < len(order) and len(rows) < self.block_rows:
                part = int(order[shard])
                reader = reader or self.rows[part].read(mark)
                read = list(itertools.islice(reader, self.block_rows - len(rows)))
                rows += [(part, number, row) for number, row, _ in read]
                mark = read[-1][2] if read else mark
                if len(rows) < self.block_rows:
                    shard, mark, reader = shard + 1, None, None
            behind = Position(at.epoch, shard, mark, start.block + 1)
            yield start, behind, self.sequences(self._encoded(rows))
            start = behind
        if self.bad and self.tell:
            print(f"data.path: {self.bad:,} bad rows were left out so far (data.on_bad=skip)", file=sys.stderr)

    def _encoded(self, rows: Sequence[tuple[int, int, Any]]) -> Prepared:
        encoded = iter(self.encoder.encode([row for _, _, row in rows if not isinstance(row, BadRow)]))
        examples = []
        refused: list[tuple[str, BadRow]] = []
        for part, number, row in rows:
            outcome = row if isinstance(row, BadRow) else next(encoded)
            if not isinstance(outcome, BadRow):
                examples.append((part, number, outcome))
                continue
            place = self.rows[part].place(number)
            if self.on_bad == "refuse":
                refused.append((place, outcome))
                continue
            self.bad += 1
            if self.tell and self.bad <= MOST_TOLD:
                print(f"{place} is left out (data.on_bad=skip): {outcome}", file=sys.stderr)
        raise_all(bad_row_errors(refused))
        return in_memory(self.rows, examples, self.encoder.pad)


def _ahead(blocks: Iterator[Any]) -> Iterator[Any]:
    """One block is read and tokenised while the one before it is trained on."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, blocks, None)
        while (block := waiting.result()) is not None:
            waiting = pool.submit(next, blocks, None)
            yield block


@dataclass
class Streams:
    """The sequences of one stream, or of several that each have their share of all of them.

    Args:
        open_streams: makes the streams, in the process that reads them; is given whether that one tells of bad rows.
        weights: of the streams; empty for one, which ends.
    """

    open_streams: Callable[[bool], list[RowStream]]
    weights: Sequence[float]

    def steps(
        self, state: Sequence[Any] | None, batch_size: int, tell: bool
    ) -> Iterator[tuple[list[Drawn], list[Any], list[Any]]]:
        """(sequences, state before, state behind) of each optimizer step from `state` on, in this epoch.

        The state is plain data: how many sequences were drawn, and the position of each stream. What is left over at
        the end of an epoch is dropped. With weights there is no end: each stream begins anew by itself.
        """
        streams = self.open_streams(tell)
        drawn, places = (0, [astuple(Position())] * len(streams)) if state is None else state
        positions = [Position(*place) for place in places]
        readers = [stream.read(at, endless=bool(self.weights)) for stream, at in zip(streams, positions, strict=True)]
        before = _plain(drawn, positions)
        while True:
            chosen: list[Drawn] = []
            sources, _ = shared_out(np.arange(drawn, drawn + batch_size), self.weights or [1.0])
            for source in sources.tolist():
                item = next(readers[source], None)
                if item is None:
                    return
                chosen.append(item[0])
                positions[source] = item[1]
            drawn += batch_size
            behind = _plain(drawn, positions)
            yield chosen, before, behind
            before = behind


def _plain(drawn: int, positions: Sequence[Position]) -> list[Any]:
    return [drawn, [list(astuple(position)) for position in positions]]


def next_epoch(state: Sequence[Any]) -> list[Any]:
    """The state at the start of the epoch that follows the one of `state`, of one stream."""
    drawn, ((epoch, *_),) = state
    return _plain(drawn, [Position(epoch + 1)])
