"""Models of timm: vision transformers, their hybrids with convolutions, and convolutional networks."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from tests.gauntlet.row import Row, classes, classified, floats

CLASSES = 10


def _make(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=CLASSES, **arguments)


def _build(path: str, arguments: dict[str, Any]) -> nn.Module:
    """A class of timm, where the function of the name fixes sizes."""
    from timm.models import mlp_mixer

    module, _, kind = path.partition(".")
    if "block_layer" in arguments:
        arguments = {**arguments, "block_layer": getattr(mlp_mixer, arguments["block_layer"])}
    return getattr(importlib.import_module(f"timm.models.{module}"), kind)(num_classes=CLASSES, **arguments)


def _row(name: str, size: int, sequence: bool = True, build: str = "", **arguments: Any) -> Row:
    batch = {"images": floats(3, size, size), "labels": classes(CLASSES)}
    make = (lambda: _build(build, arguments)) if build else (lambda: _make(name, arguments))
    return Row("timm", name, make, batch, classified, sequence)


_VIT: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}
_WINDOWS: dict[str, Any] = {
    "img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "drop_path_rate": 0.0,
}  # fmt: skip
_SMALL = {"drop_path_rate": 0.0}

ROWS = [
    _row("vit_tiny_patch16_224", 16, **_VIT),
    _row("vit_srelpos_small_patch16_224", 16, **_VIT),
    _row("vit_base_patch16_clip_224", 16, **_VIT),
    _row("vit_base_patch16_siglip_224", 16, **_VIT),
    _row("vit_small_patch14_reg4_dinov2", 16, **_VIT),
    _row("deit_tiny_distilled_patch16_224", 16, **_VIT),
    _row("deit3_small_patch16_224", 16, **_VIT),
    _row("beit_base_patch16_224", 16, **_VIT),
    _row("beitv2_base_patch16_224", 16, **_VIT),
    _row("eva02_tiny_patch14_224", 16, **_VIT),
    _row("cait_xxs24_224", 16, **_VIT, depth_token_only=1),
    _row("xcit_nano_12_p8_224", 16, **{**_VIT, "patch_size": 8}),
    _row("naflexvit_base_patch16_gap", 16, patch_size=4, embed_dim=32, depth=2, num_heads=4),
    _row("samvit_base_patch16", 32, img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, neck_chans=16,
         window_size=4, global_attn_indexes=(1,)),
    _row("convit_tiny", 16, img_size=16, patch_size=4, embed_dim=8, depth=3, num_heads=4, local_up_to_layer=2),
    _row("crossvit_tiny_240", 32, img_size=32, img_scale=(1.0, 1.0), patch_size=(8, 16), embed_dim=(16, 32),
         num_heads=(2, 4), depth=((1, 2, 0), (1, 2, 0))),
    _row("tnt_s_patch16_224", 16, img_size=16, patch_size=8, embed_dim=32, inner_dim=16, depth=2, num_heads_inner=2,
         num_heads_outer=4),
    _row("volo", 32, build="volo.VOLO", img_size=32, layers=(1, 1, 1, 1),
         embed_dims=(32, 32, 32, 32), num_heads=(4, 4, 4, 4)),
    _row("pit_ti_224", 32, img_size=32, patch_size=8, stride=4, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(2, 4, 4)),
    _row("pvt_v2_b0", 32, depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
    _row("twins_svt_small", 32, img_size=32, embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 4, 4), depths=(1, 1, 1, 1)),
    _row("swin_tiny_patch4_window7_224", 32, **_WINDOWS),
    _row("swinv2_tiny_window8_256", 32, **_WINDOWS),
    _row("swinv2_cr_tiny_224", 32, img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
    _row("hiera_tiny_224", 32, img_size=(32, 32), embed_dim=16, num_heads=1, stages=(1, 1, 1, 1)),
    _row("nest", 32, build="nest.Nest", img_size=32, patch_size=4, num_levels=2, embed_dims=(16, 32),
         num_heads=(2, 4), depths=(1, 2)),
    _row("davit_tiny", 32, depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), window_size=4),
    _row("gcvit", 32, build="gcvit.GlobalContextVit", img_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 4),
         window_size=(4, 4)),
    _row("efficientvit_b0", 32, widths=(8, 8, 16, 16, 32), depths=(1, 1, 1, 1, 1), head_widths=(32, 32)),
    _row("levit_128s", 32, img_size=32, embed_dim=(16, 32), key_dim=8, num_heads=(2, 4), depth=(1, 1)),
    _row("mobilevit_xxs", 32, False),
    _row("edgenext_xx_small", 32, False, depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), heads=(4, 4, 4, 4)),
    _row("fastvit_t8", 32, False, layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), **_SMALL),
    _row("metaformer", 32, False, build="metaformer.MetaFormer", **_FOUR),
    _row("mixer", 16, build="mlp_mixer.MlpMixer", img_size=16, patch_size=4, num_blocks=2, embed_dim=32),
    _row("resmlp", 16, build="mlp_mixer.MlpMixer", block_layer="ResBlock", mlp_ratio=4, img_size=16, patch_size=4,
         num_blocks=2, embed_dim=32),
    _row("sequencer2d_s", 32, False, img_size=32, layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16),
         hidden_sizes=(4, 4, 4, 4)),
    _row("convmixer", 16, False, build="convmixer.ConvMixer", dim=16, depth=2, kernel_size=3, patch_size=4),
    _row("convnext_atto", 32, False, **_FOUR),
    _row("convnextv2_atto", 32, False, **_FOUR),
    _row("inception_next_atto", 32, False, **_FOUR),
    _row("mambaout_femto", 32, False, **_FOUR),
    _row("focalnet", 32, False, build="focalnet.FocalNet", embed_dim=8, depths=(1, 1, 1, 1)),
    _row("starnet_s1", 32, False, base_dim=8, depths=(1, 1, 1, 1)),
    _row("resnet10t", 32, False, channels=(8, 16, 16, 32)),
    _row("resnetv2_50", 32, False, layers=(1, 1, 1, 1), channels=(16, 16, 32, 32), stem_chs=8),
    _row("densenet121", 32, False, growth_rate=4, block_config=(1, 1, 1, 1)),
    _row("mobilenetv3_small_050", 32, False),
    _row("efficientnet_lite0", 32, False, **_SMALL),
]  # fmt: skip
