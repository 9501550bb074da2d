"""Loaders of users that are resumed: in the middle of an epoch and at its end, in one process and on several ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from autolaunch_strategies import MeshStrategy
from tests.support.cases import RANK, WORLD, serve

SAMPLES = 22


class Numbered(Dataset[torch.Tensor]):
    """Sample i is [i, 1, 1, 1]; `loaded` has every index that was asked for."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(int(index))
        return torch.tensor([float(index), 1.0, 1.0, 1.0])


class Augmented(Numbered):
    """Each sample has numbers of torch's, python's and numpy's global generators and of one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [float(torch.rand(())), random.random(), float(np.random.rand() + self.rng.random())]
        return torch.tensor([float(index), *noise])


class Shuffled(Sampler[int]):
    """What people write: a list that is shuffled in its place, and a generator of its own."""

    def __init__(self) -> None:
        self.indices = list(range(SAMPLES))
        self.rng = random.Random(5)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.indices)
        yield from self.indices


class ByEpoch(Sampler[int]):
    """Is told its epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(self.epoch).permutation(SAMPLES).tolist()


class Buckets:
    """A batch sampler that is no torch class; it counts its passes and gives batches of two sizes."""

    def __init__(self) -> None:
        self.passes = 0
        self.sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        indices = iter(self.sampler)
        for number in range(6):
            yield [next(indices) for _ in range(4 if (number + self.passes) % 2 else 2)]


class Counted(Sampler[int]):
    """Says its state itself, and keeps what matters where nobody else finds it."""

    def __init__(self) -> None:
        self._hidden = {"passes": object()}
        self._passes = iter(range(1000))
        self._number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._number = state["number"]
        self._passes = iter(range(state["number"], 1000))

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self._number = next(self._passes) + 1
        yield from np.random.default_rng(self._number).permutation(SAMPLES).tolist()


class Fickle(Sampler[int]):
    """Draws from what nothing can put back."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        source = random.SystemRandom()
        return iter([source.randrange(SAMPLES) for _ in range(SAMPLES)])


class Stream(IterableDataset[torch.Tensor]):
    """Has no state and no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(SAMPLES).tolist()
        for index in order:
            yield torch.tensor([float(index), float(torch.rand(())), 1.0, 1.0])


class StatefulStream(IterableDataset[torch.Tensor]):
    """Goes on where its state says; every pass is another order."""

    def __init__(self) -> None:
        self.passes, self.at, self._resumed = 0, 0, False

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at, self._resumed = state["passes"], state["at"], True

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._resumed:
            self.passes, self.at = self.passes + 1, 0
        self._resumed = False
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        order = np.random.default_rng(self.passes).permutation(SAMPLES).tolist()
        while self.at < SAMPLES:
            self.at += 1
            yield torch.tensor([float(order[self.at - 1]), 1.0, 1.0, 1.0])


class StatefulLoader(DataLoader):
    """The protocol of torchdata's StatefulDataLoader: the state is of the pass that is under way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes, self.at, self._to_load = 0, 0, {}

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._to_load = dict(state)

    def __iter__(self) -> Iterator[Any]:
        state, self._to_load = self._to_load, {}
        self.passes, self.at = state.get("passes", self.passes + 1), state.get("at", 0)
        order = np.random.default_rng(self.passes).permutation(SAMPLES).tolist()
        return self._rest(order)

    def _rest(self, order: list[int]) -> Iterator[Any]:
        while self.at < len(self):
            self.at += 1
            size = self.batch_size or 0
            rows = order[(self.at - 1) * size : self.at * size]
            yield torch.stack([self.dataset[index] for index in rows])


class Opaque:
    """Neither a length nor a state."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(DataLoader(Numbered(), batch_size=4, shuffle=True))


LOADERS: dict[str, Callable[[], Any]] = {
    "in-order": lambda: DataLoader(Numbered(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbered(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(
        Numbered(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9), drop_last=True
    ),
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "replacement": lambda: DataLoader(
        Numbered(), batch_size=4, sampler=RandomSampler(range(SAMPLES), replacement=True, num_samples=20)
    ),
    "subset": lambda: DataLoader(Numbered(), batch_size=4, sampler=SubsetRandomSampler(range(3, SAMPLES))),
    "weighted": lambda: DataLoader(
        Numbered(), batch_size=4, sampler=WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], 20)
    ),
    "own-sampler": lambda: DataLoader(Numbered(), batch_size=4, sampler=Shuffled()),
    "by-epoch": lambda: DataLoader(Numbered(), batch_size=4, sampler=ByEpoch()),
    "own-batches": lambda: DataLoader(Numbered(), batch_sampler=Buckets()),
    "batch-sampler": lambda: DataLoader(Numbered(), batch_sampler=BatchSampler(Shuffled(), 4, False)),
    "stateful-sampler": lambda: DataLoader(Numbered(), batch_size=4, sampler=Counted()),
    "no-batch-size": lambda: DataLoader(Numbered(), batch_size=None, sampler=RandomSampler(range(6)), collate_fn=_rows),
    "stateful-loader": lambda: StatefulLoader(Numbered(), batch_size=4),
    "stateful-stream": lambda: DataLoader(StatefulStream(), batch_size=4),
    "two": lambda: {
        "one": DataLoader(Numbered(), batch_size=4, shuffle=True),
        "other": DataLoader(Numbered(), batch_size=8, sampler=Shuffled()),
    },
    "workers": lambda: DataLoader(Numbered(), batch_size=4, shuffle=True, num_workers=2),
    "persistent-workers": lambda: DataLoader(
        Numbered(), batch_size=4, sampler=Shuffled(), num_workers=1, persistent_workers=True
    ),
}
"""What goes on exactly."""

WITHOUT_STATE: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream-workers": lambda: DataLoader(StatefulStream(), batch_size=4, num_workers=1),
    "opaque": Opaque,
}
"""What is refused in the middle of an epoch."""


def _rows(rows: Any) -> torch.Tensor:
    return rows.reshape(1, 4).expand(4, -1).contiguous()


class Sees(pl.LightningModule):
    """`seen` has of every batch: the epoch, the samples of this rank, and a number that was drawn in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batches = list(batch.values()) if isinstance(batch, dict) else [batch]
        drawn = float(torch.rand(()))
        self.seen.append([self.current_epoch, batch_idx, [part.tolist() for part in batches], drawn])
        return sum((self.layer(part / SAMPLES) ** 2).mean() for part in batches)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class EarlyLook(Sees):
    """Asks for the number of steps, for which lightning makes the loaders before it reads the checkpoint."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class SavesAt(pl.Callback):
    """Writes a checkpoint after so many batches of the run."""

    def __init__(self, batches: int, path: Path) -> None:
        self.left, self.path = batches, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)


def fit(
    data: Any, *callbacks: pl.Callback, strategy: Any = None, module: Any = Sees, path: Any = None, val: Any = None,
    seed: int = 1, position: str = "required", **options: Any,
) -> list[Any]:  # fmt: skip
    """Train; what was seen."""
    pl.seed_everything(seed, verbose=False)
    model = module()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        strategy=strategy or MeshStrategy("1", data_position=position),
        callbacks=list(callbacks),
        accelerator="cpu",
        num_sanity_val_steps=0,
        **{**dict.fromkeys(quiet, False), "max_epochs": 3, **options},
    )
    trainer.fit(model, data(), val, ckpt_path=path)
    return list(model.seen)


def _saved(name: str, ranks: int) -> Path:
    return Path(os.environ["CHECKPOINTS"]) / f"{name}-{ranks}"


POINTS = (4, 6, 8)
"""Batches after which a run saves: in the first epoch, at its end, in the second one."""


def saves(name: str, strategy: Any, **options: Any) -> list[Any]:
    """What a whole run has seen on this rank."""
    return fit(
        LOADERS[name],
        *(SavesAt(point, _saved(name, WORLD) / str(point)) for point in POINTS),
        strategy=strategy,
        **options,
    )


def resumes(name: str, ranks: int, strategy: Any, **options: Any) -> dict[str, list[Any]]:
    """What runs have seen on this rank that go on from the checkpoints of a run on `ranks` ranks."""
    return {
        str(point): fit(
            LOADERS[name], strategy=strategy(), path=_saved(name, ranks) / str(point), seed=70 + point, **options
        )
        for point in POINTS
    }


ON_RANKS = (
    "shuffled", "generator-even", "own-sampler", "own-batches", "stateful-loader", "stateful-stream", "workers",
    "by-rank",
)  # fmt: skip
LOADERS["generator-even"] = lambda: DataLoader(
    Numbered(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9)
)
LOADERS["by-rank"] = lambda: DataLoader(
    Numbered(), batch_size=4 // WORLD, sampler=DistributedSampler(Numbered(), WORLD, RANK, shuffle=True)
)
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {"saves": {}, "resumes": {}}


def _add(name: str, case: str, **mesh: Any) -> None:
    options = {"accumulate_grad_batches": 2}

    def strategy() -> MeshStrategy:
        return MeshStrategy(**({"mesh": str(WORLD), **mesh} if WORLD > 1 else {"mesh": "1"}), timeout=60)

    GROUPS["saves"][case] = lambda: saves(name, strategy(), **options)
    for ranks in (1, 2):
        GROUPS["resumes"][f"{case}-from-{ranks}"] = partial(resumes, name, ranks, strategy, **options)


for _name in ON_RANKS:
    _add(_name, _name)


if __name__ == "__main__":
    serve(GROUPS)
