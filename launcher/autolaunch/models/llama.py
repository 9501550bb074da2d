"""The decoder of Llama 2 and 3 in plain single-device PyTorch.

Module names are those of transformers' `LlamaForCausalLM`, so that weights go both ways unchanged.
Shapes: b batch, s sequence, h query heads, k key/value heads, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autolaunch.models.llama_config import LlamaConfig
from autolaunch_strategies.model.document_attention import document_attention, documents_of, is_documents
from autolaunch_strategies.torch_private.attention import with_heads_for_kernels


class RMSNorm(nn.Module):
    """Scale `[..., size]` to unit root mean square, computed in fp32, times a learned weight (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Angles of rotary positions (arXiv 2104.09864), with the frequency scaling of Llama 3.1."""

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq = 1.0 / config.rope_theta**exponent
        if scaling := config.rope_scaling:
            # How many turns a frequency makes within the original length decides how much of it is stretched.
            turns = scaling.original_max_seq_len * inv_freq / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            kept = kept.clamp(0.0, 1.0)
            inv_freq = kept * inv_freq + (1 - kept) * inv_freq / scaling.factor
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryEmbedding:
        # model.to(bfloat16) would round the frequencies, and at position 8192 the angle is then wrong by whole turns.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != exact.dtype:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [b, 1, s, d] in `dtype`, of the angles at `position_ids` [b, s]."""
        angles = position_ids[:, None, :, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of `x` [b, h, s, d] by their angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def within_documents(position_ids: Tensor) -> Tensor:
    """What each token sees, bool [b, 1, s, s]: its document up to itself. A document begins where a position is 0."""
    document = (position_ids == 0).cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones_like(same).tril()


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads; a mask says what is seen instead (`within_documents`).

    The mask may also be where documents begin (`documents_of`), which a kernel for them goes by.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if mask is not None and is_documents(mask):
            out = document_attention(q, k, v, mask)
        else:
            k, v = with_heads_for_kernels(q, k, v, mask)
            grouped, causal = k.shape[1] != q.shape[1], mask is None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream [b, s, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids [b, s] to normalised hidden states [b, s, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.documents_by_kernel = False
        """Whether attention within documents is computed by `document_attention` and not with a mask."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        mask = None
        if position_ids is not None and self.documents_by_kernel:
            mask = documents_of(position_ids.expand_as(input_ids) == 0)
        elif position_ids is not None:
            mask = within_documents(position_ids)
        else:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(position_ids, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Llama(nn.Module):
    """A causal language model.

    Args of `forward`:
        input_ids: [b, s] int64.
        position_ids: [b, s] or [1, s] int64; 0, 1, 2, ... if not given. Each 0 begins a document, and no token sees
            those of another one.

    Returns:
        logits [b, s, vocab_size].
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=config.init_std)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.lm_head(self.model(input_ids, position_ids))
