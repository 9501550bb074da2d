"""Cases for the tests of sequence shards.

Every function runs on whole tensors and on shards: values are the same, the mean over ranks of the gradients is the
gradient, and what should stay a shard does, without a gather.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten
from transformers.loss.loss_utils import ForCausalLMLoss

from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.sharded_sequence import shard as sequence_shard
from autolaunch_strategies.sharded_sequence.collectives import gather_parts, scatter_sum, sum_over
from autolaunch_strategies.sharded_sequence.shard import Positions, SequenceShard, cut
from autolaunch_strategies.tensor.views import MixedTensors, plain
from tests.support.cases import RANK, WORLD, serve

CASES: dict[str, Callable[[], Any]] = {}
GATHERS: list[str] = []
WIDTH, CLASSES = 6, 5
LAYOUTS = {
    "ring": Layout(12 * WORLD // 2, WORLD),
    "contiguous": Layout(12 * WORLD // 2, WORLD, WORLD),
    "padded ring": Layout(4 * WORLD - 1, WORLD),
    "padded contiguous": Layout(4 * WORLD - 3, WORLD, WORLD),
    "short": Layout(3, WORLD, WORLD),  # of four ranks the last two hold nothing
}
if WORLD == 4:  # what two ranks can't show
    LAYOUTS = {
        "both": Layout(16, 4, 2),
        "padded both": Layout(13, 4, 2),
        "padded ring": LAYOUTS["padded ring"],
        "short": LAYOUTS["short"],
    }


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def counted(*args: Any) -> torch.Tensor:
    GATHERS.append("gather")
    return gather_parts(*args)


sequence_shard.gather_parts = counted


class Operands:
    """What functions are called with besides their first argument, all plain: parameters, and tables of length `s`."""

    def __init__(self, size: int) -> None:
        random = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

        self.size = size
        self.w, self.square, self.b, self.scale = (
            parameter(CLASSES, WIDTH),
            parameter(WIDTH, WIDTH),
            parameter(CLASSES),
            parameter(WIDTH),
        )
        self.batched = parameter(2, WIDTH, 3)
        self.table, self.rows, self.column = parameter(size, WIDTH), parameter(2, size, WIDTH), parameter(size, 1)
        self.embedding = parameter(7, WIDTH)
        self.parameters = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        self.mask = torch.rand(2, size, generator=random) > 0.4
        self.mask[:, 0] = True
        self.tokens = torch.randint(7, (2, size), generator=random)
        self.labels = torch.randint(CLASSES, (2, size), generator=random)
        self.ignoring = self.labels.masked_fill(self.mask, -100)
        self.ignoring[1, 0] = 1
        self.probabilities = torch.rand(2, size, CLASSES, generator=random, dtype=torch.float64).softmax(-1)
        self.class_weight = torch.rand(CLASSES, generator=random, dtype=torch.float64)
        self.index = torch.tensor([3, 0, 2])


def scores(x: Any, g: Operands) -> Any:
    return F.linear(x, g.w, g.b)


def in_place(x: Any, g: Operands) -> Any:
    y = x * 1.0
    same = y
    y += g.table
    y.mul_(2).clamp_(min=-1)
    y[..., 1] = 3.0
    y[:, 0] = g.scale
    assert same is y
    return y


def of_plain(x: Any, g: Operands) -> Any:
    y = g.rows * 1.0
    y += x
    y[:, :, 0] = x[:, :, 1]
    return y


def iterated(x: Any, g: Operands) -> Any:
    return torch.stack(list(x))


def joined_by_hand(x: torch.Tensor) -> torch.Tensor:
    joined = x.new_empty(*x.shape[:-1], 2 * WIDTH)
    joined[..., :WIDTH].copy_(x)
    joined[..., WIDTH:].copy_(x * x)
    return joined + x.new_zeros((*x.shape[:-1], 1)) + x.new_full(size=(2, x.shape[1], 1), fill_value=2.0)


LOCAL: dict[str, Callable[[Any, Operands], Any]] = {
    "add": lambda x, g: x + 1,
    "radd": lambda x, g: 2.0 + x,
    "rsub": lambda x, g: 1 - x,
    "rpow": lambda x, g: 2**x,
    "pow": lambda x, g: x**2 / 3,
    "neg abs": lambda x, g: abs(-x),
    "itself": lambda x, g: x * x.sigmoid() - torch.exp(x),
    "scale": lambda x, g: x * g.scale,
    "table": lambda x, g: x + g.table,
    "table on the left": lambda x, g: g.table * x,
    "rows": lambda x, g: torch.mul(x, other=g.rows),
    "column": lambda x, g: x * g.column,
    "broadcast": lambda x, g: x * g.table[:1],
    "more dims": lambda x, g: x[None] * g.rows,
    "where": lambda x, g: torch.where(g.mask[..., None], x, g.scale),
    "where method": lambda x, g: x.where(x > 0, 0.5),
    "masked_fill": lambda x, g: x.masked_fill(~g.mask[..., None], -2.0),
    "clamp": lambda x, g: x.clamp(-1, 0.5),
    "activations": lambda x, g: F.gelu(x) + F.silu(x) + F.relu(x) + x.tanh() + F.softplus(x) + F.leaky_relu(x, 0.1),
    "compare": lambda x, g: (x > 0).to(x.dtype) * x + (x == x).double(),
    "logical": lambda x, g: (~(x > 0) & (x < 1) | x.isnan()).to(torch.float64) * x,
    "types": lambda x, g: x.float().double().to(torch.float32).type_as(g.w).contiguous().clone(),
    "maximum": lambda x, g: torch.maximum(x, g.table) + torch.max(x, g.table),
    "lerp": lambda x, g: torch.lerp(x, g.table, 0.3),
    "rms by hand": lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g.scale,
    "like": lambda x, g: torch.ones_like(x) + torch.zeros_like(x) * x,
    "linear": scores,
    "matmul": lambda x, g: x @ g.square,
    "matmul vector": lambda x, g: x @ g.scale,
    "matmul batched": lambda x, g: torch.matmul(x, g.batched),
    "bmm": lambda x, g: torch.bmm(x, g.batched),
    "addmm": lambda x, g: torch.addmm(g.scale, x.view(-1, WIDTH), g.square).view(x.size()),
    "einsum": lambda x, g: torch.einsum("bsd,vd,bs -> bvs", x, g.w, g.rows[..., 0]),
    "layer_norm": lambda x, g: F.layer_norm(x, (WIDTH,), g.scale, g.scale),
    "rms_norm": lambda x, g: F.rms_norm(x, (WIDTH,), g.scale),
    "softmax": lambda x, g: F.softmax(x, dim=-1) + x.softmax(-1) + torch.softmax(x, 0),
    "log_softmax": lambda x, g: F.log_softmax(x, -1),
    "mean": lambda x, g: x.mean(-1),
    "mean of several": lambda x, g: x.mean((0, -1), keepdim=True),
    "sum": lambda x, g: torch.sum(x, dim=0),
    "var": lambda x, g: x.var(-1, keepdim=True) + x.std(dim=2, keepdim=True),
    "norm": lambda x, g: x.norm(dim=-1) + torch.linalg.vector_norm(x, dim=-1) + torch.norm(x, 2, -1),
    "normalize": lambda x, g: F.normalize(x, dim=-1),
    "amax": lambda x, g: x.amax(-1),
    "max": lambda x, g: x.max(-1),
    "max values": lambda x, g: torch.max(x, dim=2, keepdim=True).values,
    "argmax": lambda x, g: x.argmax(dim=-1),
    "topk": lambda x, g: x.topk(2),
    "sort": lambda x, g: x.sort(-1, descending=True),
    "cumsum": lambda x, g: x.cumsum(-1),
    "logsumexp": lambda x, g: x.logsumexp(-1),
    "flip roll": lambda x, g: x.flip(0, 2).roll(1, -1),
    "gather": lambda x, g: scores(x, g).log_softmax(-1).gather(-1, g.labels[..., None]).squeeze(-1),
    "gather by a shard": lambda x, g: torch.gather(x, 2, x.argmax(-1, keepdim=True)),
    "index_select": lambda x, g: x.index_select(2, g.index),
    "repeat_interleave": lambda x, g: x.repeat_interleave(2, dim=-1),
    "unsqueeze": lambda x, g: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x, g: x[:1].squeeze() if g.size > 1 else x,
    "transpose": lambda x, g: x.transpose(1, 2),
    "permute": lambda x, g: x.permute(1, 2, 0).movedim(0, 1).swapaxes(0, 1),
    "mT": lambda x, g: x.mT + x.transpose(-1, -2),
    "expand": lambda x, g: x.unsqueeze(0).expand(3, -1, g.size, WIDTH),
    "expand_as": lambda x, g: x[..., :1].expand_as(x) + g.scale.expand_as(x),
    "heads": lambda x, g: x.view(2, g.size, 2, 3).transpose(1, 2),
    "heads and back": lambda x, g: x.unflatten(-1, (3, -1)).transpose(1, 2).transpose(1, 2).reshape(2, g.size, -1),
    "flatten": lambda x, g: x.view(-1, WIDTH),
    "flatten further": lambda x, g: x[:, None].expand(-1, 3, -1, -1).reshape(6, -1, WIDTH).flatten(0, 1),
    "split back": lambda x, g: x.view(-1, WIDTH).view(2, -1, WIDTH),
    "split otherwise": lambda x, g: x.repeat_interleave(2, 0).flatten(0, 1).view(2, 2, g.size, WIDTH),
    "trailing": lambda x, g: x.mean(-1).view(-1),
    "chunk": lambda x, g: x.chunk(2, dim=-1),
    "split": lambda x, g: torch.split(x, [1, 2, 3], -1)[1],
    "unbind": lambda x, g: x.unbind(-1),
    "iterated": iterated,
    "narrow": lambda x, g: x.narrow(-1, 1, 2) + x.narrow(1, 0, g.size).narrow(2, 2, 2),
    "select": lambda x, g: x.select(0, 1),
    "cat": lambda x, g: torch.cat([x, g.rows, x], dim=-1),
    "stack": lambda x, g: torch.stack([x, g.rows]) + torch.stack((x, x), dim=-1).sum(-1),
    "pad": lambda x, g: F.pad(x, (1, 2, 0, 0, 1, 0), value=3.0),
    "getitem": lambda x, g: x[..., 2:4],
    "getitem mixed": lambda x, g: x[1, :, None, ::2],
    "scatter": lambda x, g: (
        x.scatter(2, x.topk(2)[1], 2.0) + torch.zeros_like(x).scatter_(-1, x.topk(2)[1], x[..., :2])
    ),
    "new and copied": lambda x, g: joined_by_hand(x),
    "getitem of a list": lambda x, g: x[..., [-1, 1]] + x[[1, 0], :, None, :2].squeeze(2),
    "shift": lambda x, g: x[:, :-1],
    "shift from the right": lambda x, g: x[..., 1:, :].contiguous(),
    "shift all": lambda x, g: x[:, 0 : g.size] + x[:],
    "middle": lambda x, g: x[:, 1:-1, :3].transpose(0, 1),
    "part of rows": lambda x, g: x.view(-1, WIDTH)[2 : 2 * g.size - 1],
    "part of a part": lambda x, g: x[:, :-1].reshape(-1, WIDTH)[1:],
    "sections": lambda x, g: torch.cat([x.narrow(1, 1, 2), x.narrow(1, 1, 2)], 2) if g.size > 3 else x,
    "chunks of the sequence": lambda x, g: x.chunk(2, dim=1) if g.size > 3 else x,
    "split of the sequence": lambda x, g: x.split([1, g.size - 1], dim=1)[1] if g.size > 3 else x,
    "embedding": lambda x, g: F.embedding(x.argmax(-1), g.embedding),
    "lookup": lambda x, g: g.embedding[x.argmax(-1)],
    "one_hot": lambda x, g: F.one_hot(x.argmax(-1), WIDTH) * x,
    "dropout off": lambda x, g: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0),
    "detach": lambda x, g: x + x.detach() + x.data,
    # losses and sums: plain at once
    "total": lambda x, g: x.sum(),
    "total of dims": lambda x, g: x.sum((0, 1)),
    "mean of all": lambda x, g: x.mean() + torch.mean(x),
    "mean over the sequence": lambda x, g: x.mean(1),
    "pooled": lambda x, g: (x * g.mask[..., None]).sum(1, keepdim=True) / g.mask.sum(1)[:, None, None],
    "count": lambda x, g: (x > 0).sum(1),
    "loss flat": lambda x, g: F.cross_entropy(scores(x, g).float().view(-1, CLASSES), g.labels.view(-1)),
    "loss ignoring": lambda x, g: F.cross_entropy(
        scores(x, g).view(-1, CLASSES), g.ignoring.view(-1), ignore_index=-100
    ),
    "loss ignoring all": lambda x, g: F.cross_entropy(
        scores(x, g).view(-1, CLASSES), torch.full((2 * g.size,), -1), ignore_index=-1
    ),
    "loss summed": lambda x, g: F.cross_entropy(scores(x, g).flatten(0, 1), g.ignoring.flatten(), reduction="sum") / 3,
    "loss each": lambda x, g: F.cross_entropy(scores(x, g).transpose(1, 2), g.ignoring, reduction="none"),
    "loss of classes second": lambda x, g: F.cross_entropy(scores(x, g).transpose(1, 2), g.ignoring),
    "loss of smoothed": lambda x, g: F.cross_entropy(
        scores(x, g).view(-1, CLASSES), g.ignoring.view(-1), label_smoothing=0.1
    ),
    "loss weighted": lambda x, g: F.cross_entropy(
        scores(x, g).view(-1, CLASSES), g.ignoring.view(-1), g.class_weight, label_smoothing=0.2
    ),
    "loss to probabilities": lambda x, g: F.cross_entropy(
        scores(x, g).transpose(1, 2), g.probabilities.transpose(1, 2), g.class_weight
    ),
    "loss shifted": lambda x, g: F.cross_entropy(
        scores(x, g)[..., :-1, :].contiguous().view(-1, CLASSES), g.labels[..., 1:].contiguous().view(-1)
    ),
    "loss to a shard": lambda x, g: F.cross_entropy(
        scores(x, g).view(-1, CLASSES), (x.detach()[..., :CLASSES].argmax(-1) - 1).view(-1), ignore_index=-1
    ),
    "loss weighted to a shard": lambda x, g: F.cross_entropy(
        scores(x, g).view(-1, CLASSES),
        (x.detach()[..., :CLASSES].argmax(-1) - 1).view(-1),
        g.class_weight,
        ignore_index=-1,
    ),
    "loss of a module": lambda x, g: nn.CrossEntropyLoss()(scores(x, g).view(-1, CLASSES), g.labels.view(-1)),
    "loss of transformers": lambda x, g: ForCausalLMLoss(scores(x, g), g.labels, CLASSES),
    "loss of transformers counted": lambda x, g: ForCausalLMLoss(
        scores(x, g), g.ignoring, CLASSES, num_items_in_batch=torch.tensor(7)
    ),
    "nll": lambda x, g: F.nll_loss(scores(x, g).log_softmax(-1).view(-1, CLASSES), g.ignoring.view(-1), g.class_weight),
    "mse": lambda x, g: F.mse_loss(x, g.rows),
    "mse of a target": lambda x, g: F.mse_loss(g.rows, x, reduction="sum"),
    "l1 each": lambda x, g: F.l1_loss(x, g.rows, reduction="none"),
    "smooth_l1": lambda x, g: F.smooth_l1_loss(x, g.rows) + F.huber_loss(x, g.rows, delta=0.5),
    "bce": lambda x, g: F.binary_cross_entropy_with_logits(
        x[..., 0], g.mask.double(), pos_weight=torch.tensor(2.0).double()
    ),
    "kl": lambda x, g: F.kl_div(scores(x, g).log_softmax(-1), g.probabilities, reduction="batchmean"),
    "policy": lambda x, g: (
        (scores(x, g)[:, :-1].log_softmax(-1).gather(-1, g.labels[:, 1:, None]).squeeze(-1) * g.mask[:, 1:]).sum(-1)
        / g.mask[:, 1:].sum(-1).clamp(min=1)
    ).mean(),
}
"""Computed without a gather."""


def attention_by_hand(x: Any, g: Operands) -> Any:
    weights = (x @ x.transpose(1, 2) + g.table[:, 0]).masked_fill(~g.mask[:, None], -9.0).softmax(-1)
    return weights @ (x * g.scale)


def attention_by_letters(x: Any, g: Operands) -> Any:
    weights = torch.einsum("... i d, ... j d -> ... i j", x, x * g.scale).softmax(-1)
    return torch.einsum("bij,bjd->bid", weights, x)


def heads(x: Any) -> Any:
    return x.view(*x.shape[:2], 2, -1).transpose(1, 2)


ROWS: dict[str, Callable[[Any, Operands], Any]] = {
    "scores": lambda x, g: x @ x.transpose(1, 2),
    "attention by hand": attention_by_hand,
    "attention by letters": attention_by_letters,
    "baddbmm": lambda x, g: torch.baddbmm(g.table[:, 0], batch1=x, batch2=x.transpose(1, 2), beta=0.5, alpha=0.3),
    "attention": lambda x, g: F.scaled_dot_product_attention(heads(x), heads(x * g.scale), heads(x)),
    "causal attention": lambda x, g: F.scaled_dot_product_attention(x, x, x * g.scale, is_causal=True),
    "masked attention": lambda x, g: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), (g.table @ g.table.T)[None, None]
    ),
    "attention to others": lambda x, g: F.scaled_dot_product_attention(x, g.rows[:, :2], g.rows[:, :2]),
}
"""Rows of this rank only, which may gather what they are multiplied with."""

WHOLE: dict[str, Callable[[Any, Operands], Any]] = {
    "first position": lambda x, g: x[:, 0],
    "last position": lambda x, g: x[torch.arange(2), g.mask.sum(-1) - 1],
    "masked": lambda x, g: x[g.mask],
    "strided": lambda x, g: x[:, ::2],
    "max over the sequence": lambda x, g: x.max(1).values + x.amax((0, 1)),
    "largest": lambda x, g: x.max(),
    "argmax over the sequence": lambda x, g: x.argmax(1),
    "softmax over the sequence": lambda x, g: x.softmax(1),
    "cumsum over the sequence": lambda x, g: x.cumsum(1),
    "flip of the sequence": lambda x, g: x.flip(1),
    "token shift": lambda x, g: x[:, 1:] - x[:, :-1] * x[:, :1],
    "cat along the sequence": lambda x, g: torch.cat([x, g.rows], dim=1),
    "pad of the sequence": lambda x, g: F.pad(x, (0, 0, 1, 0)),
    "merged with width": lambda x, g: x.reshape(2, -1),
    "convolution": lambda x, g: F.conv1d(x.transpose(1, 2), g.batched[:1].permute(0, 1, 2)),
    "contraction": lambda x, g: torch.einsum("bsd,bsv->bdv", x, scores(x, g)),
    "in place": in_place,
    "of a plain tensor": of_plain,
    "random whole": lambda x, g: x.repeat(1, 2, 1),
    "norm of all": lambda x, g: x.norm(),
    "classes of positions": lambda x, g: F.cross_entropy(x, g.tokens[:, :WIDTH] % g.size) if g.size > 5 else x[:, 0],
    "table of pairs": lambda x, g: x[:, :, None] - x[:, None],
    "copied": lambda x, g: copy.deepcopy(x.detach()) * 1.0 + x[:, -1:],
}


def outcome(
    function: Callable[[Any, Operands], Any], x: Any, g: Operands
) -> tuple[list[Any], list[torch.Tensor | None]]:
    outputs = [item for item in tree_flatten(function(x, g))[0] if isinstance(item, torch.Tensor)]
    random = torch.Generator().manual_seed(2)
    loss: Any = 0.0
    for item in outputs:
        if item.is_floating_point():
            loss = loss + (item * torch.rand(item.shape, generator=random, dtype=torch.float64)).sum()
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    return outputs, [parameter.grad for parameter in g.parameters]


def mean_over_ranks(gradient: torch.Tensor | None, like: torch.Tensor, group: Any) -> torch.Tensor:
    gradient = torch.zeros_like(like) if gradient is None else gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient / group.size()


def expect_equal(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        result, expected, rtol=1e-6, atol=1e-7, equal_nan=True, check_stride=False, msg=lambda text: f"{what}: {text}"
    )


def compare(function: Callable[[Any, Operands], Any], layout: Layout, stays: bool, rows: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    start = torch.randn(2, layout.size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole, ours = (start.clone().requires_grad_() for _ in range(2))
    expected, gradients = outcome(function, whole, g := Operands(layout.size))
    positions = Positions.of_layout(layout)
    g = Operands(layout.size)
    GATHERS.clear()
    results, own = outcome(function, SequenceShard.of(cut(ours, 1, positions, group), 1, positions, group), g)
    if stays:
        assert not GATHERS, f"{len(GATHERS)} gathers"
    assert not rows or all(isinstance(item, SequenceShard) for item in results)
    assert len(results) == len(expected)
    for one, other in zip(results, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype, (one.shape, other.shape, one.dtype, other.dtype)
        assert one.device == other.device and one.dim() == other.dim() and len(one) == len(other) if one.dim() else True
        assert one.requires_grad == other.requires_grad
        expect_equal(plain(one).detach(), other.detach(), "value")
    pairs = [(ours, ours.grad, whole.grad)]
    pairs += list(zip(g.parameters, own, gradients, strict=True))
    for like, gradient, right in pairs:
        right = torch.zeros_like(like) if right is None else right
        expect_equal(mean_over_ranks(gradient, like, group), right, f"gradient of {list(like.shape)}")


@case
def functions() -> dict[str, dict[str, str]]:
    """What went wrong, by layout and function. A failure is on every rank or the rest hangs, which the test ends."""
    failures: dict[str, dict[str, str]] = {}
    for name, layout in LAYOUTS.items():
        failures[name] = {}
        for table in (LOCAL, ROWS, WHOLE):
            for function_name, function in table.items():
                if os.environ.get("ONLY", function_name) != function_name:
                    continue
                try:
                    compare(function, layout, table is LOCAL and "short" not in name, table is ROWS)
                except Exception:
                    failures[name][function_name] = traceback.format_exc()[-1500:]
    return failures


@case
def collectives() -> None:
    group = dist.group.WORLD
    assert group is not None
    counts = tuple(range(WORLD))  # the first has nothing
    for shape, dim in (((2, 0, 3), 1), ((0,), 0), ((0, 2), 0), ((3, 2, 0), 2)):
        sizes = list(shape)
        sizes[dim] = counts[RANK]
        own = torch.randn(sizes, dtype=torch.float64, requires_grad=True)
        together = gather_parts(own, dim, counts, group)
        assert together.is_contiguous()
        expect_equal(together.split(counts, dim)[RANK].detach(), own.detach(), "own part")
        weights = torch.rand(together.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(RANK))
        (together * weights).sum().backward()
        summed = sum(
            torch.rand(together.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
            for rank in range(WORLD)
        )
        assert own.grad is not None and isinstance(summed, torch.Tensor)
        expect_equal(own.grad, summed.split(counts, dim)[RANK], "adjoint")
        scattered = scatter_sum(weights, dim, counts, group)
        expect_equal(scattered, summed.split(counts, dim)[RANK], "scattered")
    flags = torch.tensor([RANK == 1, True])
    assert gather_parts(flags, 0, (2,) * WORLD, group).tolist() == [v for r in range(WORLD) for v in (r == 1, True)]
    x = torch.full((), float(RANK), requires_grad=True)
    total = sum_over(x, group)
    assert total.item() == sum(range(WORLD))
    (total * (RANK + 1)).backward()
    assert x.grad is not None and x.grad.item() == sum(range(1, WORLD + 1))
    # twice differentiable
    y = torch.tensor([1.0 + RANK], requires_grad=True)
    (slope,) = torch.autograd.grad((gather_parts(y, 0, (1,) * WORLD, group) ** 3).sum(), y, create_graph=True)
    slope.sum().backward()
    assert y.grad is not None and abs(y.grad.item() - 6 * WORLD * y.item()) < 1e-4, y.grad


def shard_of(whole: torch.Tensor, dim: int = 1, layout: Layout | None = None) -> Any:
    group = dist.group.WORLD
    assert group is not None
    positions = Positions.of_layout(layout or Layout(whole.shape[dim], WORLD))
    return SequenceShard.of(cut(whole, dim, positions, group), dim, positions, group)


@case
def attributes() -> dict[str, Any]:
    size = 4 * WORLD - 1
    x = torch.randn(2, size, 3, requires_grad=True)
    shard = shard_of(x)
    assert shard.shape == x.shape and shard.size(1) == size and shard.size() == x.size() and len(shard) == 2
    assert shard.dim() == shard.ndim == 3 and shard.numel() == x.numel() and shard.dtype == x.dtype
    assert shard.device == x.device and shard.is_floating_point() and shard.stride() == x.stride()
    assert torch.is_tensor(shard) and torch.is_floating_point(shard) and torch.numel(shard) == x.numel()
    assert not shard.is_leaf and shard.requires_grad and shard.grad_fn is shard.local.grad_fn
    assert shard.is_contiguous() and isinstance(shard, torch.Tensor) and shard.type() == "torch.FloatTensor"
    assert isinstance(hash(shard), int) and shard in {shard: 1}
    assert shard.new_zeros(2, 2).shape == (2, 2) and type(shard.new_zeros(2)) is torch.Tensor
    GATHERS.clear()
    texts = [repr(shard), str(shard), f"{shard}"]
    assert not GATHERS
    version = shard._version
    (changed := shard * 1).add_(1)
    assert changed._version == changed.local._version >= 1 and shard._version == version
    seen: list[Any] = []
    shard.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    shard.retain_grad()
    (shard * 2).sum().backward()
    assert seen == [tuple(shard.local.shape)]
    assert shard.grad.shape == x.shape and shard.grad.local.eq(2.0 * WORLD).all()
    leaf = shard.detach().requires_grad_()
    assert leaf.is_leaf and leaf.requires_grad and leaf.grad is None
    leaf.requires_grad = False
    assert not leaf.requires_grad
    with torch.no_grad():
        assert not (shard * 1).requires_grad
    one = shard_of(torch.full((1, 1, 1), 7.0), layout=Layout(1, WORLD))
    assert one.item() == 7.0 and float(one) == 7.0 and bool(one) and one.tolist() == [[[7.0]]]
    assert torch.equal(torch.from_numpy(shard.detach().numpy()), x.detach())
    file = io.BytesIO()
    torch.save(shard.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), x.detach())
    assert torch.equal(shard.detach().cpu(), x.detach()) if type(shard.cpu()) is torch.Tensor else True
    return {"text": texts[0], "same": len(set(texts)) == 1}


@case
def backward_of_a_shard() -> None:
    x = torch.randn(2, 4 * WORLD, 3, requires_grad=True)
    shard_of(x).backward(torch.ones_like(x))
    gradient = x.grad
    assert gradient is not None
    expect_equal(mean_over_ranks(gradient, x, dist.group.WORLD), torch.ones_like(x), "gradient")


@case
def what_torch_functions_do_not_see() -> dict[str, str]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.shape = x.shape
            return x.sum()

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            return gradients[0].expand(context.shape)

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            return gradients[0]

    def tried(function: Callable[[], Any]) -> str:
        try:
            function()
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"

    def around() -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return shard_of(x) + 1

    x = torch.randn(2, 4 * WORLD, 3, requires_grad=True)
    messages = {
        "its output": tried(lambda: Double.apply(shard_of(x)) + 1),
        "its gradient": tried(lambda: Total.apply(shard_of(x)).backward()),
        "itself": tried(lambda: Same.apply(shard_of(x)).sum()),
        "dispatch": tried(around),
        "grad": tried(lambda: torch.autograd.grad(x.sum(), shard_of(x))),
        "shape": tried(lambda: shard_of(x.detach()).unsqueeze_(0)),
    }
    with torch.no_grad():
        kept = Double.apply(shard_of(x))
    expect_equal(kept.whole(), x.detach() * 2, "without gradients")
    return messages


@case
def random_numbers() -> dict[str, Any]:
    shard = shard_of(torch.ones(2, 50 * 2 * WORLD, 3))
    torch.manual_seed(5)
    dropped = F.dropout(shard, 0.5)
    rows = dropped.local.flatten().tolist()
    after = torch.rand(()).item()
    torch.manual_seed(5)
    again = F.dropout(shard, 0.5).local.flatten().tolist()
    torch.manual_seed(5)
    F.dropout(shard, 0.5, training=False)
    F.dropout(shard, 0.0)
    nn.Dropout(0.3).eval()(shard)
    nothing = torch.rand(()).item()
    torch.manual_seed(5)
    straight = torch.rand(()).item()
    noise = torch.randn_like(shard)
    noisy = (shard * 1).normal_()
    assert not GATHERS or GATHERS.clear() is None
    return {
        "rows": rows,
        "after": after,
        "repeats": again == rows,
        "nothing is drawn": nothing == straight,
        "share": dropped.whole().eq(0).double().mean().item(),
        "noise": [noise.local.std().item(), noisy.local.std().item(), noise.local.sum().item()],
        "same elsewhere": F.dropout1d(torch.ones(4, 6, 2)).sum().item(),
    }


@case
def narrow_types() -> None:
    """bf16 and fp16: sums are not rounded per rank, nor overflow; autocast decides as for whole tensors."""
    labels = torch.randint(CLASSES, (2, 4096 * WORLD))
    for dtype in (torch.bfloat16, torch.float16):
        x = (torch.randn(2, 4096 * WORLD, CLASSES) * 12).to(dtype)
        shard = shard_of(x)
        for function in (
            lambda x: x.mean(),
            lambda x: x.abs().mean(1),
            lambda x: F.cross_entropy(x.view(-1, CLASSES), labels.view(-1)),
            lambda x: F.mse_loss(x, torch.zeros_like(x)),
        ):
            result = function(shard)
            assert result.dtype == function(x).dtype == dtype
            torch.testing.assert_close(result.float(), function(x.float()), rtol=1e-2, atol=1e-2)
    x = torch.randn(2, 4 * WORLD, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        products = [F.linear(item, torch.ones(CLASSES, WIDTH)) for item in (shard_of(x), x)]
        assert products[0].dtype == products[1].dtype == torch.bfloat16
        losses = [F.cross_entropy(item.flatten(0, 1), torch.zeros(8 * WORLD, dtype=torch.int64)) for item in products]
        assert losses[0].dtype == losses[1].dtype, losses
        torch.testing.assert_close(*losses)


@case
def kept_tables_serve_every_mode() -> None:
    """What is remembered of positions was made in inference mode or with another default device, and still serves."""
    layout = Layout(10 * WORLD, WORLD)
    x = torch.randn(2, 10 * WORLD, 3)
    with torch.inference_mode():
        expect_equal(shard_of(x, layout=layout).whole(), x, "inference")
    leaf = x.clone().requires_grad_()
    shard_of(leaf, layout=layout).whole().sum().backward()
    assert leaf.grad is not None
    other = torch.randn(2, 11 * WORLD, 3)
    with torch.device("meta"):
        whole = shard_of(other).whole()
    expect_equal(whole, other, "device mode")


# --- with mp ----------------------------------------------------------------------------------------------------------


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "mp"))
    return mesh["cp"], mesh["mp"]


@case
def mp() -> dict[str, str]:
    if WORLD != 4:
        return {}
    cp, mp = meshes()
    group = cp.get_group()
    failures = {}
    size = 11  # padded

    def tensors() -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(4)
        shapes = {"x": (2, size, WIDTH), "w": (7, WIDTH), "up": (8, WIDTH), "down": (WIDTH, 8), "scale": (WIDTH,)}
        return {
            name: torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()
            for name, shape in shapes.items()
        }

    labels = torch.randint(7, (2, size), generator=torch.Generator().manual_seed(6))
    labels[0, :3] = -100

    def head(x: Any, t: dict[str, Any]) -> Any:
        return F.linear(x, t["w"])

    def block(x: Any, t: dict[str, Any]) -> Any:
        return F.linear(F.gelu(F.linear(x * t["scale"], t["up"])), t["down"])

    uses: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], bool]] = {
        "loss": (lambda x, t: F.cross_entropy(head(x, t).float().view(-1, 7), labels.view(-1)), True),
        "loss smoothed": (
            lambda x, t: F.cross_entropy(head(x, t).view(-1, 7), labels.view(-1), label_smoothing=0.1),
            True,
        ),
        "loss of transformers": (lambda x, t: ForCausalLMLoss(head(x, t), labels, 7), True),
        "loss shifted": (
            lambda x, t: F.cross_entropy(head(x, t)[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1)),
            True,
        ),
        "z loss": (lambda x, t: head(x, t).logsumexp(-1).pow(2).mean(), True),
        "sum": (lambda x, t: (head(x, t) ** 2).sum(), True),
        "mean over the sequence": (lambda x, t: (head(x, t) ** 2).mean(1).pow(2).sum(), True),
        "block": (lambda x, t: (block(x, t) ** 2).sum(), True),
        "plain table": (lambda x, t: (head(x, t) * torch.arange(size)[:, None]).sum(), True),
        "square": (lambda x, t: F.mse_loss(head(x, t), torch.ones(2, size, 7, dtype=torch.float64)), True),
        "first position": (lambda x, t: (head(x, t)[:, 0] ** 2).sum(), False),
        "largest": (lambda x, t: head(x, t).amax(1).pow(2).sum(), False),
        "generated": (lambda x, t: (head(x, t)[:, -1, :].softmax(-1) ** 2).sum(), False),
    }
    for name, (function, stays) in uses.items():
        expected = tensors()
        loss = function(expected["x"], expected)
        loss.backward()
        ours = tensors()
        operands: dict[str, Any] = dict(ours)
        for key, placement in (("w", Shard(0)), ("up", Shard(0)), ("down", Shard(1))):
            operands[key] = distribute_tensor(ours[key].detach(), mp, [placement]).requires_grad_()
        positions = Positions.of_layout(Layout(size, 2))
        try:
            GATHERS.clear()
            with MixedTensors(mp):
                shard = SequenceShard.of(cut(operands["x"], 1, positions, group), 1, positions, group)
                result = function(shard, operands)
                if stays:
                    assert not GATHERS, "gathered"
                result.backward()
            expect_equal(plain(result).detach(), loss.detach(), "loss")
            for key, right in expected.items():
                gradient = operands[key].grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.full_tensor()
                expect_equal(mean_over_ranks(gradient, right, group), zero_if_none(right), key)
        except Exception:
            failures[name] = traceback.format_exc()[-2500:]
    whole = torch.randn(2, size, WIDTH)
    for placement in (Replicate(), Shard(1), Shard(2), Shard(0)):
        positions = Positions.of_layout(Layout(size, 2))
        local = distribute_tensor(cut(whole, 1, positions, group), mp, [placement])
        gathered = SequenceShard.of(local, 1, positions, group).whole()
        assert isinstance(gathered, DTensor) and gathered.shape == whole.shape
        expect_equal(gathered.full_tensor(), whole, str(placement))
        expect_equal(plain(SequenceShard.of(local, 1, positions, group)), whole, f"plain {placement}")
    return failures


def zero_if_none(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    serve({"all": CASES})
