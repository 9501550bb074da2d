"""Cases of the zoo in stages: loss and gradients of one step; a case is `<family>:<pp>`, a group a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autolaunch_strategies.apply import apply_parallelism
from autolaunch_strategies.config import ConfigError, parallel_config, parse_mesh
from autolaunch_strategies.mesh import RankMesh
from autolaunch_strategies.pipeline.loop import forward_backward_of
from autolaunch_strategies.views import plain
from tests.support import zoo_models
from tests.support.cases import serve
from tests.support.zoo_models import HEADS, VOCABULARY, WIDTH

CPU = torch.device("cpu")
Data = dict[str, torch.Tensor]

# --- families that are not in the zoo of mp -------------------------------------------------------------------------

_ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_SEQUENCES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "dropout": 0.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_LLAMA = zoo_models._LLAMA
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _ENCODER),
    "roberta": ("RobertaForSequenceClassification", _ENCODER),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {
            "vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 48, "dropout": 0.0,
            "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
        },
    ),
    "deberta_v2": (
        "DebertaV2ForSequenceClassification",
        {**_ENCODER, "relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8},
    ),
    "albert": ("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS,
            "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
    ),
    "bart": ("BartForConditionalGeneration", {**_SEQUENCES, "max_position_embeddings": 32}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_SEQUENCES, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
    ),
    "mamba": ("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 4,
              "num_hidden_layers": 2}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32, "resid_dropout": 0.0,
            "embed_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_LLAMA, "num_key_value_heads": HEADS, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {
                "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
                "vocab_size": VOCABULARY, "max_position_embeddings": 32, "projection_dim": 16, "eos_token_id": 2,
                "bos_token_id": 1, "pad_token_id": 0,
            },
            "vision_config": {
                "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
                "image_size": 16, "patch_size": 4,
            },
            "projection_dim": 16,
        },
    ),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
            "window_size": 4, "drop_path_rate": 0.0,
        },
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "drop_path_rate": 0.0},
    ),
}  # fmt: skip
EXAMPLES: dict[str, dict[str, torch.Tensor]] = {
    "whisper": {"input_features": torch.zeros(2, 8, 40), "decoder_input_ids": torch.zeros(2, 5, dtype=torch.long)},
    "clip": {"input_ids": torch.zeros(2, 8, dtype=torch.long), "pixel_values": torch.zeros(2, 3, 16, 16)},
}
"""Families whose inputs have to be shown: `example_input_array` of the model."""
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_4": ("llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "gpt2_4": ("gpt2", {"n_layer": 4}),
    "qwen3_moe_4": ("qwen3_moe", {"num_hidden_layers": 4}),
    "mixtral_router_logits": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "qwen3_moe_router_logits": ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
}
"""Families of the zoo with something changed in their config."""


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name not in MORE:
        family, changes = CHANGED.get(name, (name, {}))
        return zoo_models.make(family, **changes)
    import transformers

    kind, sizes = MORE[name]
    config = getattr(transformers, kind).config_class(**sizes)
    config.use_cache = False
    model = getattr(transformers, kind)(config)
    if name in EXAMPLES:
        model.example_input_array = EXAMPLES[name]
    return model


def batch(name: str) -> Data:
    generator = torch.Generator().manual_seed(0)
    if name in ("swin", "convnext"):
        images = torch.randn(4, 3, 16 if name == "swin" else 32, 16 if name == "swin" else 32, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 1, 1, 0])}
    if name == "clip":
        ids = torch.randint(3, VOCABULARY, (4, 8), generator=generator)
        return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 16, 16, generator=generator)}
    data = zoo_models.batch("vision_transformer" if name == "vision_transformer" else "llama", generator)
    if name in zoo_models.OWN:
        return data
    data["input_ids"] = data.pop("inputs")
    if "Sequence" in MORE.get(name, ("", {}))[0]:
        data["labels"] = torch.tensor([0, 1, 1, 0])
    if name == "mamba":
        del data["attention_mask"]
    if name == "whisper":
        return {"input_features": torch.randn(4, 8, 40, generator=generator), "labels": data["input_ids"][:, :5]}
    return data


def step_of(name: str, model: nn.Module) -> Callable[[Data], torch.Tensor]:
    def step(data: Data) -> torch.Tensor:
        if name in zoo_models.OWN:
            return zoo_models.loss(name, model, data)
        extra = {"return_loss": True} if name == "clip" else {}
        return model(**data, **extra).loss

    return step


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(item.grad) for name, item in model.named_parameters() if item.grad is not None}


def run(name: str, mesh: str, pp: str) -> dict[str, Any]:
    alone = made(name)
    loss = step_of(name, alone)(batch(name))
    loss.backward()
    config = parallel_config(parse_mesh(mesh), 0, {"sequence_parallel": True}, pp)
    ranks = RankMesh.build(config.mesh, *config.dp.split(config.mesh.dp), "cpu")
    model = made(name)
    applied = apply_parallelism(model, config, ranks, CPU)
    share = config.mesh.dp, ranks.coordinate["dp"]
    data = {key: value.chunk(share[0])[share[1]] for key, value in batch(name).items()}
    forward_backward = forward_backward_of(model, applied.pipeline, applied.data_parallel)
    with applied.model_parallel.running():
        found = forward_backward(lambda data: plain(step_of(name, model)(data)), data)
    dist.all_reduce(found)
    return {
        "expected": (loss.detach(), gradients(alone)),
        "found": (found / dist.get_world_size(), gradients(model)),
        "stages": applied.account["pp"]["stages"],
    }


def told_or(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns, or what it was refused with."""
    try:
        return function()
    except ConfigError as error:
        return {"refused": str(error)}


def case(mesh: str, name: str, pp: str) -> dict[str, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return told_or(lambda: run(name, mesh, pp))


DEEP = ("llama_4", "gpt2_4", "qwen3_moe_4")
"""Families with as many blocks as schedules of several stages need."""

EXACT = [name for name in (*zoo_models.NAMES, *MORE, *CHANGED) if name not in DEEP]
MESHES: dict[str, tuple[str, int, list[str]]] = {
    "pp2": (
        "1x1x2",
        2,
        [f"{name}:exact" for name in EXACT]
        + [f"{name}:{pp}" for name in DEEP for pp in ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")],
    ),
    "mp2pp2": (
        "1x2x2",
        4,
        ["llama_4:exact", "gpt2_4:exact", "gemma2:exact", "qwen3_moe_router_logits:exact", "t5:exact", "llama_4:1f1b"],
    ),
}
"""Name of a group -> mesh, ranks, cases."""

GROUPS = {
    group: {name: partial(case, mesh, *name.split(":")) for name in cases} for group, (mesh, _, cases) in MESHES.items()
}

if __name__ == "__main__":
    serve(GROUPS, tensors=True)
