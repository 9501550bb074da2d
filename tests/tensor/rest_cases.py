"""Models of which little divides by pairs of layers, trained for three steps with `mp=auto`.

The group `none` is one plain process; the others are meshes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies.config import parallel_config, parse_mesh
from autolaunch_strategies.model.construction import Construction
from tests.support.cases import serve
from tests.support.zoo import MORE, batch_of, made, step_of
from tests.tensor.zoo_cases import STEPS, trained_on, trained_plain


class OddAttention(nn.Module):
    """Three heads, which no two ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class OddLayer(nn.Module):
    """Sizes that do not divide, attention of torch that is not called by its parts, and a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(24), OddAttention()
        self.norm2, self.mixed = nn.LayerNorm(24), nn.MultiheadAttention(24, 4, batch_first=True)
        self.norm3, self.mlp = nn.LayerNorm(24), nn.Sequential(nn.Linear(24, 45), nn.GELU(), nn.Linear(45, 24))
        self.turn = nn.Parameter(torch.randn(24, 24) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        x = x + self.mixed(y, y, y, need_weights=False)[0] @ self.turn
        return x + self.mlp(self.norm3(x))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_size = 8
        self.patches, self.positions = nn.Conv2d(3, 24, 2, 2), nn.Embedding(16, 24)
        self.layers = nn.ModuleList(OddLayer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x + self.positions(torch.arange(16, device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class Convolutions(nn.Module):
    """Every kind of convolution: with groups, transposed, along one dim, padded with what is there, uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 3, 8, 8)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 7, 1, bias=False)
        self.up, self.line = nn.ConvTranspose2d(7, 6, 2, 2), nn.Conv1d(6, 5, 3)
        self.head = nn.Linear(5, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(images)))
        x = F.gelu(self.pointwise(x + self.depthwise(x)))
        return self.head(self.line(self.up(x).flatten(2)).mean(-1))


class Alone(nn.Module):
    """No blocks and no pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 3, 8, 8)
        self.first = nn.Linear(192, 15)
        self.last = nn.Sequential(nn.Linear(15, 30), nn.ReLU(), nn.Linear(30, 5), nn.ReLU(), nn.Linear(5, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(images.flatten(1)))


OWN: dict[str, type[nn.Module]] = {"odd": Odd, "convolutions": Convolutions, "alone": Alone}
FAMILIES = ("albert", "clip", "convnext", "deberta_v2", "mamba", "swin", "whisper")
NAMES = (*OWN, *FAMILIES)
assert set(FAMILIES) <= MORE.keys()


def built(name: str) -> tuple[nn.Module, Construction]:
    construction = Construction(seed=3)
    with construction.recording():
        model = OWN[name]() if name in OWN else made(name)
    return model, construction


def batch(name: str) -> dict[str, torch.Tensor]:
    return batch_of("vision_transformer" if name in OWN else name)


def loss(name: str, model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    if name in OWN:
        return F.cross_entropy(model(data["inputs"]), data["labels"])
    return step_of(name, model)(data)


def train_plain(name: str) -> dict[str, Any]:
    return trained_plain(built(name), [batch(name)] * STEPS, partial(loss, name), 0.05)


def train_parallel(name: str, mesh: str, level: int, sequence_parallel: bool, **settings: Any) -> dict[str, Any]:
    config = parallel_config(parse_mesh(mesh), level, {"sequence_parallel": sequence_parallel}, **settings)
    return trained_on(config, built(name), [batch(name)] * STEPS, partial(loss, name), 0.05)


GROUPS: dict[str, dict[str, Any]] = {
    "none": {name: partial(train_plain, name) for name in NAMES},
    "1x2": {
        **{f"{name}-tp": partial(train_parallel, name, "1x2", 0, False) for name in NAMES},
        **{f"{name}-sp": partial(train_parallel, name, "1x2", 3, True) for name in NAMES},
        **{
            f"{name}-selective": partial(train_parallel, name, "1x2", 0, False, recompute="selective")
            for name in ("odd", "convnext")
        },
    },
    "2x2": {f"{name}-tp": partial(train_parallel, name, "2x2", 3, False) for name in NAMES},
}

if __name__ == "__main__":
    serve(GROUPS, tensors=True)
