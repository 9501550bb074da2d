"""The first batch of a job's data, without values: it shows how any model is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, DistributedSampler

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.data_parallel.first_batch import FirstBatches
from autolaunch_strategies.lightning.first_step import first_of, first_step, without_values
from autolaunch_strategies.tracing.step import Step

_SHAPES_ARE_KNOWN = ("text", "tokens", "synthetic")


def is_tokenised(data: Mapping[str, Any]) -> bool:
    """Whether text would have to be tokenised for a batch."""
    return "_target_" not in data and data.get("name") in ("documents", "chat", "classification")


def first_batch(config: Mapping[str, Any], ranks: int = 1) -> Callable[[], Any]:
    """What gives the share of one of `ranks` ranks of a batch, tensors on meta: new ones each time.

    Raises:
        ConfigError: it can't be read.
    """
    data = config["data"]
    try:
        batch = _read(data, config["seed"], ranks)
    except ConfigError:
        raise
    except Exception as error:  # whatever reading data raises
        raise ConfigError(
            f"data={data.get('name', data.get('_target_'))}",
            f"its first batch can't be read: {first_line(error)}",
            "data that can be read here, or data=synthetic",
        ) from error
    return lambda: tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def _read(data: Mapping[str, Any], seed: int, ranks: int) -> Any:
    """The share of one of `ranks` ranks; of next-token training shapes are known, and nothing is read."""
    from autolaunch.data import build_data
    from autolaunch.data.module import TokenDataModule

    if "_target_" not in data and data.get("name") in _SHAPES_ARE_KNOWN:
        shape = (data["batch_size"] // ranks // data["microbatches"], data["seq_len"])
        return {key: torch.empty(shape, dtype=torch.int64, device="meta") for key in ("input_ids", "labels")}
    module: Any = build_data(dict(data), seed)
    knows_its_share = isinstance(module, TokenDataModule)
    if knows_its_share:
        strategy = SimpleNamespace(dp_rank=0, dp_size=ranks, root_device=torch.device("cpu"))
        module.trainer = SimpleNamespace(strategy=strategy, overfit_batches=0, is_global_zero=True)
        module.prepare_data()  # one's own may download
    module.setup("fit")
    loaders = module.train_dataloader()
    batch = without_values(first_of(loaders, FirstBatches().read))
    is_whole = isinstance(loaders, DataLoader) and not isinstance(loaders.sampler, DistributedSampler)
    return _first_share(batch, ranks) if is_whole and not knows_its_share else batch


def _first_share(batch: Any, ranks: int) -> Any:
    """The part of the first rank along dp of a batch of all of them: samples are counted by the first tensor."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    count = len(tensors[0]) if tensors else 0

    def share(leaf: Any) -> Any:
        is_one = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == count
        return leaf.tensor_split(ranks)[0] if is_one else leaf

    return tree_map(share, batch)


def step_on_first_batch(module: Any, config: Mapping[str, Any]) -> Step | None:
    """The training step of a LightningModule with a batch of the job's data, read once it is looked at.

    None of another module, or if text would have to be tokenised for it.
    """
    import lightning.pytorch as pl

    if not isinstance(module, pl.LightningModule) or is_tokenised(config["data"]):
        return None
    return first_step(module, lambda: _read(config["data"], config["seed"], 1))
