"""Training data: text, tokens in files, synthetic sequences, rows of files, or a data module of the user's own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule


_OWN_VALIDATION = {
    "text": "data.path=other.txt data.validation_fraction=0.5",
    "tokens": "data.validation_path=validation.bin",
    "synthetic": "data.num_validation_sequences=256",
}
"""Data -> the line that names others for validation, where that is no file of rows."""


def build_data(data_cfg: dict[str, Any], seed: int, vocab_size: int | None = None) -> LightningDataModule:
    """The data module that the config group `data` describes; nothing is read before its `setup`.

    Args:
        data_cfg: every key of one of the schemas of `autolaunch.config.schema.DATA`, or ``_target_`` and its arguments.
        seed: of the order of samples, of synthetic sequences and of loader workers.
        vocab_size: how many token ids the model knows, if that is known: files of tokens may hold others.
    """
    # Lazily: the command checks data without torch.
    if "_target_" in data_cfg:
        from autolaunch.instantiate import build, locate

        _refuse_dataset(locate(data_cfg["_target_"], "data"), data_cfg["_target_"])
        return build(data_cfg, "data", ("name", "labels"))
    from autolaunch.data import classification, rows_of_files, synthetic, text, tokens
    from autolaunch.data.module import TokenDataModule

    own = {"text": text, "tokens": tokens, "synthetic": synthetic, "classification": classification}
    kind = own.get(data_cfg["name"], rows_of_files)
    known = {"vocab_size": vocab_size} if kind is tokens else {}
    return TokenDataModule(
        partial(kind.open_sequences, data_cfg, seed, **known),
        batch_size=data_cfg["batch_size"],
        microbatches=data_cfg["microbatches"],
        seed=seed,
        num_workers=data_cfg["num_workers"],
        shuffle=data_cfg["shuffle"],
        own_validation=_OWN_VALIDATION.get(data_cfg["name"], "data.validation_path=validation.jsonl"),
        keeps_share="validation_fraction" in data_cfg,
    )


def _refuse_dataset(target: Any, name: str) -> None:
    """Raise ConfigError for the commonest mistake, before its arguments are asked for, which are not the mistake."""
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader, Dataset

    if not isinstance(target, type) or issubclass(target, LightningDataModule):
        return
    if issubclass(target, Dataset | DataLoader):
        kind = "Dataset" if issubclass(target, Dataset) else "DataLoader"
        raise ConfigError(
            f"data._target_={name}",
            f"a torch.utils.data.{kind}, and no LightningDataModule",
            "a LightningDataModule whose train_dataloader makes it, or a function that returns one",
        )
