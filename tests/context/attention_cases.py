"""Cases for the tests of context-parallel attention.

Each compares what the ranks computed on their parts, put back in order, with torch's attention on one process.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.context.attention.backends import context_attention
from autolaunch_strategies.mesh.layout import Layout, Peers
from tests.support.cases import RANK, serve
from tests.support.cases import WORLD as RANKS

CASES: dict[str, Callable[[], Any]] = {}
PEERS: dict[str, Peers] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def make_peers() -> None:
    world = dist.group.WORLD
    assert world is not None
    PEERS["gather"] = PEERS["ring"] = Peers(world, world, None)
    PEERS["ulysses"] = Peers(world, None, world)
    if RANKS == 4:
        places = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        PEERS["usp"] = Peers(world, rings[RANK % 2], places[RANK // 2])


def part(whole: torch.Tensor, layout: Layout, dim: int = 2) -> torch.Tensor:
    """What this rank holds of a whole tensor; padding is filled with numbers that would be noticed."""
    held = whole.index_select(dim, layout.positions(RANK))
    shape = list(held.shape)
    shape[dim] = layout.local - held.shape[dim]
    filling = torch.ones(shape, dtype=torch.bool) if whole.dtype == torch.bool else torch.full(shape, 7.0)
    return torch.cat((held, filling.to(whole.dtype)), dim)


def whole(held: torch.Tensor, layout: Layout, dim: int = 2) -> torch.Tensor:
    """The whole tensor from what all ranks hold."""
    parts = [torch.empty_like(held) for _ in range(RANKS)]
    dist.all_gather(parts, held.contiguous())
    kept = [x.narrow(dim, 0, layout.valid(rank)) for rank, x in enumerate(parts)]
    order = torch.cat([layout.positions(rank) for rank in range(RANKS)]).argsort()
    return torch.cat(kept, dim).index_select(dim, order)


def inputs(
    size: int, heads: int = 4, key_heads: int = 4, width: int = 8, batch: int = 2, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, the same on every rank."""
    torch.manual_seed(size)
    shapes = [heads, key_heads, key_heads, heads]
    return [torch.randn(batch, count, size, width).to(dtype) for count in shapes]


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, mask: Any = None, **options: Any
) -> list[torch.Tensor]:
    """Output and gradients on one process, in fp64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    if mask is not None and mask.is_floating_point():
        mask = mask.double()
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True, **options)
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def divided(
    backend: str, tensors: list[torch.Tensor], size: int, mask: Any = None, **options: Any
) -> tuple[list[torch.Tensor], Layout]:
    """Output and gradients of this rank's part."""
    layout = PEERS[backend].layout(size)
    *leaves, grad = [part(x, layout) for x in tensors]
    for leaf in leaves:
        leaf.requires_grad_()
    out = context_attention(*leaves, backend=backend, peers=PEERS[backend], layout=layout, mask=mask, **options)
    assert out.shape == grad.shape and out.dtype == grad.dtype
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)], layout


def difference(backend: str, tensors: list[torch.Tensor], mask: Any = None, **options: Any) -> float:
    """The largest difference of any output or gradient from the reference, on any rank."""
    size = tensors[0].shape[2]
    found, layout = divided(backend, tensors, size, mask, **options)
    for held in found:
        assert held[:, :, layout.valid(RANK) :].abs().sum() == 0, "padding has to stay 0"
    if mask is not None and options.pop("is_causal", False):
        below = torch.ones(size, size, dtype=torch.bool).tril()
        mask = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, -float("inf"))
    expected = reference(*tensors, mask=mask, **options)
    found = [whole(held, layout) for held in found]
    assert all(torch.isfinite(x).all() for x in found)
    return max(float((a.double() - b).abs().max()) for a, b in zip(found, expected, strict=True))


def masks(size: int, heads: int = 4, batch: int = 2) -> dict[str, torch.Tensor]:
    """Masks that people use, with queries that see nothing among them."""
    torch.manual_seed(3)
    position = torch.arange(size)
    below = position[:, None] >= position
    lengths = torch.tensor([size - size // 3, size])[:batch]
    padding = (position < lengths[:, None])[:, None, None, :]
    left = (position >= (size - lengths)[:, None])[:, None, None, :]
    window = below & (position[:, None] - position < size // 4)
    document = torch.bucketize(position, torch.tensor([size // 3, size // 2]), right=True)
    packed = below & (document[:, None] == document)
    return {
        "padding": padding,
        "padding causal": padding & below,
        "left padding causal": left & below,  # the first queries see nothing
        "window": window,
        "packed": packed[None, None],
        "nothing": torch.zeros(size, size, dtype=torch.bool),
        "float bias": torch.randn(1, heads, size, size),
        "float bias of batch": torch.randn(batch, 1, 1, size),
        "float minus infinity": torch.zeros(batch, 1, size, size).masked_fill(~(left & below), -float("inf")),
        "float lowest": torch.zeros(1, 1, size, size).masked_fill(~below, torch.finfo(torch.float32).min),
        "per head": torch.rand(batch, heads, size, size) > 0.3,
        "queries only": torch.rand(batch, 1, size, 1) > 0.3,
    }


def backends() -> list[str]:
    return list(PEERS)


@case
def without_mask() -> dict[str, float]:
    found = {}
    sizes = [32, 30, 13, 5]
    for backend, size, causal, key_heads in itertools.product(backends(), sizes, (True, False), (4, 2, 1)):
        tensors = inputs(size, key_heads=key_heads)
        name = f"{backend} {size} {'causal' if causal else 'full'} {key_heads}"
        found[name] = difference(backend, tensors, is_causal=causal)
    return found


@case
def with_mask() -> dict[str, float]:
    found = {}
    for backend, size, key_heads in itertools.product(backends(), (32, 13), (4, 1)):
        tensors = inputs(size, key_heads=key_heads)
        for name, mask in masks(size).items():
            found[f"{backend} {size} {name} {key_heads}"] = difference(backend, tensors, mask=mask)
    return found


@case
def with_mask_and_causal() -> dict[str, float]:
    found = {}
    for backend, size in itertools.product(backends(), (32, 13)):
        for name in ("padding", "float bias", "per head"):
            mask = masks(size)[name]
            found[f"{backend} {size} {name}"] = difference(backend, inputs(size), mask=mask, is_causal=True)
    return found


@case
def with_parts_of_masks() -> dict[str, float]:
    """Masks of which this rank holds only its own queries, or keys."""
    found = {}
    for backend, size, dim in itertools.product(backends(), (32, 13), (2, 3)):
        layout = PEERS[backend].layout(size)
        for name in ("per head", "float bias"):
            mask = masks(size)[name]
            parts, _ = divided(backend, inputs(size), size, part(mask, layout, dim))
            expected = reference(*inputs(size), mask=mask)
            pairs = zip((whole(x, layout) for x in parts), expected, strict=True)
            found[f"{backend} {size} {name} {dim}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@case
def other_shapes() -> dict[str, float]:
    found = {}
    for backend in backends():
        q, k, v, grad = inputs(24)
        found[f"{backend} scale"] = difference(backend, [q, k, v, grad], is_causal=True, scale=0.3)
        wide = [q, k, torch.cat((v, v), -1), torch.cat((grad, -grad), -1)]
        found[f"{backend} wide values"] = difference(backend, wide, is_causal=True)
        narrow = [q, k, v[..., :3], grad[..., :3]]
        found[f"{backend} narrow values"] = difference(backend, narrow, is_causal=True)
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad)]
        found[f"{backend} heads next to each other"] = difference(backend, strided, is_causal=True)
        found[f"{backend} many blocks"] = difference(backend, inputs(1300, width=4, batch=1), is_causal=True)
        window = masks(1300, batch=1)["window"]
        found[f"{backend} many blocks, window"] = difference(backend, inputs(1300, width=4, batch=1), mask=window)
        # As many key heads as fit in no way, and 12 heads with 3 of keys: repeated to 6 for 2 ranks, to 12 for 4.
        found[f"{backend} 12 heads of 3"] = difference(backend, inputs(16, 12, 3), is_causal=True)
        found[f"{backend} 8 heads of 8"] = difference(backend, inputs(16, 8, 8), is_causal=True)
        found[f"{backend} fp64"] = difference(backend, inputs(16, dtype=torch.float64), is_causal=True)
    return found


@case
def without_batch() -> dict[str, float]:
    """3-D tensors, as torch's own attention takes them."""
    found = {}
    for backend in ("gather", "ring"):
        layout = PEERS[backend].layout(24)
        tensors = [x[:, 0] for x in inputs(24)]
        for name, mask in {"none": None, "2-D": masks(24)["window"], "3-D": masks(24)["padding causal"][:, 0]}.items():
            *leaves, grad = [part(x, layout, 1) for x in tensors]
            for leaf in leaves:
                leaf.requires_grad_()
            out = context_attention(*leaves, backend=backend, peers=PEERS[backend], layout=layout, mask=mask)
            out.backward(grad)
            q, k, v = [x.double().requires_grad_() for x in tensors[:3]]
            expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            expected.backward(tensors[3].double())
            pairs = [
                (out.detach(), expected.detach()),
                *zip((x.grad for x in leaves), (q.grad, k.grad, v.grad), strict=True),
            ]
            found[f"{backend} {name}"] = max(float((whole(a, layout, 1) - b).abs().max()) for a, b in pairs)
    return found


@case
def one_rank() -> dict[str, float]:
    """A cp axis of one rank, here each for itself."""
    groups = [dist.new_group([rank]) for rank in range(RANKS)]
    found = {}
    for backend, size in itertools.product(("gather", "ring", "ulysses", "usp"), (16, 13)):
        peers = Peers(groups[RANK], None, None)
        layout = peers.layout(size)
        *tensors, grad = inputs(size, key_heads=2)
        leaves = [F.pad(x, (0, 0, 0, layout.local - size), value=7.0).requires_grad_() for x in tensors]
        out = context_attention(*leaves, backend=backend, peers=peers, layout=layout, is_causal=True)
        out.backward(F.pad(grad, (0, 0, 0, layout.local - size), value=7.0))
        held = [x[:, :, :size] for x in (out.detach(), *(leaf.grad for leaf in leaves))]
        pairs = zip(held, reference(*tensors, grad, is_causal=True), strict=True)
        found[f"{backend} {size}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@case
def low_precision() -> dict[str, list[float]]:
    """Differences from the reference on the same rounded inputs, beside those of torch's own attention."""
    found = {}
    for backend, dtype, causal in itertools.product(backends(), (torch.bfloat16, torch.float16), (True, False)):
        tensors = inputs(64, key_heads=2, width=16, dtype=dtype)
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        alone = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        alone.backward(tensors[3])
        expected = reference(*tensors, is_causal=causal)
        own = [alone.detach(), *(leaf.grad for leaf in leaves)]
        pairs = list(zip(own, expected, strict=True))
        found[f"{backend} {dtype} {causal}"] = [
            difference(backend, tensors, is_causal=causal),
            max(float((a.double() - b).abs().max()) for a, b in pairs),
        ]
    return found


@case
def autocast() -> dict[str, str]:
    found = {}
    for backend in backends():
        layout = PEERS[backend].layout(32)
        q, k, v, _ = [part(x, layout) for x in inputs(32)]
        mask = masks(32)["float bias"]
        with torch.autocast("cpu", torch.bfloat16):
            out = context_attention(
                q, k, v.bfloat16(), backend=backend, peers=PEERS[backend], layout=layout, mask=mask
            )  # fmt: skip
            expected = F.scaled_dot_product_attention(*inputs(32)[:3], attn_mask=mask)
        torch.testing.assert_close(whole(out, layout), expected, atol=0.02, rtol=0.02)
        found[backend] = str(out.dtype)
    return found


@case
def recomputed() -> dict[str, float]:
    """Under activation checkpointing everything runs a second time, within the backward pass."""
    from torch.utils.checkpoint import checkpoint

    found = {}
    for backend, reentrant, options in itertools.product(
        backends(), (True, False), ({"is_causal": True}, {"mask": masks(30)["padding causal"]})
    ):
        layout, tensors = PEERS[backend].layout(30), inputs(30)
        *leaves, grad = [part(x, layout) for x in tensors]
        for leaf in leaves:
            leaf.requires_grad_()

        def block(
            q: Any, k: Any, v: Any, backend: str = backend, layout: Layout = layout, options: Any = options
        ) -> Any:
            out = context_attention(
                q * 1, k * 1, v * 1, backend=backend, peers=PEERS[backend], layout=layout, **options
            )  # fmt: skip
            return out + 0 * context_attention(
                out, k, v, backend=backend, peers=PEERS[backend], layout=layout, **options
            )  # fmt: skip

        out = checkpoint(block, *leaves, use_reentrant=reentrant)
        out.backward(grad)
        expected = reference(*tensors, **options)
        held = [out.detach(), *(leaf.grad for leaf in leaves)]
        pairs = zip((whole(x, layout) for x in held), expected, strict=True)
        found[f"{backend} {reentrant} {list(options)}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@case
def gradient_of_mask() -> dict[str, float]:
    """A learned bias: whole, of which each rank finds the gradient of its part, and divided along keys or queries."""
    found = {}
    for backend, size in itertools.product(("gather", "ulysses"), (32, 13)):
        layout = PEERS[backend].layout(size)
        tensors = inputs(size)
        bias = masks(size)["float bias"]
        expected_bias = bias.double().requires_grad_()
        out = F.scaled_dot_product_attention(*(x.double() for x in tensors[:3]), attn_mask=expected_bias)
        out.backward(tensors[3].double())
        own = bias.clone().requires_grad_()
        divided(backend, tensors, size, own)
        total = own.grad.clone()
        dist.all_reduce(total)
        found[f"{backend} {size} whole"] = float((total - expected_bias.grad).abs().max())
        for dim in (2, 3):
            own = part(bias, layout, dim).requires_grad_()
            divided(backend, tensors, size, own)
            found[f"{backend} {size} along {dim}"] = float(
                (whole(own.grad, layout, dim) - expected_bias.grad).abs().max()
            )  # fmt: skip
    return found


@case
def dropout() -> dict[str, list[float]]:
    """With values of 1 the output is what is left of the weights: 1 on average, and far from it in single rows."""
    found = {}
    for backend, causal in itertools.product(("gather", "ulysses"), (False, True)):
        torch.manual_seed(RANK)
        layout = PEERS[backend].layout(250)
        q, k, v, _ = [part(x, layout).requires_grad_() for x in inputs(250)]
        ones = torch.ones_like(v).requires_grad_()
        out = context_attention(
            q, k, ones, backend=backend, peers=PEERS[backend], layout=layout, dropout_p=0.25, is_causal=causal
        )
        out.sum().backward()
        left = whole(out.detach(), layout)[..., 0]
        grads = torch.cat([whole(x.grad, layout).flatten() for x in (q, k, ones)])
        total = float(whole(ones.grad, layout).sum() / left.sum() / 8)
        found[f"{backend} {causal}"] = [
            float(left.mean()), float(left.std()), float(torch.isfinite(grads).all()), total,
        ]  # fmt: skip
    return found


@case
def same_as_torch() -> dict[str, float]:
    """The ring of torch itself on the same parts (private, and not usable on CPUs as torch ships it)."""
    from tests.context.torch_ring import TorchRing, torch_ring_options

    found = {}
    layout = PEERS["ring"].layout(64)
    for causal in (True, False):
        tensors = inputs(64)
        ours, _ = divided("ring", tensors, 64, is_causal=causal)
        *leaves, grad = [part(x, layout) for x in tensors]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch_ring_options(balanced=causal):
            out = TorchRing.apply(*leaves, PEERS["ring"].group, causal)
            out.backward(grad)
        pairs = zip(ours, [out.detach(), *(leaf.grad for leaf in leaves)], strict=True)
        found[f"causal {causal}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@case
def messages() -> dict[str, str]:
    def message(backend: str, tensors: list[torch.Tensor] | None = None, **options: Any) -> str:
        layout = PEERS[backend].layout(16)
        q, k, v, _ = inputs(16, 4, 4) if tensors is None else tensors
        if tensors is None:
            q, k, v = (part(x, layout) for x in (q, k, v))
        try:
            context_attention(q, k, v, backend=backend, peers=PEERS[backend], layout=layout, **options)
        except ConfigError as error:
            return str(error)
        return "no error"

    local = PEERS["ring"].layout(16).local
    q = torch.zeros(2, 4, local, 8)
    bias = torch.zeros(16, 16, requires_grad=True)
    return {
        "dropout": message("ring", dropout_p=0.1),
        "learned mask": message("ring", mask=bias),
        "heads": message("ulysses", [torch.zeros(2, 3, local, 8)] * 4),
        "cross": message("gather", [q, q[:, :, :3], q[:, :, :3], q]),
        "groups": message("gather", [q, q[:, :3], q[:, :3], q]),
        "dims": message("gather", [q[None], q[None], q[None], q]),
        "mask shape": message("gather", mask=torch.zeros(2, 4, 16, 17)),
        "mask of both parts": message("gather", mask=torch.zeros(local, local)),
        "mask dims": message("gather", mask=torch.zeros(1, 2, 4, 16, 16)),
        "mask dtype": message("ring", mask=torch.zeros(16, 16, dtype=torch.int64)),
        **({"usp dropout": message("usp", dropout_p=0.1)} if "usp" in PEERS else {}),
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    make_peers()
    serve({"all": CASES})
