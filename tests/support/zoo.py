"""The zoo: tiny models of many families that know nothing of parallelism, and small inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS = 64, 32, 4
_LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MANY_HEADS = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_GPT: dict[str, Any] = {
    "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": 32, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "pad_token_id": 0},
    "mistral": {**_LLAMA, "sliding_window": 4},
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 8},
    "gemma2": {**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "phi": {**_MANY_HEADS, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": _LLAMA,
    "gpt2": _GPT,
    "gpt_neox": _MANY_HEADS,
    "gptj": {**_GPT, "rotary_dim": 4},
    "opt": {
        "hidden_size": WIDTH, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS, "dropout": 0.0,
        "vocab_size": VOCABULARY, "max_position_embeddings": 32, "word_embed_proj_dim": WIDTH,
    },
    "bloom": {
        "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": VOCABULARY, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "falcon": {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": VOCABULARY,
        "multi_query": True, "new_decoder_architecture": False, "alibi": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    "olmo2": _LLAMA,
    "stablelm": _LLAMA,
    "starcoder2": {**_LLAMA, "residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "codegen": {**_GPT, "n_ctx": 32, "rotary_dim": 4},
    "mpt": {"d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "vocab_size": VOCABULARY, "max_seq_len": 32},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
}  # fmt: skip
"""Causal language models of `transformers` by model_type, with what makes them tiny."""


class Attention(nn.Module):
    """Fused projection in timm's manner: [b, n, 3 * h] seen as [b, n, 3, heads, size]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """Blocks of torch's own, which call their attention as query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids)))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_size = 8
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


OWN: dict[str, type[nn.Module]] = {"encoder": Encoder, "vision_transformer": VisionTransformer}
NAMES = [*CAUSAL, *OWN]


def make(name: str, **changes: Any) -> nn.Module:
    """A tiny model; `changes` go into its config."""
    if name in OWN:
        return OWN[name]()
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **{"use_cache": False, **CAUSAL[name], **changes})
    )


def batch(name: str, generator: torch.Generator, size: int = 4) -> dict[str, torch.Tensor]:
    """Inputs and labels; sequences of 12 of which the last two are padding."""
    if name == "vision_transformer":
        images = torch.randn(size, 3, 8, 8, generator=generator)
        return {"inputs": images, "labels": torch.randint(0, 10, (size,), generator=generator)}
    ids = torch.randint(0, VOCABULARY, (size, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    return {"inputs": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss(name: str, model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy."""
    data = dict(data)
    if name in OWN:
        logits = model(data["inputs"])
        return F.cross_entropy(logits.flatten(0, -2), data["labels"].flatten())
    output: SimpleNamespace = model(data.pop("inputs"), **data)
    return output.loss


# --- families that are cut into stages or have sequences divided ------------------------------------------------------

Data = dict[str, torch.Tensor]
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
    """A tiny model of any family here, the same at every call."""
    torch.manual_seed(3)
    if name not in MORE:
        family, changes = CHANGED.get(name, (name, {}))
        return make(family, **changes)
    import transformers

    kind, sizes = MORE[name]
    config = getattr(transformers, kind).config_class(**sizes)
    config.use_cache = False
    model = getattr(transformers, kind)(config)
    if name in EXAMPLES:
        model.example_input_array = EXAMPLES[name]
    return model


def batch_of(name: str) -> Data:
    """What a model is called with, by the names of its arguments; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    if name in ("swin", "convnext"):
        images = torch.randn(4, 3, 16 if name == "swin" else 32, 16 if name == "swin" else 32, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 1, 1, 0])}
    if name == "clip":
        ids = torch.randint(3, VOCABULARY, (4, 8), generator=generator)
        return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 16, 16, generator=generator)}
    data = batch("vision_transformer" if name == "vision_transformer" else "llama", generator)
    if name in OWN:
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
    """The function that gives the loss of a batch."""

    def step(data: Data) -> torch.Tensor:
        if name in OWN:
            return loss(name, model, data)
        extra = {"return_loss": True} if name == "clip" else {}
        return model(**data, **extra).loss

    return step


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(item.grad) for name, item in model.named_parameters() if item.grad is not None}
