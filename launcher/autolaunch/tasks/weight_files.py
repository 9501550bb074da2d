"""The files that a run's weights begin from, under the names of its LightningModule: a pretrained model, an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from autolaunch.models.adapter_config import WEIGHTS_FILE
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.construction import Construction

_SHOWN = 3  # names in a message

Index = tuple[slice, ...] | None


class WeightFiles:
    """Weights by the names of the LightningModule; each is read when it is asked for.

    Args:
        readers: name -> what reads the weight, or its part at an index.
    """

    def __init__(self, readers: Mapping[str, Callable[[Index], torch.Tensor]]) -> None:
        self._readers = readers

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    def read(self, name: str, index: Index = None) -> torch.Tensor:
        """The weight, or its part at `index` (one slice per leading dim), in the type of its file."""
        return self._readers[name](index)


def weight_files(
    config: Mapping[str, Any], module: pl.LightningModule, construction: Construction
) -> WeightFiles | None:
    """The files that `model.path` and `adapter.path` name; None if there are none.

    What an adapter is computed from, such as the length of the rows of its layer, comes from the files as well.

    Args:
        module: built from the config within `construction`.

    Raises:
        ConfigError: files that are not those of this model or this adapter.
    """
    if config["module"]:
        return None
    model, readers = config["model"], {}
    if model.get("name") == "hf" and "_target_" not in model and model.get("path") and model.get("pretrained"):
        readers = _pretrained(module, model["path"], construction)
    adapter = config.get("adapter")
    if adapter is not None and adapter["path"] is not None:
        readers |= _published(module, adapter["path"])
    return WeightFiles(readers) if readers else None


def _pretrained(
    module: pl.LightningModule, directory: str, construction: Construction
) -> dict[str, Callable[[Index], torch.Tensor]]:
    from autolaunch.models.pretrained import SafetensorsWeights

    weights = SafetensorsWeights(directory)
    # Of attributes, torch's stubs say that they are tensors or modules.
    model: nn.Module = module.model  # type: ignore[assignment]
    adapted: Any = module.adapted
    if adapted is None:
        return {f"model.{name}": partial(weights.read, source) for name, source in weights.matching(model).items()}
    state = model.state_dict(keep_vars=True)
    base = {base_name: state[name] for name, base_name in adapted.base_names.items()} | adapted.replaced
    sources = weights.matching(model, base)
    for base_name, source in sources.items():
        if construction.knows(base[base_name]):
            construction.give(base[base_name], partial(weights.read, source))
    return {
        f"model.{name}": partial(weights.read, sources[base_name])
        for name, base_name in adapted.base_names.items()
        if base_name in sources
    }


def _published(module: pl.LightningModule, directory: str) -> dict[str, Callable[[Index], torch.Tensor]]:
    where, file = f"adapter.path={directory}", Path(directory).expanduser() / WEIGHTS_FILE
    adapted: Any = module.adapted
    try:
        opened = safe_open(str(file), framework="pt")
        there = set(opened.keys())
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in there}
    except (SafetensorError, OSError) as error:
        raise ConfigError(where, f"{file.name} is corrupt or cut short: {error}") from error
    model: nn.Module = module.model  # type: ignore[assignment]  # torch: a tensor or a module
    parameters = dict(model.named_parameters())
    for names, problem in (
        (sorted(adapted.published.keys() - there), "are not in it"),
        (sorted(there - adapted.published.keys()), "in it are of no layer here"),
        (
            sorted(n for n in there & adapted.published.keys() if shapes[n] != parameters[adapted.published[n]].shape),
            "have another shape here",
        ),
    ):
        if names:
            more = ", ..." if len(names) > _SHOWN else ""
            raise ConfigError(
                where,
                f"is an adapter of another model: {len(names)} of its weights {problem} "
                f"({', '.join(names[:_SHOWN])}{more})",
                "an adapter that was trained on this model",
            )

    def read(name: str, index: Index = None) -> torch.Tensor:
        return opened.get_tensor(name) if index is None else opened.get_slice(name)[index]

    return {f"model.{name}": partial(read, key) for key, name in adapted.published.items()}
