"""The LightningDataModule of all data of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from autolaunch.data.loader import Batch, PositionedLoader, StreamLoader, evaluation_loader
from autolaunch.data.order import BatchOrder
from autolaunch.data.windows import Batches, Parts, Sequences, Unnumbered
from autolaunch_strategies.config import ConfigError, ParallelConfig


class TokenDataModule(LightningDataModule):
    """Batches ``{input_ids, labels}``, int64 [b, s], of this rank's share of the data.

    The share is that of ``trainer.strategy.dp_rank`` among ``trainer.strategy.dp_size`` ranks (0 of 1 where the
    strategy has no such attributes). Training batches follow a `BatchOrder`. Loaders of other tasks go through all
    sequences in order, the last batch may be smaller; they are those of one process, and `MeshStrategy` shares them
    out. The training position is part of the checkpoint.

    Args:
        open_sequences: gives the sequences of each task; slow only in the first call on a machine.
        batch_size: sequences per optimizer step, over all ranks.
        microbatches: parts of a step; the Trainer must accumulate as many batches.
        own_validation: the line that names data for validation alone.
        keeps_share: whether a share of the training data can be kept for validation instead.
    """

    def __init__(
        self,
        open_sequences: Callable[[], Parts],
        *,
        batch_size: int,
        microbatches: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        shuffle: bool = True,
        own_validation: str = "data.validation_path=validation.jsonl",
        keeps_share: bool = True,
    ) -> None:
        super().__init__()
        self.own_validation, self.keeps_share = own_validation, keeps_share
        self.open_sequences = open_sequences
        self.batch_size, self.microbatches = batch_size, microbatches
        self.seed, self.num_workers, self.shuffle = seed, num_workers, shuffle
        self._sequences: Parts | None = None
        self._train_loader: PositionedLoader | StreamLoader | None = None
        self._resume_from: dict[str, int] | None = None

    def prepare_data(self) -> None:
        # One process of a machine fills the cache of tokenised text, the others then find it.
        self._sequences = self.open_sequences()
        for note in self._sequences.notes:
            print(note, file=sys.stderr)

    def setup(self, stage: str) -> None:
        self._sequences = self._sequences or self.open_sequences()
        self._train_loader = self._resume_from = None

    def train_dataloader(self) -> PositionedLoader | StreamLoader:
        sequences = self._opened.training
        if isinstance(sequences, Unnumbered):
            self._train_loader = self._streamed(sequences)
            return self._train_loader
        order = BatchOrder(
            len(sequences),
            self.batch_size,
            self.microbatches,
            self.seed,
            self.shuffle,
            self._dp_rank,
            self._dp_size,
            tuple(self._opened.weights),
        )
        # Set by one of lightning's connectors, so its class does not declare it.
        overfit = self.trainer.overfit_batches if self.trainer else 0  # type: ignore[attr-defined]
        repeat = overfit if isinstance(overfit, int) else int(overfit * len(order))
        self._train_loader = PositionedLoader(sequences, order, self.num_workers, repeat or None, self._pin_memory)
        if self._resume_from is not None:
            self._train_loader.load_state_dict(self._resume_from)
        return self._train_loader

    def _streamed(self, streams: Unnumbered) -> StreamLoader:
        trainer: Any = self.trainer
        of_batch = self.batch_size, self.batch_size, self.microbatches
        order = BatchOrder(*of_batch, self.seed, self.shuffle, self._dp_rank, self._dp_size)
        tell = trainer is None or trainer.is_global_zero
        return StreamLoader(streams, order, self.num_workers, self._pin_memory, tell)

    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        loader = self._in_order(self._opened.validation)
        task = self.trainer.state.fn if self.trainer else None
        if not loader and task in ("validate", "predict"):
            raise self._no_validation(task.value)
        return loader

    def _no_validation(self, task: str) -> ConfigError:
        """The error where nothing was kept; of what a checkpoint was trained on, a share says nothing about it."""
        problem = "there are no validation sequences"
        was_trained = self.trainer is not None and self.trainer.ckpt_path is not None
        if self.keeps_share and not was_trained and not isinstance(self._opened.training, Unnumbered):
            share = "data.validation_fraction=0.5"
            allowed = share.replace("=0.5", " above 0; or other data")
            return ConfigError(f"autolaunch {task}", problem, f"{allowed}: {self.own_validation}", share)
        if self.keeps_share and was_trained:
            problem += ", and the checkpoint was trained on all of these data"
        return ConfigError(f"autolaunch {task}", problem, "data for validation alone", self.own_validation)

    predict_dataloader = val_dataloader

    def test_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        return self._in_order(self._opened.test)

    def _in_order(self, sequences: Sequences | Batches | None) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        if not sequences:
            return []  # how lightning is told that there is nothing to run
        size = self.batch_size // self.microbatches
        return evaluation_loader(sequences, size, self.seed, self._dp_rank, self.num_workers, self._pin_memory)

    def state_dict(self) -> dict[str, Any]:
        """The training position. Lightning stores the loader's own state too, but drops it at the end of an epoch.

        That of a stream is with the loops: only there it is known which batches were read ahead of training.
        """
        if self._train_loader is None:
            return {}
        position = {} if isinstance(self._train_loader, StreamLoader) else self._train_loader.state_dict()
        return {**position, "microbatches_per_step": self.microbatches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the position of a checkpoint.

        Raises:
            ConfigError: the steps of the checkpoint had another number of microbatches, by which lightning counts too.
        """
        before = state_dict["microbatches_per_step"]
        if before != self.microbatches:
            parallel = getattr(self.trainer.strategy, "parallel", None) if self.trainer else None
            if parallel is not None and parallel.pp is not None and parallel.mesh.pp > 1:
                raise _other_accumulation(before, self.microbatches, parallel)
            raise ConfigError(
                f"data.microbatches={self.microbatches}",
                f"the checkpoint counts its position in steps of {before} microbatches",
                "the number of microbatches that the checkpoint was written with",
                f"data.microbatches={before}",
            )
        if "microbatches" not in state_dict:
            return
        self._resume_from = {key: value for key, value in state_dict.items() if key != "microbatches_per_step"}
        if isinstance(self._train_loader, PositionedLoader):  # made early by `trainer.estimated_stepping_batches`
            self._train_loader.load_state_dict(self._resume_from)

    @property
    def _opened(self) -> Parts:
        assert self._sequences is not None, "setup() comes before the loaders"
        return self._sequences

    @property
    def _dp_rank(self) -> int:
        return getattr(self.trainer.strategy, "dp_rank", 0) if self.trainer else 0

    @property
    def _dp_size(self) -> int:
        return getattr(self.trainer.strategy, "dp_size", 1) if self.trainer else 1

    @property
    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _other_accumulation(before: int, now: int, parallel: ParallelConfig) -> ConfigError:
    """With a pipeline, `data.microbatches` may have been typed and mean the pipeline's."""
    assert parallel.pp is not None
    beside = max(1, parallel.pp.microbatches // before) if parallel.pp.microbatches else parallel.mesh.pp
    return ConfigError(
        "ckpt_path",
        f"the checkpoint counts its position in steps of {before} accumulated batches, this run in steps of {now}",
        "the accumulation that the checkpoint was written with: data.microbatches, beside pp.microbatches if above 1",
        f"data.microbatches={before}" + (f" pp.microbatches={beside}" if before > 1 else ""),
    )
