"""The shape of a Llama: published sizes, overrides, and whether the numbers fit together. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config import ConfigError, nearest, raise_all


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3 stretches its rotary frequencies beyond the length it was first trained on.

    Wavelengths above `original_max_seq_len / low_freq_factor` positions grow by `factor`, those below
    `original_max_seq_len / high_freq_factor` stay, those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that decides the shape and the arithmetic of a Llama decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02


_LLAMA3 = {
    "vocab_size": 128_256,
    "num_kv_heads": 8,
    "max_seq_len": 131_072,
    "rope_theta": 500_000.0,
    "norm_eps": 1e-5,
}


def _scaled(factor: float) -> dict[str, Any]:
    return {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}


# The published shapes are those of the config.json files of Llama 3.2 1B and Llama 3.1 8B, 70B and 405B.
SIZES: dict[str, dict[str, Any]] = {
    "debug": {
        "vocab_size": 320,  # the 256 bytes and an end-of-text token, padded to a multiple of 64
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_seq_len": 1024,
        "rope_theta": 10_000.0,
        "rope_scaling": {},
        "norm_eps": 1e-5,
        "tie_embeddings": False,
    },
    "1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "rope_scaling": _scaled(32.0),
        "tie_embeddings": True,
    },
    "8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_layers": 32,
        "num_heads": 32,
        "rope_scaling": _scaled(8.0),
        "tie_embeddings": False,
    },
    "70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_layers": 80,
        "num_heads": 64,
        "rope_scaling": _scaled(8.0),
        "tie_embeddings": False,
    },
    "405b": {
        **_LLAMA3,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_layers": 126,
        "num_heads": 128,
        "rope_scaling": _scaled(8.0),
        "tie_embeddings": False,
    },
}


def llama_config(model_cfg: Mapping[str, Any]) -> LlamaConfig:
    """The shape that ``model=llama`` means: its size's published values, replaced by every key that is not null.

    Args:
        model_cfg: the fields of `autolaunch.config.schema.LlamaModel`; missing ones count as null.

    Raises:
        ConfigError: no such size, sizes that do not divide, or a wrong `rope_scaling`.
        ConfigErrors: several of these at once.
    """
    size = model_cfg.get("size") or "debug"
    if size not in SIZES:
        raise ConfigError(f"model.size={size}", "no such size of llama", ", ".join(SIZES))
    fields = {field.name for field in dataclasses.fields(LlamaConfig)}
    overrides = {key: value for key, value in model_cfg.items() if key in fields and value is not None}
    values = {**SIZES[size], **overrides}
    errors = [] if "head_dim" in overrides else _check_hidden_size(values)
    errors += _check_kv_heads(values, overrides, size)
    values.setdefault("head_dim", values["hidden_size"] // values["num_heads"])
    if not errors and values["head_dim"] % 2:
        errors.append(
            ConfigError(
                f"model.head_dim={values['head_dim']}",
                "rotary embeddings turn pairs of values, so the width of a head must be even"
                + ("" if "head_dim" in overrides else "; it is hidden_size / num_heads"),
                "an even number",
            )
        )
    errors += _check_rope_scaling(values["rope_scaling"])
    raise_all(errors)
    scaling = values["rope_scaling"]
    values["rope_scaling"] = RopeScaling(**scaling) if scaling else None
    return LlamaConfig(**values)


def _check_hidden_size(values: Mapping[str, Any]) -> list[ConfigError]:
    hidden, heads = values["hidden_size"], values["num_heads"]
    if hidden % heads == 0:
        return []
    return [
        ConfigError(
            f"model.num_heads={heads}",
            f"it must divide model.hidden_size={hidden}, or model.head_dim must be set",
            f"a divisor of {hidden}",
            f"model.num_heads={_nearest_divisor(hidden, heads)}",
        )
    ]


def _check_kv_heads(values: Mapping[str, Any], overrides: Mapping[str, Any], size: str) -> list[ConfigError]:
    heads, kv_heads = values["num_heads"], values["num_kv_heads"]
    if heads % kv_heads == 0:
        return []
    own = "" if "num_kv_heads" in overrides else f", which is size {size}'s own,"
    return [
        ConfigError(
            f"model.num_kv_heads={kv_heads}",
            f"every key/value head serves equally many query heads, so it{own} must divide model.num_heads={heads}",
            f"a divisor of {heads}",
            f"model.num_kv_heads={_nearest_divisor(heads, kv_heads)}",
        )
    ]


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = (divisor for divisor in range(1, number + 1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))


def _check_rope_scaling(scaling: Mapping[str, Any]) -> list[ConfigError]:
    if not scaling:
        return []
    keys = [field.name for field in dataclasses.fields(RopeScaling)]
    errors = []
    for key, value in scaling.items():
        if key not in keys:
            close = nearest(str(key), keys)
            meant = f"; did you mean model.rope_scaling.{close}?" if close else ""
            errors.append(ConfigError(f"model.rope_scaling.{key}", f"no such key{meant}", ", ".join(keys)))
        elif isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            errors.append(ConfigError(f"model.rope_scaling.{key}={value}", "not a positive number", "a number above 0"))
    missing = [key for key in keys if key not in scaling]
    if errors:
        return errors
    if missing:
        return [
            ConfigError(
                "model.rope_scaling",
                f"without {', '.join(missing)}",
                f"all of {', '.join(keys)}; or {{}} for no scaling",
            )
        ]
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        return [
            ConfigError(
                f"model.rope_scaling.low_freq_factor={scaling['low_freq_factor']}",
                f"it must be below model.rope_scaling.high_freq_factor={scaling['high_freq_factor']}",
                "low_freq_factor < high_freq_factor, as in Llama 3: 1.0 and 4.0",
            )
        ]
    return []
