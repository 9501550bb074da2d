"""Batches of a language model: what they hold, where their labels stand, and what the first one must not say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from autolaunch.models.label_positions import LABELS
from autolaunch_strategies.config import ConfigError

NOT_TRAINED = -100
"""The label of a position that is not trained on."""

_WHERE = "data"


def next_tokens(batch: Mapping[str, Tensor], labels: str) -> Tensor:
    """What the model should say after each token of a batch, int64 [b, s]; `NOT_TRAINED` where nothing is trained.

    The first token of a packed document, where `position_ids` restart, follows from nothing: it never is trained on.

    Args:
        labels: one of `LABELS`; with `same`, nothing follows the last token.
    """
    targets = batch["labels"]
    if labels == "same":
        targets = F.pad(targets[:, 1:], (0, 1), value=NOT_TRAINED)
    positions = batch.get("position_ids")
    if positions is not None:
        targets = targets.masked_fill(F.pad(positions[:, 1:], (0, 1), value=1) == 0, NOT_TRAINED)
    return targets


class ChecksFirstBatch(pl.Callback):
    """Refuses a training, validation or test whose first batch can't be what the model is trained on.

    Args:
        check: raises a ConfigError for such a batch.

    Raises:
        ConfigError: from the start of the first batch.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        self._of_batch = check
        self._is_checked = False

    def _check(self, batch: Any) -> None:
        if not self._is_checked:
            self._of_batch(batch)
            self._is_checked = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._check(batch)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._check(batch)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._check(batch)


def check_batch(batch: Any, labels: str, inputs: Collection[str], documents_meet: str = "") -> None:
    """Look at the values of one batch.

    Args:
        labels: where they stand, one of `LABELS`.
        inputs: what the model takes beside `input_ids`.
        documents_meet: see `LanguageModel`.

    Raises:
        ConfigError: tensors are missing or of other shapes than `input_ids`; labels stand at other positions than
            `labels` says; padding is on the left or has labels; `position_ids` that the model takes no notice of, or of
            packed documents that would see each other.
    """
    assert labels in LABELS
    ids, targets = _tensors(batch)
    _check_positions_of_labels(ids, targets, labels)
    if "position_ids" in batch and "position_ids" not in inputs:
        raise ConfigError(
            f"{_WHERE}: position_ids",
            "the model takes no position_ids: packed documents would see each other",
            "batches without them, of one document a row; or a model of transformers that takes them",
            "model=hf",
        )
    mask = batch.get("attention_mask")
    if documents_meet and "position_ids" in batch and _restart(batch["position_ids"], mask):
        raise ConfigError(
            f"{_WHERE}: position_ids",
            f"they restart within a row, but {documents_meet}",
            "batches of one document a row",
        )
    if mask is not None:
        _check_padding(mask.bool(), targets, labels)


def _restart(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether documents begin within a row; in padding positions are often 0."""
    begins = positions[:, 1:] == 0
    return bool((begins if mask is None else begins & mask[:, 1:].bool()).any())


def _tensors(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= set(batch):
        kind = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ConfigError(
            _WHERE,
            f"a batch is {kind}, which a language model can't be trained on",
            "{input_ids: [b, s], labels: [b, s]}, int64, and optionally position_ids and attention_mask [b, s]",
        )
    ids = batch["input_ids"]
    for name in ("input_ids", "labels", "position_ids", "attention_mask"):
        tensor = batch.get(name)
        if tensor is None:
            continue
        if tensor.ndim != 2 or tensor.shape != ids.shape:
            raise ConfigError(
                f"{_WHERE}: {name}",
                f"its shape is {list(tensor.shape)}, that of input_ids {list(ids.shape)}",
                "[b, s] each: a row for each sequence, a column for each position",
            )
        if name != "attention_mask" and tensor.dtype != torch.int64:
            raise ConfigError(f"{_WHERE}: {name}", f"its type is {tensor.dtype}".replace("torch.", ""), "int64")
    return ids, batch["labels"]


def _check_positions_of_labels(ids: Tensor, targets: Tensor, labels: str) -> None:
    """Refuse labels that stand where the other of `LABELS` has them, if they can't also be what is said."""
    same = bool((targets == ids)[targets != NOT_TRAINED].all())
    has_next = targets[:, :-1] != NOT_TRAINED
    following = bool((targets[:, :-1] == ids[:, 1:])[has_next].all())
    if not has_next.any() or same == following:
        return
    if labels == "next" and same:
        raise ConfigError(
            "data.labels=next",
            "the labels are equal to input_ids at the same position, so that the model would be trained to copy",
            "next (label t is the token after input t), same (label t is the token at t, as transformers has it)",
            "data.labels=same",
        )
    if labels == "same" and following:
        raise ConfigError(
            "data.labels=same",
            "the labels are input_ids one position further: they are shifted already, and would be shifted once more",
            "same (label t is the token at t, as transformers has it), next (label t is the token after input t)",
            "data.labels=next",
        )


def _check_padding(mask: Tensor, targets: Tensor, labels: str) -> None:
    if bool((~mask[:, :-1] & mask[:, 1:]).any()):
        raise ConfigError(
            f"{_WHERE}: attention_mask",
            "tokens follow behind padding",
            "padding at the end of a row: padding_side=right of the tokenizer",
        )
    # With labels of the next token, that of the last real one is padding as well.
    padded = ~mask if labels == "same" else ~torch.cat([mask[:, 1:], mask[:, -1:]], dim=1)
    if bool((targets[padded] != NOT_TRAINED).any()):
        raise ConfigError(
            f"{_WHERE}: labels",
            "padding is trained on: where attention_mask is 0 there are labels",
            f"{NOT_TRAINED} there: labels.masked_fill(attention_mask == 0, {NOT_TRAINED})",
        )
