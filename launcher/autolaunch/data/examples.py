"""Numbered sequences made of tokenised examples: cut or left out where too long, then padded, or packed together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from autolaunch.data.prepared import Prepared
from autolaunch_strategies.config import ConfigError

IGNORED = -100
PACKING_WINDOW = 1024
"""Consecutive examples among which places are sought in packing."""


@dataclass
class Spans:
    """Parts of examples: the tokens from `first` to `end`, which belong to the example `example` (int64 [n] each)."""

    first: np.ndarray
    end: np.ndarray
    example: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, which: Any) -> Spans:
        return Spans(self.first[which], self.end[which], self.example[which])

    @classmethod
    def joined(cls, parts: Sequence[Spans]) -> Spans:
        """All of them, one behind the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("first", "end", "example")))

    @property
    def lengths(self) -> np.ndarray:
        return self.end - self.first


@dataclass
class Counts:
    """What became of the rows."""

    examples: int
    bad: int
    truncated: int = 0
    skipped: int = 0
    """Too long, and left out."""
    untrained: int = 0
    """Left out because nothing that is trained on was left of them."""
    split: int = 0

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """Of all parts together."""
        return cls(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))


class ExampleSequences:
    """Sequences of `seq_len` tokens, numbered; a batch of them is made when it is asked for.

    Args:
        spans: what they consist of, in one part or several, which are numbered through.
        packs: of each part int64 [sequences + 1], where the spans of each sequence begin; empty for one span each.
    """

    def __init__(self, prepared: Prepared, spans: Sequence[Spans], packs: Sequence[np.ndarray], seq_len: int) -> None:
        self.prepared, self.spans, self.seq_len = prepared, Spans.joined(spans), seq_len
        firsts = np.cumsum([0, *map(len, spans)])
        begins = [begin[:-1] + first for begin, first in zip(packs, firsts, strict=False)]
        self.packs = np.concatenate([*begins, firsts[-1:]]) if packs else None
        self.sizes = [len(begin) - 1 for begin in packs] if packs else [len(part) for part in spans]
        """Sequences of each part."""

    def __len__(self) -> int:
        return len(self.spans) if self.packs is None else len(self.packs) - 1

    def spans_of(self, index: int) -> range:
        """The numbers of the spans that a sequence consists of."""
        return range(index, index + 1) if self.packs is None else range(self.packs[index], self.packs[index + 1])

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences `indices` (int64 [b]) as a batch, int64 [b, seq_len] each.

        `labels` are those of transformers: label t is the token at position t, or -100 where it is not trained on.
        Padded on the right, with `attention_mask`; packed sequences have `position_ids` instead, which begin at 0 with
        each document, and with the padding.
        """
        shape = (len(indices), self.seq_len)
        tokens, labels = np.full(shape, self.prepared.pad, np.int64), np.full(shape, IGNORED, np.int64)
        mask, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for number in self.spans_of(int(index)):
                first, end = int(self.spans.first[number]), int(self.spans.end[number])
                there = slice(at, at + end - first)
                ids = self.prepared.tokens[first:end].astype(np.int64)
                tokens[row, there] = ids
                labels[row, there] = np.where(self.prepared.trained[first:end] != 0, ids, IGNORED)
                labels[row, at] = IGNORED  # nothing in this document is there to predict it from
                mask[row, there] = 1
                positions[row, there] = np.arange(end - first)
                at += end - first
            positions[row, at:] = np.arange(self.seq_len - at)
        if self.packs is not None:
            return {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def fitted(prepared: Prepared, seq_len: int, too_long: str) -> tuple[Spans, Counts]:
    """The examples as spans of at most `seq_len` tokens, and what that took.

    Args:
        too_long: `truncate` the end, `skip` the example, `split` it into several (which share one token, so that every
            token is predicted once), or `refuse`.

    Raises:
        ConfigError: an example is too long and `refuse` was asked for.
    """
    ends = prepared.ends
    spans = Spans(np.concatenate([[0], ends])[:-1].astype(np.int64), ends.copy(), np.arange(len(ends), dtype=np.int64))
    counts = Counts(len(ends), prepared.bad)
    long = spans.lengths > seq_len
    if long.any():
        if too_long == "refuse":
            first, longest = int(np.flatnonzero(long)[0]), int(spans.lengths.max())
            raise ConfigError(
                prepared.place(first),
                f"{spans.lengths[first]} tokens, more than data.seq_len={seq_len}; "
                f"so have {int(long.sum())} of {len(ends)} examples",
                f"a data.seq_len of {longest} for all of them, or another data.too_long",
                f"data.seq_len={longest}, or data.too_long=truncate",
            )
        if too_long == "truncate":
            counts.truncated = int(long.sum())
            spans.end[long] = spans.first[long] + seq_len
        elif too_long == "skip":
            counts.skipped = int(long.sum())
            spans = spans[~long]
        else:
            counts.split = int(long.sum())
            spans = _split(spans, seq_len)
    # A single token predicts nothing; of a conversation that was cut, the answer may be gone.
    kept = spans.lengths > 1
    for number in np.flatnonzero(long[spans.example] & kept) if too_long == "truncate" else ():
        kept[number] = bool(prepared.trained[int(spans.first[number]) + 1 : int(spans.end[number])].any())
    counts.untrained = int((~kept).sum())
    spans = spans[kept]
    return spans, counts


def nothing_left(prepared: Prepared, seq_len: int, where: str) -> ConfigError:
    """The error for examples of which `fitted` leaves none; `where` is how messages call the data."""
    longest = int(np.diff(prepared.ends, prepend=0).max())
    return ConfigError(
        where,
        f"of {len(prepared.ends)} examples none is left with something to train on in {seq_len} tokens",
        "a larger data.seq_len, or another data.too_long",
        f"data.seq_len={longest}",
    )


def _split(spans: Spans, seq_len: int) -> Spans:
    step = max(seq_len - 1, 1)
    parts = np.maximum(-(-(spans.lengths - 1) // step), 1)
    whose = np.repeat(np.arange(len(spans)), parts)
    number = np.arange(len(whose)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = spans.first[whose] + number * step
    return Spans(first, np.minimum(first + seq_len, spans.end[whose]), spans.example[whose])


def packed(spans: Spans, seq_len: int, window: int = PACKING_WINDOW) -> tuple[Spans, np.ndarray]:
    """Spans put together into sequences of at most `seq_len` tokens: first-fit among `window` consecutive ones.

    Returns:
        the spans in the order of the sequences, and where those of each sequence begin (int64 [sequences + 1]).
    """
    order: list[np.ndarray] = [np.zeros(0, np.int64)]
    sizes: list[np.ndarray] = [np.zeros(0, np.int64)]
    lengths = spans.lengths
    for start in range(0, len(spans), window):
        part = lengths[start : start + window]
        free = np.full(len(part), seq_len, np.int64)
        where = np.empty(len(part), np.int64)
        used = 0
        for number, length in enumerate(part):
            place = int(np.argmax(free[: used + 1] >= length))  # the one behind the last that is used always fits
            free[place] -= length
            where[number] = place
            used = max(used, place + 1)
        order.append(start + np.argsort(where, kind="stable"))
        sizes.append(np.bincount(where))
    counts = np.concatenate(sizes)
    return spans[np.concatenate(order)], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
