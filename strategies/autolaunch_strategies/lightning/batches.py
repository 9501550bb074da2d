"""Which part of the batches of a DataLoader a rank works on: together, ranks see what one process would.

Lightning would put a `DistributedSampler` into the loader, which always shuffles training data, deals single samples
out to ranks in turn, and repeats some where they do not divide: other batches than one process trains on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchmetrics import Metric

from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.data_parallel.loader import (
    DistributedLoader,
    IndexShare,
    Share,
    check_loader,
    generators_of,
    global_batch_size,
    samplers_of,
)
from autolaunch_strategies.data_parallel.order import Order
from autolaunch_strategies.lightning.metrics import uncounted
from autolaunch_strategies.lightning.replacement import replaced

log = logging.getLogger(__name__)

BATCH_SIZES = ("global", "per_rank")
"""What the batch size of a loader may count: the samples of all ranks, or those of each."""


class Batches:
    """Shares out the batches of a Trainer's loaders among the ranks along dp, and knows what each part counts.

    Args:
        batch_size: one of `BATCH_SIZES`.

    Raises:
        ConfigError: something else.
    """

    def __init__(self, batch_size: str) -> None:
        if batch_size not in BATCH_SIZES:
            close = nearest(str(batch_size), BATCH_SIZES)
            raise ConfigError(
                f"batch_size={batch_size!r}",
                "not what the batch size of a loader counts" + (f"; did you mean {close}?" if close else ""),
                "global (the samples of all ranks, as on one device), per_rank (those of each)",
                f"MeshStrategy(batch_size={close or 'global'!r})",
            )
        self.batch_size = batch_size
        self._are_shared: bool | None = None
        self._is_logged = False
        self._trainer: pl.Trainer | None = None
        self._weight: float | None = 1.0
        self.is_in_step = False

    def connect(self, trainer: pl.Trainer) -> None:
        """Take the place of the sampler that Lightning would insert, unless the Trainer was told to insert none."""
        connector = trainer._accelerator_connector
        if self._are_shared is None:
            self._are_shared = connector.use_distributed_sampler
        connector.use_distributed_sampler = False
        loop = trainer.predict_loop
        vars(loop)["_predict_step"] = partial(self._predict, partial(type(loop)._predict_step, loop))
        self._trainer = trainer

    def begin(self) -> None:
        """A training batch begins; its step may run several times, or not at all.

        A step that draws its batches itself has none yet: what they count is known only after that.
        """
        self._weight = self._next_weight() if any(loader.weights for loader in self._training_loaders()) else None

    def is_counted(self) -> bool:
        """Whether the present batch of this rank counts, or is there only to keep step with the others."""
        return self.weight > 0

    @contextmanager
    def step(self, module: pl.LightningModule) -> Iterator[None]:
        """A training step of `module` runs within it."""
        self.is_in_step = True
        try:
            with self._uncounted(module) if self._weight == 0 else nullcontext():
                yield
        finally:
            self.is_in_step = False
            _ = self.weight  # a step that nobody asked about has used its batch up, too

    @property
    def weight(self) -> float:
        """The weight of this rank's mean in the mean over all ranks along dp, for the batch of the last training step.

        Raises:
            ConfigError: there are several loaders, whose batches do not agree on it.
        """
        if self._weight is None:
            self._weight = self._next_weight()
        return self._weight

    @contextmanager
    def evaluation_step(self, module: pl.LightningModule, loader: int = 0) -> Iterator[None]:
        """A validation or test step of `module` runs within it, on the next batch of a loader of that number.

        What it logs and collects of a batch which this rank has only to keep step with the others counts for nothing.
        """
        weight = self._evaluation_weight(loader)
        with self._weighing(weight), self._uncounted(module) if weight == 0 else nullcontext():
            yield

    @contextmanager
    def _weighing(self, weight: float) -> Iterator[None]:
        """Within it the present batch is one of another loop than that which trains."""
        before, self._weight = self._weight, weight
        try:
            yield
        finally:
            self._weight = before

    @contextmanager
    def _uncounted(self, module: pl.LightningModule) -> Iterator[None]:
        """Within it names are logged, as all ranks exchange the values of each, but values and metrics stay."""
        assert self._trainer is not None
        before = {key: _accumulated(item) for key, item in (self._trainer._results or {}).items()}
        with uncounted(item for item in module.modules() if isinstance(item, Metric)):
            yield
        for key, item in (self._trainer._results or {}).items():
            vars(item).update(before.get(key, item._defaults))

    def _evaluation_weight(self, number: int) -> float:
        assert self._trainer is not None
        combined = self._trainer._evaluation_loop._combined_loader
        if combined is None:
            return 1.0
        of_batch = combined.flattened[number : number + 1] if combined._mode == "sequential" else combined.flattened
        weights = {_drawn_weight(loader) for loader in of_batch}
        drawn = {weight for weight in weights if weight is not None}  # of one that has ended nothing is in the batch
        if len(drawn) > 1 and 0 in drawn:
            raise ConfigError(
                f"dataloader: CombinedLoader(mode={combined._mode!r})",
                "of a batch of several loaders a rank along dp has a part of some and none of others, so that what it "
                "logs can be counted neither with it nor without",
                "batch sizes that divide; or the loaders in a list, to be gone through one after the other",
                "DataLoader(..., drop_last=True)",
            )
        return drawn.pop() if len(drawn) == 1 else 1.0

    def _predict(self, step: Callable[..., None], batch: Any, index: int, number: int, *args: Any) -> None:
        """`step` of the loop that predicts, for a batch of its loader of that number.

        What a rank predicts only to keep step with the others is not returned. Hooks run on every rank, as they may be
        collective; those that write get no rows of it.
        """
        assert self._trainer is not None
        loop, trainer = self._trainer.predict_loop, cast(Any, self._trainer)
        assert loop._combined_loader is not None
        drawn = _drawn_weight(loop._combined_loader.flattened[number])
        weight = 1.0 if drawn is None else drawn
        if weight > 0:
            with self._weighing(weight):
                step(batch, index, number, *args)
            return
        lists = [found[number] for found in (loop._predictions, loop.epoch_batch_indices)]
        lengths = [len(found) for found in lists]
        with self._weighing(weight), ExitStack() as emptied:
            for writer in trainer.callbacks:
                if isinstance(writer, BasePredictionWriter):
                    of_no_rows = partial(_of_no_rows, writer.write_on_batch_end)
                    emptied.enter_context(replaced(writer, "write_on_batch_end", of_no_rows))
            step(batch, index, number, *args)
        for found, length in zip(lists, lengths, strict=True):
            del found[length:]

    def samples_per_step(self, ranks: int) -> int | list[int] | None:
        """Samples of all ranks in an optimizer step; a list if there are several loaders, None if one does not say.

        Args:
            ranks: how many there are along dp.
        """
        combined = None if self._trainer is None else self._trainer.fit_loop._combined_loader
        if self._trainer is None or combined is None:
            return None
        sizes = [_samples_in_batch(loader, ranks) for loader in combined.flattened]
        steps = [size * self._trainer.accumulate_grad_batches for size in sizes if size is not None]
        if not sizes or len(steps) < len(sizes):
            return None
        return steps[0] if len(steps) == 1 else steps

    def place(self, samples: int, rank: int, ranks: int) -> tuple[int, int]:
        """(the number of this rank's first sample in the batch of all ranks, how many samples that has).

        Args:
            samples: that this rank has of the batch of the last training step.
        """
        if ranks == 1 or self.weight == 0:
            return 0, samples
        together = round(samples * ranks / self.weight)
        return Share(rank, ranks).bounds(together)[0], together

    def _training_loaders(self) -> list[DistributedLoader]:
        assert self._trainer is not None
        combined = self._trainer.fit_loop._combined_loader
        read = [] if combined is None else [getattr(loader, "shared", loader) for loader in combined.flattened]
        return [loader for loader in read if isinstance(loader, DistributedLoader)]

    def _next_weight(self) -> float:
        weights = {loader.weights.popleft() for loader in self._training_loaders() if loader.weights}
        if len(weights) > 1:
            raise ConfigError(
                "train_dataloader",
                "batches of several loaders are not shared out alike: in one of them the samples can't be divided "
                "evenly among the ranks along dp",
                "batch sizes that divide",
                "DataLoader(..., drop_last=True)",
            )
        return weights.pop() if weights else 1.0

    def share(self, loader: Any, rank: int, ranks: int, world: int) -> Any:
        """The loader of this rank: its part of every batch of `loader`.

        What is no `DataLoader`, says that it `shares_itself`, or shares out its data along dp by a
        `DistributedSampler` of the user's own, stays as it is; so does everything with
        ``Trainer(use_distributed_sampler=False)``.

        Args:
            rank, ranks: this rank's place along dp, and how many there are.
            world: ranks of the whole mesh.

        Raises:
            ConfigError: a loader whose batches come in no order, or whose `DistributedSampler` gives other samples to
                ranks that hold parts of one replica.
        """
        if not isinstance(loader, DataLoader):
            return loader
        if world > ranks:
            for sampler in samplers_of(loader):
                _check_that_replicas_agree(_plain(sampler), rank, ranks)
        shares_itself = getattr(loader, "shares_itself", False) or isinstance(
            _plain(loader.sampler), DistributedSampler
        )
        is_left_alone = ranks == 1 or not self._are_shared or shares_itself
        if is_left_alone or not isinstance(loader.dataset, IterableDataset):  # a stream is the same on every rank
            _seed_workers(loader, rank)
        if is_left_alone:
            return loader
        check_loader(loader)
        is_trained_on = self._trainer is not None and self._trainer.training
        if is_trained_on and not self._is_logged and loader.batch_size is not None:
            self._is_logged = True
            log.info(self._in_words(loader.batch_size, ranks))
        share, joined = Share(rank, ranks), 1 if self.batch_size == "global" else ranks
        if isinstance(predicted := loader.batch_sampler, _IndexBatchSamplerWrapper):  # it shows which samples those are
            predicted._batch_sampler = IndexShare(predicted._batch_sampler, generators_of(loader), share, joined)
            return loader
        return DistributedLoader(loader, share, world, joined=joined)

    def _in_words(self, size: int, ranks: int) -> str:
        if self.batch_size == "per_rank":
            return f"batch_size={size} of the loader is that of each rank along dp: {size * ranks} samples in a step"
        return (
            f"batch_size={size} of the loader is that of all {ranks} ranks along dp, as on one device; "
            "MeshStrategy(batch_size='per_rank') if it is that of each"
        )


def _of_no_rows(
    write: Callable[..., None], trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any, **kwargs: Any
) -> None:
    """`write`, which is a `write_on_batch_end`, of a prediction for one sample without what is that sample's."""
    empty = tree_map(_without_row, prediction, is_leaf=_is_list_of_samples)
    write(trainer, module, empty, None if indices is None else [], *args, **kwargs)


def _without_row(found: Any) -> Any:
    return found[:0] if _is_list_of_samples(found) or _rows(found) is not None else found


def _is_list_of_samples(found: Any) -> bool:
    """Whether what was predicted for one sample is a list that has an item for each, such as a text or its tokens."""
    return isinstance(found, list) and len(found) == 1 and _rows(found[0]) != 1


def _rows(found: Any) -> int | None:
    return len(found) if isinstance(found, Tensor | np.ndarray) and found.ndim else None


def _drawn_weight(loader: Any) -> float | None:
    """The weight of the next batch that `loader` has handed out, which is used up then; None if it has ended.

    1 of a loader that shares out its data itself, and so says nothing of it.
    """
    if isinstance(loader, DistributedLoader):
        return loader.weights.popleft() if loader.weights else None
    shared = getattr(getattr(loader, "batch_sampler", None), "_batch_sampler", None)
    if not isinstance(shared, IndexShare):
        return 1.0
    return shared.share.weight(shared.sizes.popleft()) if shared.sizes else None


def _accumulated(result: Any) -> dict[str, Any]:
    """What a value that is logged has added up, by attribute."""
    return {name: getattr(result, name) for name in result._defaults}


def _samples_in_batch(loader: Any, ranks: int) -> int | None:
    """Samples of all ranks in a full batch of a loader that `Batches.share` has returned; None if it does not say."""
    loader = getattr(loader, "shared", loader)
    if isinstance(loader, DistributedLoader):
        return loader.samples_per_batch
    size = global_batch_size(loader) if isinstance(loader, DataLoader) else None
    return None if size is None else size * ranks


def _check_that_replicas_agree(sampler: Any, rank: int, ranks: int) -> None:
    if not isinstance(sampler, DistributedSampler) or (sampler.num_replicas, sampler.rank) == (ranks, rank):
        return
    raise ConfigError(
        f"dataloader: {type(sampler).__name__}(num_replicas={sampler.num_replicas}, rank={sampler.rank})",
        "ranks along mp, cp and pp hold parts of one replica and need the same samples; this rank is number "
        f"{rank} of {ranks} along dp",
        "the loader of one process, without it: it is shared out along dp; or a sampler for dp alone",
        "DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs)",
    )


def _plain(sampler: Any) -> Any:
    return sampler.inner if isinstance(sampler, Order) else sampler


def _seed_workers(loader: DataLoader, dp_rank: int) -> None:
    """Seed the workers of a loader by the place along dp: ranks that hold parts of one replica draw the same.

    The first place draws what one process would.
    """
    by_rank = dp_rank > 0 or int(os.environ.get("PL_SEED_WORKERS", "0"))
    if by_rank and loader.num_workers and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=dp_rank)
