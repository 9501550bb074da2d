"""From sequences to batches of tensors, in an order that can be left and resumed at any microbatch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from autolaunch.data.order import BatchOrder, random_keys
from autolaunch.data.streams import Drawn, next_epoch
from autolaunch.data.windows import Batches, Sequences, Unnumbered
from autolaunch_strategies.config import ConfigError, ConfigErrors

Batch = dict[str, torch.Tensor]
"""input_ids and labels, int64 [b, s]; label t is the token after input t, or (`data.labels=same`) the token at t."""


class TokenDataset(Dataset[Batch]):
    """Sequences as tensors; a list of indices gives one stacked batch.

    Args:
        hands_over_errors: give, from a process that loads, a `ConfigError` in place of a batch: torch would put that
            process's traceback into its message.
    """

    def __init__(self, sequences: Sequences | Batches, hands_over_errors: bool = False) -> None:
        self.sequences, self.hands_over_errors = sequences, hands_over_errors

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Batch:
        return {name: rows[0] for name, rows in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> Batch:
        """The sequences `indices` as one batch: torch's loader hands over all indices of a batch at once."""
        try:
            return self._batch(indices)
        except ConfigError as error:
            if not self.hands_over_errors or get_worker_info() is None:
                raise
            handed_over: Any = error
            return handed_over

    def _batch(self, indices: list[int]) -> Batch:
        numbers = np.asarray(indices, np.int64)
        if isinstance(self.sequences, Batches):
            return {name: torch.from_numpy(rows) for name, rows in self.sequences.batch(numbers).items()}
        tokens = torch.from_numpy(self.sequences.tokens(numbers))
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class PositionedLoader(DataLoader[Batch]):
    """A loader that goes through a `BatchOrder` from any position; its state is one number.

    One pass gives ``len(loader)`` microbatches (an epoch) from the position on; the next pass goes on where the last
    one was left. The position counts what was handed out, not what workers have prepared ahead, and does not
    depend on the number of workers or of data parallel ranks.

    Args:
        repeat: hand out the first so many microbatches of the order over and over (None: the whole order).
        pin_memory: put batches into page-locked memory (for CUDA).
    """

    shares_itself = True
    """Its batches are this rank's already: `MeshStrategy` leaves it alone."""

    def __init__(
        self,
        sequences: Sequences | Batches,
        order: BatchOrder,
        num_workers: int = 0,
        repeat: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        # It holds the position, not the loader: in a cycle of references workers would be collected in an order in
        # which they end only after a timeout.
        self._microbatches = _FromPosition(order, repeat)
        self._resumed: dict[str, int] = {}
        super().__init__(
            TokenDataset(sequences, hands_over_errors=True),
            batch_sampler=self._microbatches,
            **_worker_options(num_workers, order.seed, order.dp_rank, pin_memory),
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch's is a class, of which only the iterator is used
        # A generator starts at its first next(): a position that is loaded after iter() still counts.
        for batch in super().__iter__():
            if isinstance(batch, ConfigError):
                raise batch
            self._microbatches.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """``{"microbatches": how many were handed out since the start of the run, "batch_size": sequences of a step,
        "epoch": microbatches of an epoch}``."""
        order = self._microbatches.order
        return {"microbatches": self._microbatches.position, "batch_size": order.batch_size, "epoch": len(order)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after ``state["microbatches"]`` microbatches, from the next pass on.

        With another batch size, on behind the same sequences: behind more, as few as make whole steps of this size. Of
        other sequences, on behind the same share of an epoch.
        """
        self._resumed = state
        order, position = self._microbatches.order, state["microbatches"]
        if order.weights:  # sequences of several sources are numbered over the whole run, those of one over an epoch
            self._microbatches.position = self._converted(position)
        else:
            epochs, rest = divmod(position, state.get("epoch", len(order)))
            self._microbatches.position = epochs * len(order) + self.place_in_epoch(rest)

    def place_in_epoch(self, batches: int) -> int:
        """Where in an epoch this run goes on of which the run before had trained on so many microbatches.

        What was begun has a step left, so that it ends as others do: at worst with sequences that were seen.
        """
        order, converted = self._microbatches.order, self._converted(batches)
        return converted if converted == batches else min(converted, len(order) - order.microbatches)

    def _converted(self, before: int) -> int:
        """Microbatches of this run, in whole steps, that go as far as so many of the run before."""
        order = self._microbatches.order
        size, epoch = self._resumed.get("batch_size", order.batch_size), self._resumed.get("epoch", len(order))
        if (size, epoch) == (order.batch_size, len(order)):
            return before
        has_same_sequences = order.num_sequences // size * order.microbatches == epoch
        now, then = (size, order.batch_size) if has_same_sequences else (len(order), epoch)
        return -(-before * now // (then * order.microbatches)) * order.microbatches


class StreamLoader(DataLoader[Any]):
    """A loader of one rank's part of streams, from any position; one pass is an epoch, or what is left of it.

    Every rank reads the whole stream and makes its own part of each batch of it. The state comes with each batch, so
    that what a worker has read ahead does not count.

    Args:
        order: how many sequences a batch has, and which of them are this rank's; numbers of sequences mean nothing.
        tell: whether this rank tells of rows that are left out.
        pin_memory: put batches into page-locked memory (for CUDA).
    """

    shares_itself = True
    """As of `PositionedLoader`."""

    def __init__(
        self, streams: Unnumbered, order: BatchOrder, num_workers: int = 0, pin_memory: bool = False, tell: bool = False
    ) -> None:
        assert num_workers <= 1, "several workers would each read the whole stream"
        options = _worker_options(num_workers, order.seed, order.dp_rank, pin_memory)
        # A worker begins a pass with the state that the dataset has then.
        super().__init__(
            _StreamedBatches(streams, order, tell), batch_size=None, **{**options, "persistent_workers": False}
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch's is a class, of which only the iterator is used
        # A generator starts at its first next(): a position that is loaded after iter() still counts.
        for state, batch in super().__iter__():
            if isinstance(state, ConfigError | ConfigErrors):
                raise state
            self.load_state_dict(state)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """``{"streams": see `Streams.steps`, "microbatch": how many of the step that begins there are done}``."""
        assert isinstance(self.dataset, _StreamedBatches)
        return self.dataset.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind what `state` says, from the next pass on."""
        assert isinstance(self.dataset, _StreamedBatches)
        self.dataset.state = state


class _StreamedBatches(IterableDataset[Any]):
    """(state behind it, batch) of each microbatch of an epoch."""

    def __init__(self, streams: Unnumbered, order: BatchOrder, tell: bool) -> None:
        self.streams, self.order, self.tell = streams, order, tell
        self.state: dict[str, Any] = {"streams": None, "microbatch": 0}

    def __iter__(self) -> Iterator[tuple[dict[str, Any] | ConfigError | ConfigErrors, Batch]]:
        try:
            yield from self._batches()
        except (ConfigError, ConfigErrors) as error:  # torch would put the traceback of a worker into its message
            yield error, {}

    def _batches(self) -> Iterator[tuple[dict[str, Any], Batch]]:
        order, done = self.order, self.state["microbatch"]
        steps = self.streams.steps(self.state["streams"], order.batch_size, self.tell)
        step = next(steps, None)
        if step is None:
            raise ConfigError(
                "data.path",
                f"fewer than {order.batch_size} sequences, one batch",
                "more data, or a smaller batch",
            )
        while step is not None:
            following = next(steps, None)  # whether the epoch ends with this step
            sequences, before, behind = step
            behind = behind if following is not None else next_epoch(behind)
            for number in range(done, order.microbatches):
                is_last = number + 1 == order.microbatches
                state = {"streams": behind if is_last else before, "microbatch": 0 if is_last else number + 1}
                first = (number * order.dp_size + order.dp_rank) * order.per_rank
                yield state, _stacked(sequences[first : first + order.per_rank])
            step, done = following, 0


def _stacked(sequences: Sequence[Drawn]) -> Batch:
    parts = [
        block.batch(np.asarray([drawn.index for drawn in several]))
        for block, several in itertools.groupby(sequences, key=lambda drawn: drawn.block)
    ]
    return {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}


class _FromPosition(Sampler[list[int]]):
    """The indices of one pass through an order, from `position` on, as the microbatches that they form."""

    def __init__(self, order: BatchOrder, repeat: int | None) -> None:
        self.order, self.repeat = order, repeat
        self.position = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.position, self.position + len(self)):
            yield self.order.indices(number % self.repeat if self.repeat else number).tolist()


def evaluation_loader(
    sequences: Sequences | Batches,
    batch_size: int,
    seed: int = 0,
    dp_rank: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """A loader that gives one pass through all sequences, in order: batches of all ranks, the last may be smaller."""
    dataset = TokenDataset(sequences)
    return DataLoader(dataset, batch_size=batch_size, **_worker_options(num_workers, seed, dp_rank, pin_memory))


def _worker_options(num_workers: int, seed: int, dp_rank: int, pin_memory: bool) -> dict[str, Any]:
    # Without a generator of its own a loader draws from torch's global one whenever a pass begins,
    # and random numbers of the model would depend on how often a run was resumed.
    generator = torch.Generator()
    generator.manual_seed(int(random_keys(seed, dp_rank, count=1)[0] >> np.uint64(1)))
    return {
        "collate_fn": _as_it_is,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "worker_init_fn": partial(_seed_worker, seed, dp_rank),
        "generator": generator,
        "pin_memory": pin_memory,
    }


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _seed_worker(seed: int, dp_rank: int, worker: int) -> None:
    """Seed a worker's random generators: equal on all ranks of a replica, different between replicas and workers."""
    key = int(random_keys(seed, dp_rank, worker, count=1)[0])
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key >> 1)
