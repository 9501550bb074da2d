"""PEFT's adapters in a model that is unmodified otherwise, and which of its parameters are trained without any.

Names: PEFT puts a layer `q_proj` one level down (`q_proj.base_layer`) and its own parameters beside it
(`q_proj.lora_A.default`). A module that is trained whole becomes two, `lm_head.original_module` and
`lm_head.modules_to_save.default`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autolaunch.models.adapter_config import ALL_LINEAR, AdapterSettings, adapter_settings, ending_with, unmatched
from autolaunch.models.four_bits import linear_layers, quantise_linear_layers
from autolaunch.models.hf_config import name_and_commit
from autolaunch.models.hf_tasks import MODEL_TASKS, task_of
from autolaunch.models.parameter_names import matching
from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

ADAPTER = "default"
"""PEFT's name of the one adapter of a model."""

PUBLISHED_PREFIX = "base_model.model."
"""What stands before the names of a model in the file of an adapter."""


@dataclass(frozen=True)
class Adapted:
    """What became of a model's names, by its own names in `state_dict()`."""

    config: Any
    """PEFT's config, with every target named."""
    base_names: dict[str, str]
    """Name of a weight of the model -> its name before the adapter was there."""
    replaced: dict[str, torch.Tensor]
    """Name before -> a weight that is there in four bits only, as it was."""
    trained: frozenset[str]
    """Names of the parameters that are trained."""
    published: dict[str, str]
    """Name in the file of an adapter -> name of a trained parameter."""


def add_adapter(model: nn.Module, adapter_cfg: Mapping[str, Any], model_cfg: Mapping[str, Any]) -> Adapted:
    """Put adapters into `model`, in place, and freeze everything else.

    Args:
        model: on any device; its tensors stay the same objects.
        adapter_cfg: the fields of `autolaunch.config.schema.Adapter`.
        model_cfg: the group `model`; for what PEFT writes about the base of an adapter.

    Raises:
        ConfigError: as `adapter_settings`; a name that matches nothing; a layer that PEFT can't give an adapter.
    """
    settings = adapter_settings(adapter_cfg)
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

    if settings.path is None:
        _check_names(model, settings)
        config = LoraConfig(
            r=settings.r,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT divides it, and says int
            target_modules=_targets(model, settings),
            target_parameters=list(settings.target_parameters) or None,
            modules_to_save=list(settings.modules_to_save) or None,
            exclude_modules=list(settings.exclude) or None,
            use_dora=settings.kind == "dora",
            use_rslora=settings.rslora,
        )
    else:
        config = LoraConfig.from_pretrained(str(settings.path))
    config.lora_dropout, config.inference_mode = settings.dropout, False
    if "_target_" not in model_cfg:
        config.task_type = MODEL_TASKS[task_of(model_cfg) or "causal_lm"].adapter_type
    path = str(model_cfg.get("path") or "")
    # Of the hub not the directory of its cache: an adapter goes to other machines.
    config.base_model_name_or_path, config.revision = name_and_commit(Path(path)) or (path, None)
    before = _by_tensor(model)
    replaced: dict[str, torch.Tensor] = {}
    if settings.quant_type is not None:
        replaced = quantise_linear_layers(model, settings.quant_type, _kept(model, settings))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"adapter={settings.kind}", f"PEFT refuses it: {' '.join(str(error).split())}") from error
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    published = get_peft_model_state_dict(model, state, adapter_name=ADAPTER, save_embedding_layers=False)
    return Adapted(
        config,
        {name: before[id(tensor)] for name, tensor in state.items() if id(tensor) in before},
        replaced,
        frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        {PUBLISHED_PREFIX + name: names[id(tensor)] for name, tensor in published.items()},
    )


def save_only(module: LightningModule, names: Iterable[str]) -> None:
    """Leave frozen parameters out of what `module.state_dict()` returns, and so out of checkpoints.

    Args:
        names: of the parameters that stay, in `module.model`, under all of their names; buffers stay, too.
    """
    known = dict(module.named_parameters(remove_duplicate=False))
    stay = {id(known[f"model.{name}"]) for name in names}
    kept = {name for name, parameter in known.items() if id(parameter) in stay}

    def keep(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        parameters = {f"{prefix}{name}": item for name, item in module.named_parameters(remove_duplicate=False)}
        for name, parameter in parameters.items():
            if parameter.requires_grad and name.removeprefix(prefix) not in kept:
                raise ConfigError(
                    name,
                    "was frozen beside an adapter and is trained now: checkpoints hold the adapter alone",
                    "adapter.modules_to_save for modules that are trained whole, or unfreezing without an adapter",
                )
        for name in [name for name in state if name in parameters and name.removeprefix(prefix) not in kept]:
            del state[name]

    module.register_state_dict_post_hook(keep)


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters but those whose name, or that of a module around them, one of `patterns` matches.

    Args:
        patterns: as in plans, over whole dotted names.

    Raises:
        ConfigError: a pattern that matches nothing, or is none.
    """
    trained: set[int] = set()
    parameters = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        trained |= matching(pattern, parameters, "model.trainable", type(model).__name__, "model.trainable=[{}]")
    for _, parameter in parameters:
        parameter.requires_grad_(id(parameter) in trained)


def _by_tensor(model: nn.Module) -> dict[int, str]:
    """id of each tensor of the state -> its first name."""
    return {id(tensor): name for name, tensor in reversed(list(model.state_dict(keep_vars=True).items()))}


def _targets(model: nn.Module, settings: AdapterSettings) -> str | list[str]:
    if settings.target_modules != ALL_LINEAR:
        return settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    linear = linear_layers(model)
    whole = ending_with(settings.modules_to_save, linear)
    linear = [name for name in linear if name not in whole]
    if not linear:
        raise ConfigError(
            "adapter.target_modules=all-linear",
            f"{type(model).__name__} has no linear layer",
            "names of layers that PEFT knows",
            "adapter.target_modules=[...]",
        )
    ends = sorted({name.rpartition(".")[2] for name in linear})
    if set(ending_with(ends, [name for name, _ in model.named_modules()])) == set(linear):
        return ends
    return "|".join(map(re.escape, linear))


def _kept(model: nn.Module, settings: AdapterSettings) -> set[str]:
    """The modules that are trained whole, and those whose own parameters get an adapter."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    whole = ending_with(settings.modules_to_save, modules)
    return {*whole, *(name.rpartition(".")[0] for name in ending_with(settings.target_parameters, parameters))}


def _check_names(model: nn.Module, settings: AdapterSettings) -> None:
    """PEFT passes over a name that matches nothing as long as another one matches something."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    of = type(model).__name__
    for key, given, names in (
        ("target_modules", settings.target_modules, modules),
        ("exclude", settings.exclude, modules),
        ("modules_to_save", settings.modules_to_save, modules),
        ("target_parameters", settings.target_parameters, parameters),
    ):
        if given == ALL_LINEAR:
            continue
        if isinstance(given, str):
            try:
                matches = any(re.fullmatch(given, name) for name in names)
            except re.error as error:
                raise ConfigError(f"adapter.{key}={given}", f"no regular expression: {error}") from error
            if not matches:
                raise unmatched(key, given, of, names)
            continue
        for name in given:
            if not ending_with([name], names):
                raise unmatched(key, name, of, names)
