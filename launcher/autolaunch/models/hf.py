"""``model=hf``: a model of `transformers` for one of its tasks, built from its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autolaunch.models.hf_config import code_of, read_hf_config
from autolaunch.models.hf_tasks import MODEL_TASKS, ModelTask
from autolaunch_strategies.config import ConfigError, nearest

# Fields of config files that transformers 5 reads but does not declare, or no longer keeps under these names.
_OTHER_FIELDS = {"model_type", "rope_theta", "rope_scaling", "torch_dtype", "decoder_start_token_id"}

# Where a model class says which attention it can do.
_SUPPORTS = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}


def build_hf(model_cfg: Mapping[str, Any]) -> nn.Module:
    """The class for `model.task` of a `transformers` config, with its own random weights and no key/value cache.

    The `...ForCausalLM` takes ``input_ids`` [b, s] and returns an output with ``logits`` [b, s, vocab]. Weights have
    torch's default dtype, whatever the config file says: the precision of a run is the trainer's.

    Args:
        model_cfg: the fields of `autolaunch.config.schema.HFModel`. `pretrained` is not looked at: weights are read
            later, one at a time (`autolaunch.models.pretrained`).

    Raises:
        ConfigError: no such model_type, no class for the task, an unknown field, or values that the class or
            the attention implementation refuses; a family with another loss for the task than the one here.
    """
    fields = read_hf_config(model_cfg)
    import transformers
    from transformers import CONFIG_MAPPING

    task = model_cfg.get("task") or "causal_lm"
    auto_class: Any = getattr(transformers, MODEL_TASKS[task].auto_class)
    model_type = fields.pop("model_type")
    where = (
        f"model.config.model_type={model_type}" if model_cfg.get("path") is None else f"model.path={model_cfg['path']}"
    )
    if model_type not in CONFIG_MAPPING:
        close = nearest(model_type, CONFIG_MAPPING.keys())
        raise ConfigError(
            where,
            f"transformers has no model_type {model_type}" + (f"; did you mean {close}?" if close else ""),
            "a model_type of the installed transformers",
        )
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in auto_class._model_mapping:
        name = "causal language model" if task == "causal_lm" else f"class for model.task={task}"
        does = [other for other, entry in MODEL_TASKS.items() if config_class in _classes_of(transformers, entry)]
        suffix = MODEL_TASKS[task].auto_class.removeprefix("AutoModel")
        raise ConfigError(
            where,
            f"{model_type} has no {name}",
            f"a model_type with a ...{suffix} class",
            f"model.task={does[0]}" if does else "",
        )
    _check_fields(config_class, model_cfg.get("config") or {})
    try:
        config = config_class.from_dict(_with_floats(config_class, fields))
        config.use_cache = config.get_text_config().use_cache = False
    except Exception as error:  # every family validates in its own way
        raise ConfigError(where, f"transformers refuses this config: {_one_line(error)}") from error
    _check_loss(config, task)
    model_class: Any = auto_class._model_mapping[config_class]
    there = [name for name, flag in _SUPPORTS.items() if getattr(model_class, flag, True)] + ["eager"]
    attention = model_cfg.get("attn_implementation") or ("sdpa" if "sdpa" in there else "eager")
    if attention not in there:
        raise ConfigError(
            f"model.attn_implementation={attention}",
            f"transformers' {model_class.__name__} does not have it",
            ", ".join(there),
            "model.attn_implementation=eager",
        )
    try:
        model = auto_class.from_config(config, attn_implementation=attention, dtype=torch.get_default_dtype())
    except Exception as error:
        raise ConfigError(where, f"transformers cannot build this model: {_one_line(error)}") from error
    if not getattr(model, "_is_hf_initialized", False):
        # On the meta device transformers skips the initial weights, and 5.0 the tying of weights as well; whoever
        # records the constructor needs both.
        model.initialize_weights()
        model.tie_weights()
    return model


def _check_loss(config: Any, task: str) -> None:
    """Losses are computed here (`LanguageModel`, `TaskModule`).

    Raises:
        ConfigError: that of this family is another one.
    """
    if task == "masked_lm" and config.is_encoder_decoder:
        raise ConfigError(
            f"model.task={task}",
            f"{config.model_type} has a decoder, which is given the answer as far as it goes",
            "seq2seq_lm, with the whole sequence as labels",
            "model.task=seq2seq_lm",
        )
    # ProphetNet's: of the next `ngram` tokens, each smoothed by `eps`.
    if hasattr(config, "disable_ngram_loss") and (config.eps or (config.ngram > 1 and not config.disable_ngram_loss)):
        raise ConfigError(
            f"model.config.ngram={config.ngram}",
            f"the loss of {config.model_type} is one of several tokens for each position, which is not computed here",
            "the next token alone, or a LightningModule of your own that returns the loss of the model",
            "model.config.disable_ngram_loss=true" + (" model.config.eps=0.0" if config.eps else ""),
        )


def _classes_of(transformers: Any, task: ModelTask) -> Any:
    return getattr(transformers, task.auto_class)._model_mapping


def _check_fields(config_class: Any, overrides: Mapping[str, Any]) -> None:
    # A transformers config takes any keyword, so that a misspelt field would silently change nothing.
    defaults = config_class()
    known = sorted({*defaults.to_dict(), *config_class.attribute_map})
    code = code_of(config_class.model_type)
    for key in overrides:
        is_read = re.search(
            rf"\bconfig\.{key}\b|\bconfig, \"{key}\"", code
        )  # though not declared: Qwen3-MoE's head_dim
        if key not in _OTHER_FIELDS and key not in known and not hasattr(defaults, key) and not is_read:
            close = nearest(key, known)
            raise ConfigError(
                f"model.config.{key}",
                f"{config_class.__name__} has no such field" + (f"; did you mean {close}?" if close else ""),
                f"the fields of transformers.{config_class.__name__}",
            )


def _with_floats(config_class: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, whole numbers as floats where transformers takes no others: `0` is one in YAML, and in files."""
    # Types are looked at as text: some name what is imported for type checkers alone (`torch.dtype`).
    declared = {
        name: re.findall(r"\w+", str(field.type))
        for name, field in getattr(config_class, "__dataclass_fields__", {}).items()
    }
    wanted = {name for name, words in declared.items() if "float" in words and "int" not in words}
    return {key: float(value) if key in wanted and type(value) is int else value for key, value in fields.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
