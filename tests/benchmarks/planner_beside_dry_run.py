"""Memory that the planner predicts beside that of dry runs, for models of `transformers`, each in several ways.

    python tests/benchmarks/planner_beside_dry_run.py [KIND ...]

Small models of 128 positions, so that nothing but the structure tells: what blocks keep, what ranks of mp share out,
what a pipeline holds. Of each way the rank that is furthest off.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "strategies"), str(ROOT / "launcher")]

from autolaunch_strategies.planner.memory import memory_account  # noqa: E402 - behind the path
from autolaunch_strategies.planner.module_profile import profile_module  # noqa: E402 - behind the path
from autolaunch_strategies.planner.profile import ModelProfile, Recipe  # noqa: E402 - behind the path
from tests.dry_run.pretending import CausalModel, pretended_ranks, training_of  # noqa: E402 - behind the path
from tests.planner import memory_cases as cases  # noqa: E402 - behind the path
from tests.planner.test_memory import CPU  # noqa: E402 - behind the path

LIKE_LLAMA: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LIKE_GPT2: dict[str, Any] = {
    "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 512, "n_positions": 256, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROTARY_GPT = {**LIKE_GPT2, "rotary_dim": 16}
ALL_HEADS = {key: value for key, value in LIKE_LLAMA.items() if key != "num_key_value_heads"}
HEADS_OF_32 = {**LIKE_LLAMA, "head_dim": 32}
GEMMA = {**HEADS_OF_32, "query_pre_attn_scalar": 32, "sliding_window": 16}
KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "phi3", "olmo", "olmo2", "stablelm", "cohere", "granite"), LIKE_LLAMA),
    **dict.fromkeys(("nemotron", "smollm3", "ernie4_5"), LIKE_LLAMA),
    **dict.fromkeys(("qwen3", "glm", "exaone4"), HEADS_OF_32),
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA),
    **dict.fromkeys(("gpt_neox", "persimmon"), ALL_HEADS),
    **dict.fromkeys(("gptj", "codegen"), ROTARY_GPT),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), LIKE_GPT2),
    "mistral": {**LIKE_LLAMA, "sliding_window": 16},
    "starcoder2": {**LIKE_LLAMA, "residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "phi": {**ALL_HEADS, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "biogpt": {**ALL_HEADS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "opt": {
        "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "dropout": 0.0,
        "vocab_size": 512, "max_position_embeddings": 256, "word_embed_proj_dim": 128, "pad_token_id": 1,
    },
    "bloom": {
        "hidden_size": 128, "n_layer": 4, "n_head": 4, "vocab_size": 512, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "falcon": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512, "multi_query": True,
        "new_decoder_architecture": False, "alibi": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    "mpt": {"d_model": 128, "n_layers": 4, "n_heads": 4, "vocab_size": 512, "max_seq_len": 256},
    "gpt_neo": {
        "hidden_size": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 512, "max_position_embeddings": 256,
        "attention_types": [[["global", "local"], 2]], "window_size": 16, "resid_dropout": 0.0, "embed_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "xglm": {
        "d_model": 128, "ffn_dim": 256, "num_layers": 4, "attention_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 256, "dropout": 0.0, "attention_dropout": 0.0,
    },
}  # fmt: skip
"""Model types of `transformers` -> their sizes."""

WAYS = {
    "one": cases.case(),
    "selective": cases.case(recompute=-1),
    "fsdp": cases.case(dp=2, level=3),
    "mp": cases.case(mp=2),
    "mp_sp": cases.case(mp=2, sequence_parallel=1),
    "1f1b": cases.case(pp=2, pipeline="1f1b", microbatches=4),
    "1f1b_full": cases.case(pp=2, pipeline="1f1b", microbatches=4, recompute=1),
}
FAR = 0.05


def off(kind: str, profile: ModelProfile, way: str) -> float | str:
    """Of the rank that is furthest off: predicted over dry run, minus 1. Or why there is no dry run."""
    candidate = cases.candidate(WAYS[way])
    account = memory_account(profile, Recipe(batch_size=cases.BATCH), CPU, candidate)
    try:
        ranks = pretended_ranks(training_of(candidate, lambda: CausalModel(kind, KINDS[kind])))
    except Exception as error:  # whatever a model does that no dry run can
        return str(error).splitlines()[0]
    return max((account[rank.pipe_rank]["total"] / rank.total - 1 for rank in ranks), key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all if none")
    kinds = parser.parse_args().kinds or list(KINDS)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"{'':<12}" + "".join(f"{way:>11}" for way in WAYS))
    found: list[float] = []
    notes: list[str] = []
    for kind in kinds:
        profile = profile_module(CausalModel(kind, KINDS[kind]), cases.POSITIONS, device_type="cpu")
        line = f"{kind:<12}"
        for way in WAYS:
            value = off(kind, profile, way)
            if isinstance(value, str):
                notes.append(f"{kind}, {way}: {value}")
                line += f"{'-':>11}"
                continue
            found.append(value)
            line += f"{value:>+10.1%}{'*' if abs(value) > FAR else ' '}"
        print(line, flush=True)
    far = sum(abs(value) > FAR for value in found)
    mean = sum(map(abs, found)) / len(found)
    print(f"\n{len(found)} ways: {mean:.1%} off on average, {far} by more than {FAR:.0%} (*)")
    print("\n".join(notes))


if __name__ == "__main__":
    main()
