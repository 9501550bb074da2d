"""Attention in the tiles of a ring, all of its places on one GPU, equals torch's attention in fp64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from autolaunch_strategies.context.attention.kernels import attend
from autolaunch_strategies.context.attention.tiles import Differentiated, Merged, ring_tile
from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.torch_private import attention

HEADS, SIZE = 4, 100  # 100 positions fill the chunks of 4 places unevenly, and those of 8
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
    [
        pytest.param(4, 64, 64, id="64"), pytest.param(2, 16, 8, id="groups"), pytest.param(1, 5, 5, id="odd"),
        pytest.param(2, 96, 96, id="96"), pytest.param(1, 128, 128, id="128"), pytest.param(2, 256, 256, id="256"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("places", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_ring_of_tiles_is_attention(
    dtype: torch.dtype, places: int, key_heads: int, width: int, width_v: int, causal: bool, name: str, device: str
) -> None:
    torch.manual_seed(1)
    shapes = (HEADS, SIZE, width), (key_heads, SIZE, width), (key_heads, SIZE, width_v), (HEADS, SIZE, width_v)
    given = [torch.randn(2, *shape).to(dtype) for shape in shapes]
    mask = some_mask(name)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    expected = whole(*given, causal, mask, width**-0.5)

    q, k, v, grad = (tensor.to(device) for tensor in given)
    mask = None if mask is None else mask.to(device)
    layout, scale = Layout(SIZE, places), width**-0.5
    found = [torch.zeros(2, *shape, dtype=torch.float64, device=device) for shape in (shapes[3], *shapes[:3])]
    for place in range(places):
        mine = layout.positions(place).to(device)
        around = [(ring_tile(layout, place, origin, causal, mask), origin) for origin in range(places)]
        tiles = [(tile, layout.positions(origin).to(device)) for tile, origin in around if tile is not None]
        merged = Merged(q[:, :, mine], width_v, scale)
        for tile, theirs in tiles:
            merged.add(tile, k[:, :, theirs], v[:, :, theirs])
        out, lse = merged.result()
        assert (out.dtype, lse.dtype, out.device.type) == (dtype, torch.float32, device)
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


def test_tiles_take_the_kernel_of_cudnn_where_torch_does(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, HEADS, 128, 64, dtype=torch.bfloat16, device=device)
    called = []
    own = attention.cudnn_attention
    monkeypatch.setattr(attention, "cudnn_attention", lambda *given: called.append(own(*given)) or called[-1])
    out, _ = attend(q, q, q, causal=True, mask=None, scale=0.125)
    prefers = torch._fused_sdp_choice(q, q, q, None, 0.0, True) == SDPBackend.CUDNN_ATTENTION.value
    assert bool(called) == prefers
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, is_causal=True), rtol=2e-2, atol=2e-2)
