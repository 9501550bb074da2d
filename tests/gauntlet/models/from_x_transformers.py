"""Models of x-transformers: one body, many switches."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.gauntlet.row import Field, Loss, Row, classes, classified, fitted_in_order, floats, itself, next_token

TOKENS, WIDTH, HEADS, LENGTH = 64, 32, 4, 13


def _layers(kind: str, switches: dict[str, Any]) -> nn.Module:
    import x_transformers

    arguments = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8, **switches}
    return getattr(x_transformers, kind)(**arguments)


def _language(kind: str, switches: dict[str, Any]) -> nn.Module:
    from x_transformers import TransformerWrapper

    outer = {key: switches.pop(key) for key in list(switches) if key in ("tie_embedding", "num_memory_tokens")}
    return TransformerWrapper(num_tokens=TOKENS, max_seq_len=32, attn_layers=_layers(kind, switches), **outer)


def _decoder(name: str, **switches: Any) -> Row:
    batch = {"ids": classes(TOKENS, LENGTH)}
    return Row("x-transformers", name, lambda: _language("Decoder", dict(switches)), batch, next_token)


def _autoregressive() -> nn.Module:
    from x_transformers import AutoregressiveWrapper

    return AutoregressiveWrapper(_language("Decoder", {"rotary_pos_emb": True, "attn_flash": True}))


def _encoder_decoder() -> nn.Module:
    from x_transformers import XTransformer

    return XTransformer(
        dim=WIDTH, enc_num_tokens=TOKENS, enc_depth=2, enc_heads=HEADS, enc_max_seq_len=32, enc_attn_dim_head=8,
        dec_num_tokens=TOKENS, dec_depth=2, dec_heads=HEADS, dec_max_seq_len=32, dec_attn_dim_head=8,
    )  # fmt: skip


def _continuous() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper

    return ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=32, attn_layers=_layers("Encoder", {}))


def _images() -> nn.Module:
    from x_transformers import ViTransformerWrapper

    return ViTransformerWrapper(image_size=16, patch_size=4, num_classes=10, attn_layers=_layers("Encoder", {}))


def _other(name: str, make: Any, batch: dict[str, Field], loss: Loss) -> Row:
    return Row("x-transformers", name, make, batch, loss)


_LABELLED = {"ids": classes(TOKENS, 12), "labels": classes(TOKENS, 12)}

ROWS = [
    _decoder("decoder"),
    _decoder("decoder-flash", attn_flash=True),
    _decoder("decoder-rotary", rotary_pos_emb=True, attn_flash=True),
    _decoder("decoder-alibi", alibi_pos_bias=True, alibi_num_heads=2),
    _decoder("decoder-relative", rel_pos_bias=True),
    _decoder("decoder-swiglu-rmsnorm", use_rmsnorm=True, ff_swish=True, ff_glu=True),
    _decoder("decoder-sandwich-norm", sandwich_norm=True),
    _decoder("decoder-post-norm", pre_norm=False),
    _decoder("decoder-qk-norm", attn_qk_norm=True),
    _decoder("decoder-grouped-queries", attn_kv_heads=2),
    _decoder("decoder-one-key-head", attn_one_kv_head=True),
    _decoder("decoder-talking-heads", attn_pre_talking_heads=True),
    _decoder("decoder-gated-residual", gate_residual=True),
    _decoder("decoder-scaled-residual", scale_residual=True),
    _decoder("decoder-shift-tokens", shift_tokens=1),
    _decoder("decoder-macaron", macaron=True),
    _decoder("decoder-memory-keys", attn_num_mem_kv=4),
    _decoder("decoder-tied", tie_embedding=True),
    _decoder("decoder-no-bias", ff_no_bias=True),
    _other("encoder", lambda: _language("Encoder", {"attn_flash": True}), _LABELLED, classified),
    _other("encoder-memory-tokens", lambda: _language("Encoder", {"num_memory_tokens": 4}), _LABELLED, classified),
    _other("autoregressive", _autoregressive, {"ids": classes(TOKENS, LENGTH)}, itself),
    _other("encoder-decoder", _encoder_decoder, {"source": classes(TOKENS, 12), "target": classes(TOKENS, LENGTH)},
           itself),
    _other("continuous", _continuous, {"x": floats(12, 8)}, fitted_in_order),
    _other("images", _images, {"images": floats(3, 16, 16), "labels": classes(10)}, classified),
]  # fmt: skip
