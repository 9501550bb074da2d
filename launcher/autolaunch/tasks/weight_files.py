"""The files that a run's weights begin from, under the names of its LightningModule: a pretrained model, an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from safetensors import SafetensorError, safe_open
from torch import nn

from autolaunch.models.adapter_config import WEIGHTS_FILE
from autolaunch.models.adapters import PUBLISHED_PREFIX
from autolaunch.models.hf_tasks import MODEL_TASKS, task_of
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
    config: Mapping[str, Any], module: pl.LightningModule, construction: Construction | None
) -> WeightFiles | None:
    """The files that `model.path` and `adapter.path` name; None if there are none.

    What an adapter is computed from, such as the length of the rows of its layer, comes from the files as well.

    Args:
        module: built from the config within `construction`, or in memory (None).

    Raises:
        ConfigError: files that are not those of this model or this adapter; an adapter in a model that is in memory,
            where what is computed from the files would be computed from random weights.
    """
    if config["module"]:
        return None
    model, readers = config["model"], {}
    if model.get("name") == "hf" and "_target_" not in model and model.get("path") and model.get("pretrained"):
        readers = _pretrained(module, model, construction, is_loaded=config.get("ckpt_path") is not None)
    adapter = config.get("adapter")
    if adapter is not None and adapter["path"] is not None:
        readers |= _published(module, adapter["path"])
    return WeightFiles(readers) if readers else None


def _pretrained(
    module: pl.LightningModule, model_cfg: Mapping[str, Any], construction: Construction | None, is_loaded: bool
) -> dict[str, Callable[[Index], torch.Tensor]]:
    """Of a model, `is_loaded` if a checkpoint follows, which has everything that these files lack."""
    from autolaunch.models.pretrained import SafetensorsWeights

    weights = SafetensorsWeights(model_cfg["path"])
    new_head = MODEL_TASKS[task_of(model_cfg) or "causal_lm"].has_new_head
    # Of attributes, torch's stubs say that they are tensors or modules.
    model: nn.Module = module.model  # type: ignore[assignment]  # a Module: mypy says or Tensor
    adapted: Any = module.adapted
    if adapted is None:
        sources = weights.matching(model, new_head=new_head)
        _say_what_is_unread(weights.unread(model, sources))
        if not is_loaded:
            _say_what_is_new(module, {name for name, _ in model.named_parameters()} - sources.keys())
        return {f"model.{name}": partial(weights.read, source) for name, source in sources.items()}
    if construction is None:
        raise ConfigError(
            "adapter",
            f"the constructor of {type(model).__name__} can't run without memory, which adapters beside the weights of "
            "model.path need",
            "adapter=none",
            "adapter=none",
        )
    state = model.state_dict(keep_vars=True)
    base = {base_name: state[name] for name, base_name in adapted.base_names.items()} | adapted.replaced
    sources = weights.matching(model, base, new_head)
    _say_what_is_unread(weights.unread(model, sources))
    _check_new_head(adapted, base.keys() - sources.keys())
    for base_name, source in sources.items():
        if construction.knows(base[base_name]):
            construction.give(base[base_name], partial(weights.read, source))
    return {
        f"model.{name}": partial(weights.read, sources[base_name])
        for name, base_name in adapted.base_names.items()
        if base_name in sources
    }


def _say_what_is_new(module: pl.LightningModule, names: set[str]) -> None:
    """Random weights beside pretrained ones are no secret."""
    if names:
        rank_zero_warn(f"not in the files of model.path, and random at the start: {', '.join(sorted(names))}")


def _say_what_is_unread(names: Sequence[str]) -> None:
    """A model that is smaller than that of the files, or another one, leaves some of them over."""
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        rank_zero_warn(f"in the files of model.path, and not of this model: {', '.join(names[:_SHOWN])}{more}")


def _check_new_head(adapted: Any, names: set[str]) -> None:
    """A head that begins random has to be trained, not frozen beside an adapter."""
    heads = {name.rpartition(".")[0] for name in names}
    frozen = sorted(
        head for head in heads if not any(t.startswith(f"{head}.modules_to_save.") for t in adapted.trained)
    )
    if frozen:
        raise ConfigError(
            "adapter.modules_to_save",
            f"{', '.join(frozen)} is not in the files of model.path: random, and frozen beside the adapter",
            "modules that are trained whole, with their adapters",
            f"adapter.modules_to_save=[{','.join(head.rpartition('.')[2] for head in frozen)}]",
        )


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
    own = {PUBLISHED_PREFIX + name for names in adapted.base_names.items() for name in names}
    if copies := sorted(there & (own - adapted.published.keys())):
        raise ConfigError(
            where,
            f"there are weights of the model itself in it, which are those of model.path here: {', '.join(copies)}",
            "an adapter without them, as PEFT's save_pretrained writes it with save_embedding_layers=False",
        )
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
