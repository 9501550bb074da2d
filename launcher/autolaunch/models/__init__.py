"""What is trained: the model of a resolved job, and the LightningModule around it. Imports torch only to build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autolaunch.models.hf_tasks import task_of
from autolaunch.models.label_positions import labels_of
from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch import nn

    from autolaunch.models.adapters import Adapted
    from autolaunch.models.language_model import MeanLossModule, SupervisedModule


def build_model(model_cfg: Mapping[str, Any]) -> nn.Module:
    """The module that the group `model` describes, on torch's default device and in its default dtype.

    Args:
        model_cfg: the fields of `autolaunch.config.schema.LlamaModel` or `HFModel`, or any dict with `_target_`.

    Raises:
        ConfigError: shapes that do not fit together, a config that `transformers` refuses, or a wrong `_target_`.
    """
    if "_target_" in model_cfg:
        from torch import nn

        from autolaunch.instantiate import build

        model = build(model_cfg, "model", ("name", "loss", "mp_plans", "trainable"))
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model._target_={model_cfg['_target_']}",
                f"it returns a {type(model).__name__}",
                "a torch.nn.Module class, or a function that returns a module",
            )
        return model
    name = model_cfg.get("name")
    if name == "llama":
        from autolaunch.models.llama import Llama
        from autolaunch.models.llama_config import llama_config

        return Llama(llama_config(model_cfg))
    if name == "hf":
        from autolaunch.models.hf import build_hf

        return build_hf(model_cfg)
    raise ConfigError(
        f"model.name={name}",
        "no such model",
        "llama, hf, or any model with _target_",
        "model=custom model._target_=...",
    )


def build_module(job_config: Mapping[str, Any]) -> LightningModule:
    """The LightningModule of a resolved job: the user's own, or one around the model of the group `model`.

    Args:
        job_config: the fields of `autolaunch.config.schema.Job`.

    Raises:
        ConfigError: as `build_model`, a wrong `module._target_`, or no such loss.
    """
    from lightning.pytorch import LightningModule

    if job_config.get("module"):
        from autolaunch.instantiate import build

        node = job_config["module"]
        if "_target_" not in node:
            raise ConfigError(
                "module",
                "it does not say which LightningModule",
                "the import path of a LightningModule class, and its arguments",
                "module._target_=my_project.MyModule",
            )
        module = build(node, "module")
        if not isinstance(module, LightningModule):
            raise ConfigError(
                f"module._target_={node['_target_']}", f"it returns a {type(module).__name__}", "a LightningModule"
            )
        return module
    model, adapted = build_adapted_model(job_config)
    module = _around(model, job_config)
    if job_config["optimizer"].get("groups"):
        from autolaunch.models.language_model import trained_names
        from autolaunch.models.optimizer import parameter_groups

        parameter_groups(trained_names(module), job_config["optimizer"])  # a wrong name is told before anything else
    if adapted is not None:
        from autolaunch.models.adapters import save_only

        save_only(module, adapted.trained)
        module.adapted = adapted
    return module


def build_adapted_model(job_config: Mapping[str, Any]) -> tuple[nn.Module, Adapted | None]:
    """The model of a resolved job with its adapter, if it has one; what is not trained is frozen.

    Raises:
        ConfigError: as `build_model`; a name of the adapter or of `model.trainable` that is that of nothing.
    """
    model_cfg = job_config["model"]
    model = build_model(model_cfg)
    adapter_cfg, trainable = job_config.get("adapter"), model_cfg.get("trainable")
    if adapter_cfg is not None:
        from autolaunch.models.adapters import add_adapter

        return model, add_adapter(model, adapter_cfg, model_cfg)
    if trainable is not None:
        from autolaunch.models.adapters import train_only

        train_only(model, trainable)
    return model, None


def _around(model: nn.Module, job_config: Mapping[str, Any]) -> MeanLossModule | SupervisedModule:
    from autolaunch.models.language_model import LanguageModel, SupervisedModule

    model_cfg = job_config["model"]
    rest = job_config["optimizer"], job_config["scheduler"], job_config["trainer"]["max_steps"]
    if "_target_" in model_cfg:
        return SupervisedModule(model, model_cfg.get("loss", "cross_entropy"), *rest)
    task = task_of(model_cfg)
    if task not in (None, "causal_lm"):
        from autolaunch.models.task_module import TaskModule

        return TaskModule(model, str(task), *rest)
    from autolaunch.models.documents import check_keeps_documents_apart, why_documents_meet

    data = job_config["data"]
    if data.get("packing") == "documents":
        check_keeps_documents_apart(model, data["seq_len"])
    documents_meet = why_documents_meet(model) if "_target_" in data else ""  # they may be packed
    return LanguageModel(model, *rest, labels=labels_of(data), documents_meet=documents_meet)
