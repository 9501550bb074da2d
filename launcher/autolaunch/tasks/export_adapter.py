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
    names, tensors = set[str](), {}
    for published, name in adapted.published.items():  # layers may share what is trained; tensors in a file may not
        tensors[published] = values[name].clone() if name in names else values[name].contiguous()
        names.add(name)
    save_file(tensors, directory / WEIGHTS_FILE, {"format": "pt"})
    config = copy.copy(adapted.config)
    config.inference_mode = True
    config.save_pretrained(str(directory))
    return sum(tensor.nbytes for tensor in tensors.values())


def changed_ties(model: nn.Module) -> dict[str, str]:
    """Names of weights that layers share, one of which the adapter changes -> their names without the adapter.

    A model with the adapter merged into it has them apart.

    Raises:
        ConfigError: they are not those of embedding and head alone, of which a config can say that they are apart.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    adapted = (LoraLayer, AuxiliaryTrainingWrapper)
    changed = {name for name, part in model.named_modules() if isinstance(part, adapted)}
    shared: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shared.setdefault(id(tensor), []).append(name)
    apart: dict[str, str] = {}
    for names in shared.values():
        own = {name: _without_adapter(name) for name in names}
        layers = {name.rpartition(".")[0] for name in own.values()}
        around = {part for part in changed if any(f"{layer}.".startswith(f"{part}.") for layer in layers)}
        if len(names) == 1 or not around:
            continue
        if layers != _embedding_and_head(model):
            raise ConfigError(
                "export_merged=true",
                f"the adapter changes a weight that {', '.join(sorted(layers))} share: the merged model would have the "
                "change in all of them",
                "the adapter alone, which PEFT loads",
                "export_merged=false",
            )
        apart |= own
    return apart


def _without_adapter(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def _embedding_and_head(model: nn.Module) -> set[str]:
    if not hasattr(model, "get_input_embeddings"):
        return {"model.embed_tokens", "lm_head"}  # as our own model has them
    # Of attributes, torch's stubs say that they are tensors or modules.
    ends: Any = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    return {name for name, part in model.named_modules() if any(part is end for end in ends)}


def _check_biases(layers: Mapping[str, Any]) -> None:
    """Raise ConfigError if there is nothing that the bias of an adapter (PEFT's lora_bias) can be added to."""
    for name, layer in layers.items():
        if getattr(layer, "lora_bias", {}).get(ADAPTER) and getattr(layer.get_base_layer(), "bias", None) is None:
            raise ConfigError(
                "export_merged=true",
                f"the adapter of {name} has a bias, and the layer has none that it could be added to",
                "the adapter alone, which PEFT loads",
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
        ConfigError: the files of the model that the run began from are gone, or others; as `changed_ties`; the adapter
            has biases where the model has none.
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
        self._apart = changed_ties(self._model)
        self._names = {self._apart.get(name, base): name for name, base in adapted.base_names.items()}
        self._state = self._model.state_dict(keep_vars=True)
        self._trained, self._construction = trained, construction
        self._files = weight_files(config, module, construction)
        modules = list(self._model.named_modules())
        self._layers = [name for name, part in modules if isinstance(part, LoraLayer)]
        _check_biases({name: self._model.get_submodule(name) for name in self._layers})
        self._copies = [name for name, part in modules if isinstance(part, AuxiliaryTrainingWrapper)]
        self._merged: tuple[str, dict[str, torch.Tensor]] = "", {}

    @property
    def unties(self) -> bool:
        """Whether embedding and head share their weight in the run, and no longer here."""
        return bool(self._apart)

    def metas(self) -> dict[str, torch.Tensor]:
        """Name without the adapter -> a weight of that shape and type on meta; of those that stay tied the first."""
        metas: dict[str, torch.Tensor] = {}
        known: set[int] = set()
        for base, name in self._names.items():
            if name in self._apart or id(self._state[name]) not in known:
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
            return self._copied(copied, name, base).to(self._frozen(name).dtype)
        return self._trained[name] if name in self._trained else self._frozen(name)

    def _copied(self, module: str, name: str, base: str) -> torch.Tensor:
        """A weight of a module that is trained whole, or of an embedding of which single rows are."""
        rows = f"{module}.token_adapter.trainable_tokens_delta.{ADAPTER}"
        if rows not in self._trained:
            return self._trained[f"{module}.modules_to_save.{ADAPTER}{base.removeprefix(module)}"]
        adapter: Any = self._model.get_submodule(f"{module}.token_adapter")  # of PEFT's class
        which = adapter.token_indices[ADAPTER]
        values = self._trained[rows]
        return self._frozen(name).to(values.dtype, copy=True).index_copy_(0, torch.tensor(which), values)

    def _frozen(self, name: str) -> torch.Tensor:
        tensor = self._state[name]
        for shared in (name, *(other for other in self._apart if self._state[other] is tensor)):
            if self._files is not None and f"model.{shared}" in self._files:
                return self._files.read(f"model.{shared}")
        return self._construction.tensor(tensor.detach())

    def _layer(self, name: str) -> dict[str, torch.Tensor]:
        """The weights of one layer, by their names in it, as PEFT merges them in fp32."""
        layer: Any = copy.deepcopy(self._model.get_submodule(name))
        values = {}
        for key in layer.state_dict():
            full = f"{name}.{key}"
            value = self._trained[full] if full in self._trained else self._frozen(full)
            values[key] = value.to(torch.float32, copy=True)  # merged in place, and it may be a mapped file
        layer.load_state_dict(values, assign=True)
        if hasattr(layer, "unload_and_optionally_merge_module"):
            merged = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=[ADAPTER])
        else:
            layer.merge(adapter_names=[ADAPTER])
            merged = layer.get_base_layer()
        return dict(merged.state_dict())
