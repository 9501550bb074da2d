"""Adapters of peft on a small Llama: most parameters are frozen."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.gauntlet.models.from_transformers import LLAMA, TEXT
from tests.gauntlet.row import Row, own

_PROJECTIONS = ["q_proj", "v_proj"]


def _make(kind: str, arguments: dict[str, Any]) -> nn.Module:
    import peft
    import transformers

    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, use_cache=False))
    return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **arguments))


def _row(name: str, kind: str, **arguments: Any) -> Row:
    return Row("peft", name, lambda: _make(kind, arguments), TEXT, own)


ROWS = [
    _row("lora", "LoraConfig", r=4, target_modules=_PROJECTIONS, init_lora_weights=False),
    _row("lora-all-linear", "LoraConfig", r=4, target_modules="all-linear", init_lora_weights=False),
    _row("lora-head", "LoraConfig", r=4, target_modules=_PROJECTIONS, modules_to_save=["lm_head"]),
    _row("dora", "LoraConfig", r=4, target_modules=_PROJECTIONS, use_dora=True, init_lora_weights=False),
    _row("rslora", "LoraConfig", r=4, target_modules=_PROJECTIONS, use_rslora=True),
    _row("loha", "LoHaConfig", r=4, target_modules=_PROJECTIONS, init_weights=False),
    _row("lokr", "LoKrConfig", r=4, target_modules=_PROJECTIONS, init_weights=False),
    _row("ia3", "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    _row("vera", "VeraConfig", r=4, d_initial=1.0, target_modules=["q_proj"]),
    _row("oft", "OFTConfig", r=4, oft_block_size=0, target_modules=_PROJECTIONS),
    _row("layer-norm-tuning", "LNTuningConfig", target_modules=["input_layernorm"]),
    _row("prompt-tuning", "PromptTuningConfig", num_virtual_tokens=4),
    _row("prefix-tuning", "PrefixTuningConfig", num_virtual_tokens=4),
    _row("p-tuning", "PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
]
