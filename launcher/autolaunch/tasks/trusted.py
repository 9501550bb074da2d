"""What a job that stands beside a checkpoint may have built, unless `checkpoint.trust` says otherwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import nn

from autolaunch.instantiate import locate, targets
from autolaunch_strategies.config import ConfigError


def check_targets(
    checkpoint: Path,
    config: Mapping[str, Any],
    keys: Collection[str] = ("model", "module"),
    typed: Collection[str] = (),
) -> None:
    """Raise ConfigError if the config beside `checkpoint` names something else to build than models and data modules.

    Args:
        keys: what is built of it.
        typed: keys of the command line, which are the person's own.
    """
    for key in keys:
        for where, node in targets(config.get(key), key):
            if f"{where}._target_" in typed:
                continue
            target = locate(node["_target_"], where)
            if not (isinstance(target, type) and issubclass(target, nn.Module | LightningDataModule)):
                raise ConfigError(
                    f"ckpt_path={checkpoint}",
                    f"its run names {where}._target_={node['_target_']}, and calling that is code of its choice",
                    "classes of torch.nn.Module or LightningDataModule; or the checkpoint of a run that you trust",
                    "checkpoint.trust=true",
                )
