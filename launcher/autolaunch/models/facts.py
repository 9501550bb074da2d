"""The sizes of a model that the rest of a config must fit: known before the model is built, and without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autolaunch.models.hf_config import code_of, read_hf_config
from autolaunch.models.llama_config import llama_config


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model; None where they cannot be known without building it."""

    name: str
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    max_seq_len: int | None = None
    num_experts: int | None = None
    """Of a layer with a mixture of them; 0 where there is none."""
    attention_dropout: tuple[str, float] | None = None
    """The key that says how many attention weights are dropped in training, and that share; None if it is none."""


# How the families of `transformers` spell the same size, the usual spelling first.
_SPELLINGS = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def begins_random(config: Mapping[str, Any]) -> bool:
    """Whether the weights of a job are random at its start; of a class of one's own nobody knows."""
    model = config["model"]
    if config["ckpt_path"] is not None or config["module"] is not None or "_target_" in model:
        return False
    return model["name"] == "llama" or (model["name"] == "hf" and (model["path"] is None or not model["pretrained"]))


def model_facts(model_cfg: Mapping[str, Any]) -> ModelFacts:
    """What can be said of a model from its config alone.

    Args:
        model_cfg: the group `model` of a resolved job.

    Raises:
        ConfigError: the shapes of a llama do not fit together, or a `transformers` config cannot be read.
    """
    name = str(model_cfg.get("name") or "custom")
    if "_target_" in model_cfg:
        return ModelFacts(name)
    if name == "llama":
        config = llama_config(model_cfg)
        sizes: dict[str, Any] = {size: getattr(config, size, 0) for size in _SPELLINGS}  # it has no experts
        return ModelFacts(name, **sizes)
    fields = read_hf_config(model_cfg)
    # Models of text and images keep the sizes of their decoder one level down.
    fields = {**fields, **fields.get("text_config", {})}
    sizes = {}
    for size, spellings in _SPELLINGS.items():
        values = (fields.get(spelling) for spelling in spellings)
        number = next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
        if number is not None:
            sizes[size] = number
    if "num_experts" not in sizes and (experts := _experts_by_default(fields)) is not None:
        sizes["num_experts"] = experts
    if "vocab_size" not in sizes and (tokens := _vocabulary_by_default(fields)) is not None:
        sizes["vocab_size"] = tokens
    if "max_seq_len" not in sizes and (positions := _positions_by_default(fields)) is not None:
        sizes["max_seq_len"] = positions
    shares = {key: value for key in _DROPOUTS if isinstance(value := fields.get(key), int | float) and value}
    return ModelFacts(name, **sizes, attention_dropout=next(iter(shares.items()), None))


def _experts_by_default(fields: Mapping[str, Any]) -> int | None:
    """How many experts a layer has where the config does not say it; 0 if the code of the model has no such word."""
    code = code_of(str(fields["model_type"]))
    if not code:
        return None
    if "expert" not in code.lower():
        return 0
    return _default("|".join(_SPELLINGS["num_experts"]), code)


def _vocabulary_by_default(fields: Mapping[str, Any]) -> int | None:
    """How many token ids a model knows where the config does not say it; None if its code has several configs."""
    code = code_of(str(fields["model_type"]))
    return _default("vocab_size", code) if len(re.findall(r"(?m)^class \w+Config\(", code)) == 1 else None


def _positions_by_default(fields: Mapping[str, Any]) -> int | None:
    """How long the table of learned positions is where the config does not say it; None if the code does not, either.

    Rotary models have no such table, and go on beyond their `max_position_embeddings`.
    """
    code = code_of(str(fields["model_type"]))
    names = "|".join(_SPELLINGS["max_seq_len"])
    table = re.search(rf"(?:\bnn\.|Learned\w*)Embedding\(\s*(?:self\.)?config\.({names})\b", code)
    if table is None or len(re.findall(r"(?m)^class \w+Config\(", code)) > 1:  # of which part is not said
        return None
    another = re.search(rf'"{table[1]}": "(\w+)"', code)  # its name in config.json
    return _default(another[1] if another else table[1], code)


def _default(names: str, code: str) -> int | None:
    """The number that the code of a model gives to a field of its config; None if that are several, or none.

    Args:
        names: of the field, with `|` between them.
    """
    numbers = set(re.findall(rf"(?m)^ +(?:{names})(?:: [^=\n]+?)? ?= ?(\d+),?$", code))
    return int(numbers.pop()) if len(numbers) == 1 else None
