"""What `transformers` needs beside the weights to load a model that was trained here."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autolaunch.models.llama_config import LlamaConfig, llama_config


def write_transformers_files(
    directory: Path, model_cfg: Mapping[str, Any], model: nn.Module, dtype: str, unties: bool = False
) -> None:
    """Write config.json into `directory`.

    Args:
        model_cfg: the fields of `autolaunch.config.schema.LlamaModel` or `HFModel`; other models get no config.json.
        model: the module that was trained (may be on meta).
        dtype: of the exported weights, e.g. ``float32``.
        unties: whether embedding and head, which share their weight in `model`, have one each in the files.
    """
    if model_cfg.get("name") == "llama" and "_target_" not in model_cfg:
        config = _llama(llama_config(model_cfg), dtype)
        config["tie_word_embeddings"] &= not unties
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    elif hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
        shape: Any = copy.deepcopy(model.config)
        for part in {id(part): part for part in (shape, shape.get_text_config())}.values():
            part.dtype = getattr(torch, dtype)
            if unties:
                part.tie_word_embeddings = False
        shape.save_pretrained(directory)


def _llama(shape: LlamaConfig, dtype: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if shape.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_freq_factor,
            "high_freq_factor": shape.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_max_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tie_embeddings,
        "initializer_range": shape.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
