"""Models of torchvision."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.gauntlet.row import Field, Loss, Row, classes, classified, fitted_in_order, floats

CLASSES = 10


def _make(name: str, arguments: dict[str, Any]) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, **arguments)


def _build(kind: str, arguments: dict[str, Any]) -> nn.Module:
    from torchvision import models

    return getattr(models, kind)(**arguments)


def _row(
    name: str, sample: Field, sequence: bool = False, loss: Loss = classified, build: str = "", **arguments: Any
) -> Row:
    batch = {"images": sample, **({"labels": classes(CLASSES)} if loss is classified else {})}
    arguments = {"num_classes": CLASSES, **arguments}
    make = (lambda: _build(build, arguments)) if build else (lambda: _make(name, arguments))
    return Row("torchvision", name, make, batch, loss, sequence)


IMAGE = floats(3, 32, 32)
_SWIN: dict[str, Any] = {
    "patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4],
    "stochastic_depth_prob": 0.0,
}  # fmt: skip

ROWS = [
    _row("vit", floats(3, 16, 16), True, build="VisionTransformer", image_size=16, patch_size=4, num_layers=2,
         num_heads=4, hidden_dim=32, mlp_dim=64),
    _row("swin", IMAGE, True, build="SwinTransformer", **_SWIN),
    _row("maxvit", IMAGE, True, build="MaxVit", input_size=(32, 32), stem_channels=16, partition_size=4,
         block_channels=[16, 32], block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0),
    _row("resnet18", IMAGE),
    _row("squeezenet1_1", IMAGE),
    _row("densenet", IMAGE, build="DenseNet", growth_rate=4, block_config=(1, 1, 1, 1)),
    _row("mobilenet_v2", IMAGE, width_mult=0.25),
    _row("mobilenet_v3_small", IMAGE),
    _row("shufflenet_v2_x0_5", IMAGE),
    _row("mnasnet0_5", IMAGE),
    _row("lraspp_mobilenet_v3_large", IMAGE, loss=fitted_in_order, weights_backbone=None),
]  # fmt: skip
