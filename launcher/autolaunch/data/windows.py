"""Sequences as windows over tokens that lie in memory or in memory-mapped files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from autolaunch.data.counts import no_validation, split_counts, token_file_length, window_count
from autolaunch_strategies.config import ConfigError


class Sequences(Protocol):
    """Numbered token sequences of one length."""

    def __len__(self) -> int: ...

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        """The sequences `indices` (int64 [b]) as int64 [b, seq_len + 1]: inputs, and labels one further."""
        ...


@runtime_checkable
class Batches(Protocol):
    """Numbered sequences that make their batches themselves."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences `indices` (int64 [b]) as a batch: tokens are int64 [b, seq_len], a label may be one per row."""
        ...


@runtime_checkable
class Unnumbered(Protocol):
    """Sequences that come one after the other, from a state on: `autolaunch.data.streams`."""

    def steps(
        self, state: Sequence[Any] | None, batch_size: int, tell: bool
    ) -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
        """(sequences, state before, state behind) of each optimizer step of an epoch."""
        ...


class TokenFile:
    """A .bin file of `dtype` (little-endian) or a .npy file; mapped into memory when it is first read."""

    def __init__(self, path: Path, dtype: str = "uint16") -> None:
        self.path, self.dtype = path, dtype
        self._length = token_file_length(path, dtype)
        self._mapped: np.ndarray | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> np.ndarray:
        if self._mapped is None:
            if self.path.suffix == ".npy":
                self._mapped = np.load(self.path, mmap_mode="r", allow_pickle=False)
            else:
                dtype = np.dtype(self.dtype).newbyteorder("<")
                self._mapped = np.memmap(self.path, dtype, mode="r", shape=(self._length,))
        return self._mapped[span]

    def __getstate__(self) -> dict[str, Any]:
        # numpy would pickle the whole file into every loader worker.
        return {**self.__dict__, "_mapped": None}


class Windows:
    """Consecutive windows over several token arrays or files, numbered through; none crosses from one to the next.

    Args:
        vocab_size: how many token ids the model knows; with it, tokens are looked at when they are read.
        key: that names the files, for what is then wrong.
    """

    def __init__(
        self,
        parts: Sequence[np.ndarray | TokenFile],
        seq_len: int,
        vocab_size: int | None = None,
        key: str = "data.path",
    ) -> None:
        self.parts, self.seq_len, self.vocab_size, self.key = parts, seq_len, vocab_size, key
        self._ends = np.cumsum([window_count(len(part), seq_len) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        rows = np.empty((len(indices), self.seq_len + 1), np.int64)
        parts = np.searchsorted(self._ends, indices, side="right")
        for row, index, part in zip(rows, indices, parts, strict=True):
            start = int(index - (self._ends[part - 1] if part else 0)) * self.seq_len
            row[:] = self.parts[part][start : start + self.seq_len + 1]
            if self.vocab_size is not None and (row.min() < 0 or row.max() >= self.vocab_size):
                raise self._unknown(row, part, start)
        return rows

    def _unknown(self, row: np.ndarray, part: int, start: int) -> ConfigError:
        assert self.vocab_size is not None
        place = int(np.argmax((row < 0) | (row >= self.vocab_size)))
        return unknown_token(self.parts[part], int(row[place]), start + place, self.vocab_size, self.key)


def unknown_token(part: np.ndarray | TokenFile, token: int, place: int, vocab_size: int, key: str) -> ConfigError:
    """The error for a token that a model does not know.

    Args:
        part: in which it is.
        place: how many tokens stand before it.
        key: that names the file.
    """
    return ConfigError(
        f"{key}={part.path}" if isinstance(part, TokenFile) else key,
        f"it holds the token {token} at position {place}, but the model knows only {vocab_size}",
        "the dtype and the vocabulary that the file was written with",
    )


@dataclass
class Span:
    """The sequences `first` to ``first + count - 1`` of others, numbered from zero."""

    sequences: Sequences
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def tokens(self, indices: np.ndarray) -> np.ndarray:
        return self.sequences.tokens(np.asarray(indices) + self.first)


class Parts(NamedTuple):
    """What a data group has for which task."""

    training: Sequences | Batches | Unnumbered
    validation: Sequences | Batches | None
    test: Sequences | Batches | None = None
    notes: Sequence[str] = ()
    """What the person should know of them, a line each."""
    weights: Sequence[tuple[int, float]] = ()
    """(sequences, weight) of each source that the training sequences come from; empty: they are visited once each."""


def split(sequences: Sequences, config: Mapping[str, Any], test: Sequences | None = None) -> Parts:
    """The first part for training, and the last `data.validation_fraction` of `sequences` for validation."""
    fraction = config["validation_fraction"]
    training, validation = split_counts(len(sequences), fraction, config["batch_size"])
    notes = no_validation(len(sequences), fraction, validation)
    return Parts(Span(sequences, 0, training), Span(sequences, training, validation), test, notes)
