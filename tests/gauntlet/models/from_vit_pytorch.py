"""Models of vit-pytorch: attention written by hand with einops, in lists of [attention, feed forward]."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from tests.gauntlet.row import Field, Row, classes, classified, floats

CLASSES = 10


def _make(module: str, kind: str, arguments: dict[str, Any]) -> nn.Module:
    return getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(num_classes=CLASSES, **arguments)


def _row(module: str, kind: str, sample: Field | None = None, **arguments: Any) -> Row:
    batch = {"images": sample or floats(3, 16, 16), "labels": classes(CLASSES)}
    return Row("vit-pytorch", module, lambda: _make(module, kind, arguments), batch, classified)


_VIT: dict[str, Any] = {
    "image_size": 16, "patch_size": 4, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48, "dim_head": 8,
}  # fmt: skip
_VIDEO: dict[str, Any] = {
    "image_size": 16, "image_patch_size": 4, "frames": 4, "frame_patch_size": 2, "dim": 32, "heads": 4, "mlp_dim": 48,
    "dim_head": 8,
}  # fmt: skip
_SERIES: dict[str, Any] = {
    "seq_len": 32, "patch_size": 4, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48, "dim_head": 8,
}  # fmt: skip

ROWS = [
    _row("vit", "ViT", **_VIT),
    _row("simple_vit", "SimpleViT", **_VIT),
    _row("simple_flash_attn_vit", "SimpleViT", **_VIT, use_flash=True),
    _row("simple_vit_with_register_tokens", "SimpleViT", **_VIT),
    _row("simple_vit_with_qk_norm", "SimpleViT", **_VIT),
    _row("simple_vit_with_value_residual", "SimpleViT", **_VIT),
    _row("simple_uvit", "SimpleUViT", **_VIT),
    _row("parallel_vit", "ViT", **_VIT),
    _row("deepvit", "DeepViT", **_VIT),
    _row("cait", "CaiT", **_VIT, cls_depth=1),
    _row("xcit", "XCiT", **_VIT, cls_depth=1),
    _row("rvt", "RvT", **_VIT),
    _row("vit_for_small_dataset", "ViT", **_VIT),
    _row("vit_with_patch_merger", "ViT", **_VIT, patch_merge_num_tokens=4),
    _row("vit_5", "ViT", **_VIT),
    _row("normalized_vit", "nViT", **_VIT),
    _row("jumbo_vit", "JumboViT", **_VIT, jumbo_cls_k=2, jumbo_ff_mult=1),
    _row("vit_1d", "ViT", floats(3, 32), **_SERIES),
    _row("simple_vit_1d", "SimpleViT", floats(3, 32), **_SERIES),
    _row("vit_3d", "ViT", floats(3, 4, 16, 16), **_VIDEO, depth=2),
    _row("vivit", "ViViT", floats(3, 4, 16, 16), **_VIDEO, spatial_depth=1, temporal_depth=1),
    _row("pit", "PiT", image_size=16, patch_size=4, dim=32, depth=(1, 1), heads=4, mlp_dim=48, dim_head=8),
    _row("nest", "NesT", image_size=16, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1),
         dim_head=8),
    _row("max_vit", "MaxViT", floats(3, 32, 32), dim=16, depth=(1, 1), dim_head=8, dim_conv_stem=16, window_size=4,
         dropout=0.0),
    _row("cct", "CCT", floats(3, 16, 16), img_size=16, embedding_dim=32, n_conv_layers=1, kernel_size=3, stride=1,
         padding=1, num_layers=2, num_heads=4, mlp_ratio=2.0),
    _row("levit", "LeViT", floats(3, 32, 32), image_size=32, dim=(16, 32), depth=(1, 1), heads=(2, 4), mlp_mult=2,
         stages=2, dim_key=8, dim_value=8),
    _row("look_vit", "LookViT", floats(3, 32, 32), dim=32, image_size=32, depth=2, patch_size=8, heads=4, mlp_factor=2,
         dim_head=8, highres_patch_size=4, highres_mlp_factor=2, cross_attn_heads=4, cross_attn_dim_head=8,
         patch_conv_kernel_size=3, dropout=0.0),
]  # fmt: skip
