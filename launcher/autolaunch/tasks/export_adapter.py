"""Exports of a run with an adapter: PEFT's files of the adapter, or the model with the adapter merged into it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import save_file
from torch import nn

from autolaunch.models.adapter_config import WEIGHTS_FILE
from autolaunch.models.adapters import ADAPTER, Adapted
from autolaunch.tasks.weight_files import weight_files
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.construction import Construction


def write_adapter(directory: Path, adapted: Adapted, values: Mapping[str, torch.Tensor]) -> int:
    """Write adapter_config.json and adapter_model.safetensors, which `PeftModel.from_pretrained` loads.

    Args:
        values: the trained parameters, by their names in the model.

    Returns:
        Bytes of the parameters.
    """
    tensors = {published: values[name].contiguous() for published, name in adapted.published.items()}
    save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})
    config = copy.copy(adapted.config)
    config.inference_mode = True
    config.save_pretrained(str(directory))
    return sum(tensor.nbytes for tensor in tensors.values())


def check_ties(model: nn.Module) -> None:
    """Check that an adapter can be merged into a model whose layers share weights.

    Raises:
        ConfigError: it changes one of two layers that share theirs, which the merged model would still share.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    adapted = (LoraLayer, AuxiliaryTrainingWrapper)
    changed = [name for name, part in model.named_modules() if isinstance(part, adapted)]
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    for shared in names.values():
        layer = next((layer for name in shared for layer in changed if name.startswith(f"{layer}.")), None)
        if len(shared) > 1 and layer is not None:
            others = [name.rpartition(".")[0].removesuffix(".base_layer") for name in shared]
            others = [name.removesuffix(".original_module") for name in others if not name.startswith(f"{layer}.")]
            raise ConfigError(
                "export_merged=true",
                f"the adapter changes {layer}, which shares its weight with {', '.join(others) or 'another layer'}: "
                "the merged model would have the one in place of the other",
                "the adapter alone, which PEFT loads; or one that leaves both as they are",
                "export_merged=false",
            )


class MergedWeights:
    """The weights of a model as if it had never had an adapter, with what that has learned added to them.

    Each is made when it is asked for, from the frozen weights of the run, in their type.

    Args:
        config: the job that trained it.
        module: built from it within `construction`.
        trained: the trained parameters, by their names in the model.

    Raises:
        ConfigError: the files of the model that the run began from are gone, or others.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        module: pl.LightningModule,
        construction: Construction,
        trained: Mapping[str, torch.Tensor],
    ) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        self._model: nn.Module = module.model  # type: ignore[assignment]  # torch: a tensor or a module
        adapted: Any = module.adapted
        self._names = {base: name for name, base in adapted.base_names.items()}
        self._state = self._model.state_dict(keep_vars=True)
        self._trained, self._construction = trained, construction
        self._files = weight_files(config, module, construction)
        modules = list(self._model.named_modules())
        self._layers = [name for name, part in modules if isinstance(part, LoraLayer)]
        self._copies = [name for name, part in modules if isinstance(part, AuxiliaryTrainingWrapper)]
        self._merged: tuple[str, dict[str, torch.Tensor]] = "", {}

    def metas(self) -> dict[str, torch.Tensor]:
        """Name without the adapter -> a weight of that shape and type on meta; of tied ones the first."""
        metas: dict[str, torch.Tensor] = {}
        known: set[int] = set()
        for base, name in self._names.items():
            if id(self._state[name]) not in known:
                known.add(id(self._state[name]))
                metas[base] = self._state[name].detach().to("meta")
        return metas

    @torch.no_grad()
    def read(self, base: str) -> torch.Tensor:
        """The weight of a name without the adapter."""
        name = self._names[base]
        layer = next((layer for layer in self._layers if base.startswith(f"{layer}.")), None)
        if layer is not None:
            if self._merged[0] != layer:
                self._merged = layer, self._layer(layer)
            return self._merged[1][base.removeprefix(f"{layer}.")].to(self._frozen(name).dtype)
        copied = next((copied for copied in self._copies if base.startswith(f"{copied}.")), None)
        if copied is not None:
            return self._trained[f"{copied}.modules_to_save.{ADAPTER}{base.removeprefix(copied)}"]
        return self._trained[name] if name in self._trained else self._frozen(name)

    def _frozen(self, name: str) -> torch.Tensor:
        if self._files is not None and f"model.{name}" in self._files:
            return self._files.read(f"model.{name}")
        return self._construction.tensor(self._state[name].detach())

    def _layer(self, name: str) -> dict[str, torch.Tensor]:
        """The weights of one layer, by their names in it, as PEFT merges them in fp32."""
        layer: Any = copy.deepcopy(self._model.get_submodule(name))
        values = {}
        for key in layer.state_dict():
            full = f"{name}.{key}"
            values[key] = (self._trained[full] if full in self._trained else self._frozen(full)).float()
        layer.load_state_dict(values, assign=True)
        if hasattr(layer, "unload_and_optionally_merge_module"):
            merged = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=[ADAPTER])
        else:
            layer.merge(adapter_names=[ADAPTER])
            merged = layer.get_base_layer()
        return dict(merged.state_dict())
