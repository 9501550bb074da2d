"""Which sequences make up which batch: a function of the seed and the step alone, computed where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_ROUNDS = 8


def mix64(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 numbers one to one: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=64)
def random_keys(*entropy: int, count: int) -> np.ndarray:
    """`count` uint64 numbers that depend on every number in `entropy` (all >= 0), the same on every machine."""
    keys = np.random.SeedSequence(entropy).generate_state(count, np.uint64)
    keys.flags.writeable = False
    return keys


def permuted(index: np.ndarray | int, n: int, *entropy: int) -> np.ndarray:
    """Where a random permutation of ``range(n)`` sends each `index`, without ever holding n numbers.

    A Feistel network over the smallest power of two that holds n, repeated for results outside the range (cycle
    walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): on average fewer than two passes.

    Args:
        index: numbers in ``range(n)``, any shape.
        entropy: what the permutation depends on: the seed, the epoch (all >= 0).

    Returns:
        int64, the shape of `index`.
    """
    values = np.atleast_1d(np.asarray(index)).astype(np.uint64)
    assert n >= 1 and (values.size == 0 or int(values.max()) < n), "index outside of range(n)"
    bits = (n - 1).bit_length()
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    keys = random_keys(*entropy, count=_ROUNDS)

    def shuffled(values: np.ndarray) -> np.ndarray:
        low, high = values & low_mask, values >> low_bits
        for number, key in enumerate(keys):
            if number % 2:
                high = high ^ (mix64(low + key) & high_mask)
            else:
                low = low ^ (mix64(high + key) & low_mask)
        return (high << low_bits) | low

    values = shuffled(values)
    while (outside := values >= n).any():
        values[outside] = shuffled(values[outside])
    return values.astype(np.int64).reshape(np.shape(index))


def shared_out(positions: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Which source each position of an endless stream is drawn from, and how many before it are of the same one.

    In every n consecutive positions a source has its share of n, give or take one for each source before it and itself.

    Args:
        positions: int64, any shape.
        weights: of the sources, above 0; what counts is their share in the sum.

    Returns:
        (source, number within the source), int64, the shape of `positions`.
    """
    source, number = np.full(positions.shape, len(weights) - 1), positions.copy()
    is_open = np.ones(positions.shape, bool)
    for which, weight in enumerate(weights[:-1]):
        share = weight / sum(weights[which:])
        before = np.floor(number * share).astype(np.int64)
        taken = is_open & (np.floor((number + 1) * share).astype(np.int64) > before)
        source[taken] = which
        # Those that are not of this source count on among the rest.
        number = np.where(is_open, np.where(taken, before, number - before), number)
        is_open &= ~taken
    return source, number


@dataclass(frozen=True)
class BatchOrder:
    """The sequence indices of every microbatch of a run, for one data parallel rank.

    Microbatches are numbered over the whole run: number i is part ``i % microbatches`` of optimizer step
    ``i // microbatches``. An epoch is as many whole steps as the data has; what is left over is dropped
    (with `shuffle`, other sequences in every epoch). The batch of a step, and each of its microbatches, is the same set
    for every `dp_size`.

    With `weights` the sequences are those of several sources, one behind the other. Each has its share of every batch,
    is visited as a whole, and then anew: one may be at its third time while another is at its first. An epoch is then
    only a number of steps.
    """

    num_sequences: int
    batch_size: int
    """Sequences per optimizer step, over all ranks."""
    microbatches: int = 1
    seed: int = 0
    shuffle: bool = True
    dp_rank: int = 0
    dp_size: int = 1
    weights: tuple[tuple[int, float], ...] = ()
    """(sequences, weight) of each source; empty for one source."""

    def __post_init__(self) -> None:
        assert self.batch_size % (self.dp_size * self.microbatches) == 0, "batch_size % (dp_size * microbatches) != 0"
        assert 0 <= self.dp_rank < self.dp_size
        assert self.num_sequences >= self.batch_size, "fewer sequences than one batch"

    @property
    def per_rank(self) -> int:
        """Sequences of one microbatch on this rank."""
        return self.batch_size // (self.dp_size * self.microbatches)

    def __len__(self) -> int:
        """Microbatches per epoch."""
        return self.num_sequences // self.batch_size * self.microbatches

    def indices(self, microbatch: int) -> np.ndarray:
        """Sequence indices of microbatch number `microbatch` (>= 0, over the whole run): int64 [per_rank]."""
        if self.weights:
            return self._weighted(microbatch)
        epoch, within = divmod(microbatch, len(self))
        first = (within * self.dp_size + self.dp_rank) * self.per_rank
        positions = np.arange(first, first + self.per_rank, dtype=np.int64)
        return permuted(positions, self.num_sequences, self.seed, epoch) if self.shuffle else positions

    def _weighted(self, microbatch: int) -> np.ndarray:
        first = (microbatch * self.dp_size + self.dp_rank) * self.per_rank
        positions = np.arange(first, first + self.per_rank, dtype=np.int64)
        sources, numbers = shared_out(positions, [weight for _, weight in self.weights])
        epochs, within = np.divmod(numbers, np.asarray([count for count, _ in self.weights])[sources])
        if self.shuffle:
            for which, epoch in {*zip(sources.tolist(), epochs.tolist(), strict=True)}:
                these = (sources == which) & (epochs == epoch)
                within[these] = permuted(within[these], self.weights[which][0], self.seed, epoch, which)
        return within + np.cumsum([0, *(count for count, _ in self.weights)])[sources]
