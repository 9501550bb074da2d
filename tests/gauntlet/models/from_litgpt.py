"""Models of litgpt, by its configs."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.gauntlet.row import Row, classes, next_token

TOKENS = 64


def _make(name: str, changes: dict[str, Any]) -> nn.Module:
    from litgpt import GPT, Config

    sizes: dict[str, Any] = {
        "n_layer": 2, "n_embd": 32, "n_head": 4, "block_size": 32, "padded_vocab_size": TOKENS, **changes,
    }  # fmt: skip
    return GPT(Config.from_name(name, **sizes))


def _row(name: str, **changes: Any) -> Row:
    return Row("litgpt", name, lambda: _make(name, changes), {"ids": classes(TOKENS, 13)}, next_token)


_LLAMA = {"n_query_groups": 2, "intermediate_size": 48}

ROWS = [
    _row("pythia-14m", intermediate_size=48),
    _row("Llama-2-7b-hf", intermediate_size=48),
    _row("Llama-3.2-1B", **_LLAMA),
    _row("Mistral-7B-v0.1", **_LLAMA),
    _row("Gemma-2-2b", **_LLAMA, head_size=8),
    _row("Gemma-3-1b-it", **_LLAMA, head_size=8, sliding_window_indices=[1, 0], rope_indices=[1, 0]),
    _row("phi-2", intermediate_size=48),
    _row("falcon-7b", n_query_groups=1),
    _row("stablelm-base-alpha-3b", intermediate_size=48),
    _row("Qwen2.5-0.5B", **_LLAMA),
    _row("Qwen3-0.6B", **_LLAMA, head_size=8),
    _row("OLMo-2-1124-7B", intermediate_size=48, n_query_groups=4),
    _row("Mixtral-8x7B-v0.1", **_LLAMA, n_expert=4, n_expert_per_token=2),
]
