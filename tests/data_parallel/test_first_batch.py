"""A batch is read ahead of the training, which then goes as if nobody had read it."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autolaunch_strategies.data_parallel.first_batch import FirstBatches, first_batch


class Augmented(Dataset):
    """Draws from every generator there is, its own included, and counts."""

    def __init__(self) -> None:
        self.own, self.numpy, self.torch = random.Random(3), np.random.default_rng(3), torch.Generator().manual_seed(3)
        self.count, self.seen = 0, list[int]()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        self.seen.append(index)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(())), self.own.random()]
        drawn += [float(self.numpy.random()), float(torch.rand((), generator=self.torch))]
        return torch.tensor([index, self.count, *drawn], dtype=torch.float64)


class Wrapped(Augmented):
    """Data around data."""

    def __init__(self) -> None:
        self.inner = [Augmented()]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.inner[0][index]


class Stream(IterableDataset):
    """Begins anew for every pass."""

    def __iter__(self) -> Iterator[float]:
        for index in range(10):
            yield index + random.random()


class OneWay(IterableDataset):
    """One iterator for all passes."""

    def __init__(self, count: int = 10) -> None:
        self.left = iter(range(count))

    def __iter__(self) -> Iterator[int]:
        return self.left


class OfFile(IterableDataset):
    """Every pass is a new iterator, but all of them read on in one file."""

    def __init__(self) -> None:
        self.file = io.StringIO("\n".join(map(str, range(10))))

    def __iter__(self) -> Iterator[int]:
        for line in self.file:
            yield int(line)


class OwnLoader:
    """No DataLoader; counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        for _ in range(3):
            yield self.passes + torch.rand(2)


def passes(loader: Any, count: int = 2) -> list[Any]:
    return [np.asarray(batch).tolist() for _ in range(count) for batch in loader] + [random.random()]


LOADERS: dict[str, Callable[[], Any]] = {
    "in-order": lambda: DataLoader(Augmented(), 4),
    "shuffled": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "own-generator": lambda: DataLoader(Augmented(), 4, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "wrapped": lambda: DataLoader(Wrapped(), 4, shuffle=True),
    "samples": lambda: DataLoader(Augmented(), None),
    "stream": lambda: DataLoader(Stream(), 4),
    "one-way": lambda: DataLoader(OneWay(), 4),
    "one-way-samples": lambda: DataLoader(OneWay(), None),
    "of-file": lambda: DataLoader(OfFile(), 4),
    "generator": lambda: (torch.rand(2) for _ in range(3)),
    "own-loader": OwnLoader,
    "list": lambda: [torch.ones(2), torch.zeros(2)],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_training_sees_what_it_would_see(kind: str) -> None:
    seen = []
    for reads in (0, 2):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        loader, batches = LOADERS[kind](), FirstBatches()
        looked_at = [batches.read(loader) for _ in range(reads)]
        loader = batches.give_back(loader)
        seen.append(passes(loader))
        for batch in looked_at:
            assert np.asarray(batch).shape == np.asarray(seen[0][0]).shape
    assert seen[0] == seen[1]


def test_another_loader_of_the_same_stream_gets_the_samples_back() -> None:
    """As of a hook that makes a loader each time it is asked."""
    data, batches = OneWay(), FirstBatches()
    assert batches.read(DataLoader(data, 4)).tolist() == [0, 1, 2, 3]
    loader = batches.give_back(DataLoader(data, 5))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_stream_that_is_shorter_than_a_batch() -> None:
    batches, loader = FirstBatches(), DataLoader(OneWay(2), 4)
    assert batches.read(loader).tolist() == [0, 1]
    assert [batch.tolist() for batch in batches.give_back(loader)] == [[0, 1]]
    assert FirstBatches().read(DataLoader(OneWay(0), 4)) is None


def test_what_can_not_be_given_back_is_not_read() -> None:
    once = DataLoader(OfFile(), 4)
    assert first_batch(once) is None
    assert next(iter(once)).tolist() == [0, 1, 2, 3]
