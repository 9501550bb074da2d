"""Profiles of transformer decoders by formula: for published measurements, and where there is no module to trace.

Bytes that are kept for the backward pass follow Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), section 4, generalised to other feed-forward sizes, gated ones, grouped keys and fused
attention.
"""

from __future__ import annotations

from typing import Literal

from autolaunch_strategies.planner.profile import Attention, Compiled, MatMul, ModelProfile, Part


def transformer_profile(
    layers: int,
    hidden: int,
    heads: int,
    positions: int,
    vocab: int,
    *,
    kv_heads: int | None = None,
    ffn: int | None = None,
    head_dim: int | None = None,
    glu: bool = False,
    attention: Literal["fused", "plain"] = "fused",
    causal: bool = True,
    dropout: bool = False,
    bias: bool = False,
    tied: bool = False,
    learned_positions: bool = False,
    selective: Literal["outputs", "attention"] = "outputs",
    written_out: bool = False,
    element_bytes: int = 2,
    logit_bytes: float = 12,
    name: str = "",
) -> ModelProfile:
    """A decoder of equal blocks (norm, attention, norm, feed-forward) with a language-model head and its loss.

    GPT-3 as in Megatron is `attention="plain", dropout=True, bias=True, tied=True, learned_positions=True`; Llama is
    `glu=True` with `kv_heads` and `ffn`.

    Args:
        kv_heads: heads of keys and values; None: as many as `heads`.
        ffn: width of the feed-forward layer; None: four times `hidden`.
        head_dim: None: hidden / heads.
        glu: whether the feed-forward layer is gated: three matrices.
        attention: `plain` computes and keeps the scores of all positions; `fused` (flash) keeps none.
        dropout: on attention, embeddings and both branches; its masks are kept.
        tied: whether the head uses the weights of the embedding.
        selective: what `recompute=selective` does: `outputs` keeps outputs of matrix products and attention, and
            computes the rest again, as our runtime; `attention` computes again what is between keys and the output
            of plain attention, as Megatron.
        written_out: whether norms, rotary positions and gates are operators of torch, as in Llama's code, each a kernel
            that keeps what it needs; else one kernel each, which keeps its inputs.
        element_bytes: of an activation.
        logit_bytes: for each logit, all that the loss needs, of which 4 (the logits in fp32) are kept.

    Returns:
        Numbers of one sequence; no kernel counts as divided (there are no DTensors).
    """
    kv_heads, ffn, head_dim = kv_heads or heads, ffn or 4 * hidden, head_dim or hidden // heads
    query, keys, e, s = heads * head_dim, kv_heads * head_dim, element_bytes, positions
    up = 2 * ffn if glu else ffn
    plain = attention == "plain"
    masks = 1 if dropout else 0

    matmuls = [
        MatMul(s, hidden, query + 2 * keys, 1, "columns"),
        MatMul(s, query, hidden, 1, "inner"),
        MatMul(s, hidden, up, 1, "columns"),
        MatMul(s, ffn, hidden, 1, "inner"),
    ]
    kept = selective == "outputs"
    scores = 0.0  # bytes of whatever has an element for each pair of positions
    if plain:
        matmuls[1:1] = [
            MatMul(s, head_dim, s, heads, "count", kept=kept),
            MatMul(s, s, head_dim, heads, "count", kept=kept),
        ]
        scores = float(heads) * s * s
    divided_weights = hidden * (query + 2 * keys) + query * hidden + hidden * up + ffn * hidden
    divided_weights += (query + 2 * keys + up) if bias else 0
    whole_weights = 2 * hidden * (2 if bias else 1) + (2 * hidden if bias else 0)

    # Kept: inputs of both norms and of the products after them, and dropout's masks, whole; the rest divided.
    whole = float(s) * hidden * (4 * e + 2 * masks + (2 * (4 + e) if written_out else 0))
    kept_scores = scores * (e + (e + 1 if dropout else 0))
    divided = float(s) * (e * (2 * query + 2 * keys) + e * (up + ffn)) + kept_scores
    divided += 0 if plain else 4.0 * s * heads
    gates = float(s) * e * ffn if written_out and glu else 0.0
    if selective == "outputs":
        selective_divided = float(s) * e * (2 * query + 2 * keys + up) + scores * e
        selective_whole = 3.0 * s * hidden * e
    else:
        selective_divided, selective_whole = divided + gates - kept_scores, whole

    # Moved in the forward pass: norms read and write, residual additions read two and write one, and dropout its mask.
    # Written out, a norm goes to fp32 and back, squares, takes the mean, and multiplies twice.
    norm = 28 + 4 * e if written_out else 2 * e
    moved_whole = s * hidden * (2 * norm + 2 * (3 * e + masks))
    softmax = scores * (2 * e + (2 * e + 1 if dropout else 0))
    fused_rotary = 0 if learned_positions else 2 * e * s * (query + keys)
    rotary = (5 if written_out else 1) * fused_rotary  # two products, a sum, and halves that change places
    gate = s * e * (5 * ffn if written_out and glu else up + ffn)
    moved_divided = gate + 2.0 * e * s * query + rotary + softmax
    kernels = 16 if plain else 13
    kernels += (3 if dropout else 0) + (0 if learned_positions else 4) + (1 if glu else 0)
    kernels += 14 + (0 if learned_positions else 6) + (1 if glu else 0) if written_out else 0
    # Compiled, the first addition and the second norm are one kernel, and nothing of a norm but its input is kept.
    compiled_whole = s * hidden * (9.0 * e + 2 * masks)
    compiled_divided = s * e * (up + ffn) + fused_rotary + scores * (2 * e + (1 if dropout else 0))
    saved_whole = float(s) * hidden * (4 * e + 2 * masks)
    compiled = Compiled(
        moved_bytes=compiled_whole + compiled_divided,
        sharded_moved_bytes=compiled_divided,
        kernels=(12 if plain else 10) + (0 if learned_positions else 1),
        saved_bytes=saved_whole + divided,
        sharded_saved_bytes=divided,
    )
    working = max(s * e * (hidden + up + ffn), s * e * 4 * hidden + scores * 2 * e)
    block = Part(
        name="block",
        parameters=divided_weights + whole_weights,
        sharded_parameters=divided_weights,
        linear_parameters=divided_weights + (2 * hidden if bias else 0),
        matmuls=tuple(matmuls),
        attention=None if plain else Attention(heads, kv_heads, head_dim, s, causal),
        moved_bytes=moved_whole + moved_divided,
        sharded_moved_bytes=moved_divided,
        kernels=kernels,
        saved_bytes=whole + divided + gates,
        sharded_saved_bytes=divided + gates,
        selective_bytes=selective_whole + selective_divided,
        sharded_selective_bytes=selective_divided,
        selective_share=1.0 if selective == "outputs" else softmax / (moved_whole + moved_divided),
        output_bytes=e * s * hidden,
        peak_bytes=working,
        sharded_peak_bytes=working - s * e * hidden,
        exchanges=2,
        exchange_bytes=e * s * hidden,
        compiled=compiled,
    )
    table = vocab * hidden
    before = Part(
        name="embedding",
        parameters=table + (positions * hidden if learned_positions else 0),
        sharded_parameters=table,
        moved_bytes=s * hidden * (2 * e + (3 * e if learned_positions else 0) + (2 * e + 1) * masks),
        kernels=2 + (2 if learned_positions else 0) + masks,
        saved_bytes=s * hidden * masks,
        selective_bytes=s * hidden * masks,
        output_bytes=e * s * hidden,
        exchanges=1,
        exchange_bytes=e * s * hidden / 2,  # forward only: the gradient of an embedding needs no exchange
    )
    logits = s * vocab
    after = Part(
        name="head",
        parameters=hidden * (2 if bias else 1) + (0 if tied else table),
        sharded_parameters=0 if tied else table,
        linear_parameters=0 if tied else table,
        matmuls=(MatMul(s, hidden, vocab, 1, "columns"),),
        moved_bytes=2.0 * e * s * hidden + logits * (e + 4 * 4.0),
        sharded_moved_bytes=logits * (e + 4 * 4.0),
        kernels=10,
        saved_bytes=s * hidden * 2 * e + 4.0 * logits,
        sharded_saved_bytes=4.0 * logits,
        selective_bytes=s * hidden * 2 * e + 4.0 * logits,
        sharded_selective_bytes=4.0 * logits,
        output_bytes=4,
        exchanges=1,
        exchange_bytes=e * s * hidden / 2,  # backward only: the gradient of its input
    )
    return ModelProfile(
        name=name or f"decoder-{layers}x{hidden}",
        positions=positions,
        before=before,
        kinds=(block,),
        blocks=(0,) * layers,
        block_names=tuple(f"layers.{index}" for index in range(layers)),
        after=after,
        loss_bytes=max(logit_bytes - 4, 0) * logits,
        sharded_loss_bytes=max(logit_bytes - 4, 0) * logits,
        shared_parameters=table if tied else 0,
        element_bytes=element_bytes,
        mp_sizes=tuple(sorted({heads, kv_heads, ffn})),
        heads=None if plain else heads,
    )
