"""Attention in the tiles of a ring, all of them on one GPU, equals torch's attention in fp64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autolaunch_strategies.context.attention.tiles import Differentiated, Merged, ring_tile
from autolaunch_strategies.mesh.layout import Layout

DEVICE = "cuda"
HEADS, SIZE, PLACES = 4, 100, 4  # 100 positions fill the chunks of 4 places unevenly
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
"""Of the largest number of a tensor."""


def some_mask(name: str) -> torch.Tensor | None:
    if name == "bool":
        seen = torch.rand(2, 1, SIZE, SIZE) > 0.4
        seen[0, :, 1] = False  # this query sees nothing
        return seen
    return torch.randn(1, HEADS, SIZE, SIZE) if name == "float" else None


@pytest.mark.parametrize("name", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "everything"])
@pytest.mark.parametrize(
    ("key_heads", "width", "width_v"),
    [pytest.param(4, 64, 64, id="64"), pytest.param(2, 16, 8, id="groups"), pytest.param(1, 5, 5, id="odd")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_ring_of_tiles_is_attention(
    dtype: torch.dtype, key_heads: int, width: int, width_v: int, causal: bool, name: str
) -> None:
    torch.manual_seed(1)
    shapes = (HEADS, SIZE, width), (key_heads, SIZE, width), (key_heads, SIZE, width_v), (HEADS, SIZE, width_v)
    given = [torch.randn(2, *shape).to(dtype) for shape in shapes]
    mask = some_mask(name)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    expected = whole(*given, causal, mask, width**-0.5)

    q, k, v, grad = (tensor.to(DEVICE) for tensor in given)
    mask = None if mask is None else mask.to(DEVICE)
    layout, scale = Layout(SIZE, PLACES), width**-0.5
    found = [torch.zeros(2, *shape, dtype=torch.float64, device=DEVICE) for shape in (shapes[3], *shapes[:3])]
    for place in range(PLACES):
        mine = layout.positions(place).to(DEVICE)
        around = [(ring_tile(layout, place, origin, causal, mask), origin) for origin in range(PLACES)]
        tiles = [(tile, layout.positions(origin).to(DEVICE)) for tile, origin in around if tile is not None]
        merged = Merged(q[:, :, mine], width_v, scale)
        for tile, theirs in tiles:
            merged.add(tile, k[:, :, theirs], v[:, :, theirs])
        out, lse = merged.result()
        assert (out.dtype, lse.dtype, out.device.type) == (dtype, torch.float32, torch.device(DEVICE).type)
        found[0][:, :, mine] = out.double()
        backward = Differentiated(grad[:, :, mine], q[:, :, mine], out, lse, scale)
        for tile, theirs in tiles:
            dk, dv = backward.add(tile, k[:, :, theirs], v[:, :, theirs])
            found[2][:, :, theirs[tile.keys]] += dk
            found[3][:, :, theirs[tile.keys]] += dv
        found[1][:, :, mine] = backward.result().double()
    for what, one, another in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        difference = (one.cpu() - another).abs().max() / another.abs().max()
        assert difference <= TOLERANCE[dtype], f"{what} differs by {difference:.1e} of its largest number"


def whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v, in fp64 on the CPU."""
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    if causal:
        below = torch.ones(SIZE, SIZE, dtype=torch.bool).tril()
        if mask is None:
            mask = below
        else:
            mask = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, -torch.inf)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=scale, enable_gqa=True)
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
