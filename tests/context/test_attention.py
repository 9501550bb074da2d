"""Attention over sharded sequences equals attention on one process; its kernels and their parts, in this process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autolaunch_strategies.context.attention import kernels
from autolaunch_strategies.context.attention.tiles import Differentiated, Merged, Tile, ring_tile, whole_tiles
from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.torch_private import attention as of_torch
from autolaunch_strategies.torch_private.tracing import fake_tensors
from tests.support.ranks import Group, GroupOf

SCRIPT = Path(__file__).parent / "attention_cases.py"
TOLERANCE = 5e-6  # of fp32, absolute, for numbers of size 1 to 10


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def results(request: pytest.FixtureRequest, group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "all", request.param)


def ranks(results: Group) -> int:
    return results.count


@pytest.mark.parametrize(
    ("case", "per_backend"),
    [
        ("without_mask", 24),
        ("with_mask", 48),
        ("with_mask_and_causal", 6),
        ("with_parts_of_masks", 8),
        ("other_shapes", 9),
        ("recomputed", 4),
    ],
)
def test_equals_one_process(results: Group, case: str, per_backend: int) -> None:
    found = results.read(case)
    backends = ["gather", "ring", "ulysses", *(["usp"] if ranks(results) == 4 else [])]
    for backend in backends:
        assert len([name for name in found if name.startswith(f"{backend} ")]) == per_backend
    assert {name: value for name, value in found.items() if not value <= TOLERANCE} == {}
    for rank in range(1, ranks(results)):
        results.read(case, rank)


def test_three_dims(results: Group) -> None:
    found = results.read("without_batch")
    assert len(found) == 6
    assert max(found.values()) <= TOLERANCE


def test_one_rank(results: Group) -> None:
    found = results.read("one_rank")
    assert len(found) == 8
    assert max(found.values()) <= TOLERANCE


def test_low_precision_is_as_exact_as_torch(results: Group) -> None:
    for name, (divided, alone) in results.read("low_precision").items():
        assert divided <= 2 * alone, name


def test_autocast(results: Group) -> None:
    assert set(results.read("autocast").values()) == {"torch.bfloat16"}


def test_gradient_of_mask(results: Group) -> None:
    found = results.read("gradient_of_mask")
    assert len(found) == 12
    assert max(found.values()) <= TOLERANCE


def test_dropout(results: Group) -> None:
    for name, (mean, spread, finite, total) in results.read("dropout").items():
        assert mean == pytest.approx(1, abs=0.02), name  # 2000 rows
        assert spread > 0.03, name
        assert finite, name
        assert total == pytest.approx(1, abs=1e-5), name  # gradients of values are what the output is made of


def test_same_as_the_ring_of_torch(results: Group) -> None:
    assert max(results.read("same_as_torch").values()) <= 1e-6


def test_messages(results: Group) -> None:
    count = ranks(results)
    local = 16 // count
    allowed_mask = (
        "  allowed: bool or float, [batch, heads, queries, keys], where heads is 1 or 4, and queries and keys are each "
        f"1, 16 (the whole sequence) or {local} (one rank's part)\n"
        f'  write:   mesh="dp{count}"'
    )
    dropout = (
        "attention drops out 0.1 of its weights, which a ring cannot\n"
        "  allowed: cp=gather, cp=ulysses, or a model whose attention dropout is 0 (attention_dropout, attn_pdrop)\n"
        '  write:   cp="gather"'
    )
    assert results.read("messages") == {
        "dropout": f"cp=ring: {dropout}",
        "learned mask": (
            "cp=ring: a mask of attention needs a gradient (a learned bias), which a ring cannot give\n"
            "  allowed: cp=gather or cp=ulysses\n"
            '  write:   cp="gather"'
        ),
        "heads": (
            f"cp=ulysses: 3 heads of attention cannot be shared evenly by {count} ranks\n"
            "  allowed: as many ranks per group as divide 3; gather and ring need no heads\n"
            '  write:   cp="gather"'
        ),
        "cross": (
            f"cp=gather: a call of attention has {local} queries and 3 keys per rank, of {local} positions\n"
            "  allowed: self-attention over the sequence that is sharded: as many queries as keys, no cache of earlier "
            "keys\n"
            f'  write:   mesh="dp{count}"'
        ),
        "groups": (
            "cp=gather: a call of attention has 4 heads of queries, 3 of keys and 3 of values\n"
            "  allowed: as many heads of keys as of values, in a number that divides that of queries\n"
            f'  write:   mesh="dp{count}"'
        ),
        "dims": (
            f"cp=gather: a call of attention has queries of shape [1, 2, 4, {local}, 8]\n"
            "  allowed: [batch, heads, sequence, width] or [batch, sequence, width]\n"
            f'  write:   mesh="dp{count}"'
        ),
        "mask shape": f"cp=gather: a mask of attention (float32) has the shape [2, 4, 16, 17]\n{allowed_mask}",
        "mask of both parts": (
            f"cp=gather: a mask of attention has the shape [{local}, {local}]: this rank's queries with its own keys, "
            "so none for other keys\n"
            "  allowed: [batch, heads, queries, keys], where one of queries and keys is 16, the whole sequence\n"
            f'  write:   mesh="dp{count}"'
        ),
        "mask dims": f"cp=gather: a mask of attention (float32) has the shape [1, 2, 4, 16, 16]\n{allowed_mask}",
        "mask dtype": f"cp=ring: a mask of attention (int64) has the shape [16, 16]\n{allowed_mask}",
        **({"usp dropout": f"cp=usp: {dropout}"} if count == 4 else {}),
    }


# --- kernels -----------------------------------------------------------------------------------------------------


def flash_stand_in(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    """What torch's flash kernel takes, checked; computed by the kernel for CPUs."""
    assert q.shape[3] == k.shape[3] == v.shape[3] and q.shape[3] % 8 == 0
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1
    assert not causal or q.shape[2] == k.shape[2]
    return of_torch.attention_on_cpu(q, k, v, causal, None, scale)


def flash_backward_stand_in(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
    assert out.shape == grad.shape == q.shape and lse.shape == q.shape[:3] and lse.is_contiguous()
    return of_torch.attention_on_cpu_backward(grad, q, k, v, out, lse, causal, None, scale)


def cudnn_backward_stand_in(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float) -> Any:
    assert lse.is_contiguous() and max(q.shape[3], v.shape[3]) <= 128
    return flash_backward_stand_in(grad, q, k, v, out, lse, causal, scale)


def efficient_stand_in(q: Any, k: Any, v: Any, causal: bool, bias: Any, scale: float) -> Any:
    """What torch's memory-efficient kernel takes and gives back (attention_backward.cu), by the formula."""
    check_efficient(q, k, v, bias)
    out, lse = kernels._plain(q, k, v, causal, bias, scale)
    return out, F.pad(lse, (0, -q.shape[2] % 32), value=float("nan"))


def efficient_backward_stand_in(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, bias: Any, scale: float
) -> Any:
    check_efficient(q, k, v, bias)
    assert out.transpose(1, 2).is_contiguous(), "it reads rows at the stride of heads times their number"
    assert lse.shape[2] % 32 == 0 and lse.is_contiguous()
    return kernels._plain_backward(grad, q, k, v, out, lse[:, :, : q.shape[2]], causal, bias, scale)


def check_efficient(q: Any, k: Any, v: Any, bias: Any) -> None:
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert q.shape[3] % 8 == v.shape[3] % 8 == 0
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype
        assert bias.stride(3) == 1 and all(stride % 16 == 0 for stride in bias.stride()[:3])


def not_asked_for(*_: Any) -> Any:
    raise AssertionError


@pytest.fixture(params=["cpu", "plain", "flash", "cudnn", "efficient"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    asked_for = "flash" if request.param == "cudnn" else request.param

    def chosen(q: Any, k: Any, v: Any, bias: Any) -> str:
        return "efficient" if asked_for == "flash" and bias is not None else asked_for  # flash takes no mask

    monkeypatch.setattr(kernels, "_kernel", chosen)
    if request.param == "cudnn":
        monkeypatch.setattr(of_torch, "takes_cudnn", lambda *_: True)
        monkeypatch.setattr(of_torch, "cudnn_attention", flash_stand_in)
        monkeypatch.setattr(of_torch, "cudnn_attention_backward", cudnn_backward_stand_in)
        monkeypatch.setattr(of_torch, "flash_attention", not_asked_for)
    else:
        monkeypatch.setattr(of_torch, "flash_attention", flash_stand_in)
        monkeypatch.setattr(of_torch, "flash_attention_backward", flash_backward_stand_in)
    monkeypatch.setattr(of_torch, "efficient_attention", efficient_stand_in)
    monkeypatch.setattr(of_torch, "efficient_attention_backward", efficient_backward_stand_in)
    return request.param


def tensors(rows: int, keys: int, key_heads: int, width: int, width_v: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    shapes = [(4, rows, width), (key_heads, keys, width), (key_heads, keys, width_v), (4, rows, width_v)]
    return [torch.randn(2, *shape, dtype=dtype) for shape in shapes]


def some_masks(rows: int, keys: int) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(keys)
    seen = torch.rand(2, 1, rows, keys) > 0.4
    seen[0, :, 1] = False
    late = torch.zeros(1, 1, rows, keys, dtype=torch.bool)
    late[..., -1] = True  # nothing seen in the first blocks of a kernel
    return {
        "none": None,
        "bool": seen,
        "late": late,
        "columns": torch.arange(keys)[None, None, None] < keys - 2,
        "float": torch.randn(1, 4, rows, keys),
        "float infinite": torch.zeros(2, 1, rows, keys).masked_fill(~seen, -float("inf")),
    }


@pytest.mark.parametrize("name", ["none", "bool", "late", "columns", "float", "float infinite"])
@pytest.mark.parametrize(
    ("rows", "keys", "key_heads", "width", "width_v"),
    [(6, 6, 4, 8, 8), (6, 10, 2, 8, 8), (5, 700, 1, 8, 8), (33, 33, 4, 5, 5), (8, 8, 2, 16, 8), (8, 8, 2, 4, 7)],
)
def test_parts_of_the_keys_merge_to_the_whole(
    kernel: str, rows: int, keys: int, key_heads: int, width: int, width_v: int, name: str
) -> None:
    mask = some_masks(rows, keys)[name]
    q, k, v, grad = tensors(rows, keys, key_heads, width, width_v, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=whole_mask, scale=0.4, enable_gqa=True)
    expected.backward(grad)
    tiles = []
    for part in (slice(0, 1), slice(1, keys // 2), slice(keys // 2, keys)):
        seen = mask if mask is None or mask.shape[3] == 1 else mask[..., part]
        tiles.append(Tile(slice(0, rows), part, False, seen))
    merged = Merged(q, width_v, 0.4)
    for tile in tiles:
        merged.add(tile, k, v)
    out, lse = merged.result()
    torch.testing.assert_close(out, expected.detach())
    parts = Differentiated(grad, q, out, lse, 0.4)
    found = [parts.add(tile, k, v) for tile in tiles]
    dk, dv = (torch.cat([pair[i].double() for pair in found], 2) for i in (0, 1))
    for own, leaf in zip((parts.result(), dk, dv), leaves, strict=True):
        torch.testing.assert_close(own, leaf.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("name", ["none", "bool"])
def test_causal_kernel(kernel: str, key_heads: int, name: str) -> None:
    mask = some_masks(9, 9)[name]
    q, k, v, grad = tensors(9, 9, key_heads, 8, 8, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    below = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(
        *leaves, attn_mask=below if mask is None else mask & below, enable_gqa=True
    )
    expected.backward(grad)
    options: dict[str, Any] = {"causal": True, "mask": mask, "scale": 8**-0.5}
    out, lse = kernels.attend(q, k, v, **options)
    torch.testing.assert_close(out, expected.detach())
    found = kernels.attend_backward(grad, q, k, v, out, lse, **options)
    for own, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(own.double(), leaf.grad, rtol=1e-9, atol=1e-9)


def test_log_sum_exp_of_a_query_that_sees_nothing(kernel: str) -> None:
    q, k, v, _ = tensors(4, 6, 2, 8, 8, torch.float32)
    mask = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    mask[..., 2, :] = False
    out, lse = kernels.attend(q, k, v, causal=False, mask=mask, scale=1.0)
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -float("inf")).all()
    scores = q @ k.repeat_interleave(2, 1).mT
    torch.testing.assert_close(lse[:, :, 3], scores.logsumexp(-1)[:, :, 3])
    assert torch.isfinite(lse[:, :, [0, 1, 3]]).all()


@pytest.mark.parametrize(
    ("function", "dtype", "bias"),
    [
        ("flash", torch.bfloat16, False),
        ("cudnn", torch.bfloat16, False),
        ("efficient", torch.float32, False),
        ("efficient", torch.float16, True),
    ],
)
def test_calls_of_kernels_for_gpus_fit_their_schema(function: str, dtype: torch.dtype, bias: bool) -> None:
    """Shapes and arguments alone, by torch's own fake kernels: there is no GPU here."""
    device = "meta" if function == "cudnn" else "cuda:0"  # its gradient asks for a context of the device
    with fake_tensors():
        q, k, v, grad = (
            torch.empty(2, 4, rows, 16, dtype=dtype, device=device) for rows in (40, 48, 48, 40)
        )  # fmt: skip
        if function == "flash":
            out, lse = of_torch.flash_attention(q, k, v, False, 0.5)
            grads = of_torch.flash_attention_backward(grad, q, k, v, out, lse, False, 0.5)
        elif function == "cudnn":
            out, lse = of_torch.cudnn_attention(q, k, v, False, 0.5)
            grads = of_torch.cudnn_attention_backward(grad, q, k, v, out, lse, False, 0.5)
        else:
            mask = torch.empty(2, 4, 40, 48, dtype=dtype, device="cuda:0") if bias else None
            out, lse = of_torch.efficient_attention(q, k, v, False, mask, 0.5)
            grads = of_torch.efficient_attention_backward(grad, q, k, v, out, lse, False, mask, 0.5)
        assert out.shape == q.shape and out.dtype == dtype
        assert lse.shape[:2] == (2, 4) and lse.shape[2] in (40, 64) and lse.dtype == torch.float32
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


# --- tiles -------------------------------------------------------------------------------------------------------


def covered(tiles: list[tuple[Tile, torch.Tensor]], rows: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of the queries meets each key, where the keys of a tile stand at given positions."""
    seen = torch.zeros(len(rows), size, dtype=torch.int64)
    for tile, positions in tiles:
        of_rows = torch.arange(len(rows))[tile.rows]
        of_keys = positions[tile.keys]
        block = torch.ones(len(of_rows), len(of_keys), dtype=torch.int64)
        seen[of_rows[:, None], of_keys[None]] += block.tril() if tile.causal else block
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("ranks", "size"), list(itertools.product((1, 2, 3, 4, 8), (1, 5, 13, 16, 48))))
def test_tiles_cover_each_pair_once(ranks: int, size: int, causal: bool) -> None:
    layout = Layout(size, ranks)
    for rank in range(ranks):
        rows = layout.positions(rank)
        assert layout.valid_at(rank) == len(rows)
        expected = torch.ones(len(rows), size, dtype=torch.int64)
        if causal:
            expected = (rows[:, None] >= torch.arange(size)).long()
        round_trip = [
            (ring_tile(layout, rank, origin, causal, None), layout.positions(origin)) for origin in range(ranks)
        ]
        around = [(tile, positions) for tile, positions in round_trip if tile is not None]
        assert torch.equal(covered(around, rows, size), expected)
        own = ring_tile(layout, rank, rank, causal, None) if causal else None
        gathered = [(tile, torch.arange(size)) for tile in whole_tiles(layout, rank, causal, None)]
        gathered += [] if own is None else [(own, rows)]
        assert torch.equal(covered(gathered, rows, size), expected)


def test_causal_work_is_the_same_at_every_place() -> None:
    layout = Layout(64, 4)

    def work(place: int) -> int:
        tiles = [ring_tile(layout, place, origin, True, None) for origin in range(4)]
        return sum((t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start) for t in tiles if t and not t.causal)

    assert len({work(place) for place in range(4)}) == 1
