"""Cases for the tests of functions on sharded tensors: values and gradients of one process, along every dim."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from autolaunch_strategies.tensor.views import MixedTensors, plain
from autolaunch_strategies.torch_private.sharding_rules import DIFFERENTIATES_TWICE
from tests.support.cases import serve

CASES: dict[str, Callable[[], Any]] = {}
SHAPES = ((2, 4, 8), (3, 5, 7))
"""Even on two ranks along every dim, and uneven."""


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def compare(
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]],
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    make: Callable[..., torch.Tensor] = torch.randn,
) -> None:
    """Values and gradients of functions of one tensor, sharded along each of its dims, with those of a whole one."""
    mesh, wrong = DeviceMesh("cpu", [0, 1]), []
    for what, function in functions.items():
        for shape in shapes:
            torch.manual_seed(0)
            x = make(shape)
            expected = x.clone().requires_grad_()
            alone = function(expected)
            weight = torch.randn(alone.shape)
            (alone * weight).sum().backward()
            for dim in range(len(shape)):
                where = f"{what} of {shape} along {dim}"
                found = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
                try:
                    with MixedTensors(mesh):
                        out = function(found)
                        (out * weight).sum().backward()
                    torch.testing.assert_close(plain(out), alone, rtol=1e-4, atol=1e-5, msg="value: {}".format)
                    torch.testing.assert_close(
                        plain(found.grad), expected.grad, rtol=1e-4, atol=1e-5, msg="gradient: {}".format
                    )
                except Exception as error:
                    wrong.append(f"{where}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


def changed(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a tensor is after `change`, and a function of what was read from it before and afterwards."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        read = change(y)
        return y.square() if read is None else y.square() * read.mean()

    return function


def times(part: torch.Tensor, factor: float) -> torch.Tensor:
    part *= factor
    return part


@case
def writes() -> None:
    """Through views, by index, and by functions for which torch has no rule."""

    def assign(index: Any, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(y: torch.Tensor) -> None:
            y[index] = value(y) if callable(value) else value

        return changed(change)

    def slices(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(y: torch.Tensor) -> None:
            y[..., :3] *= factor
            y[:, 1:] -= factor
            y[1:] += factor

        return changed(change)

    everything = slice(None)
    rows, steps = torch.tensor([0, 1]), torch.tensor([1, 0])
    compare(
        {
            "a slice times": slices(0.5),
            "a slice multiplied": changed(lambda y: y[..., :3].mul_(0.5)),
            "a slice of a slice": changed(lambda y: y[..., :3][:, 1:].mul_(0.5)),
            "select": changed(lambda y: y.select(-1, 0).mul_(3.0)),
            "select of the first": changed(lambda y: y[:, 0].mul_(3.0)),
            "narrow": changed(lambda y: y.narrow(1, 0, 2).zero_()),
            "transposed": changed(lambda y: y.transpose(1, 2)[:, 0].mul_(5.0)),
            "flat": changed(lambda y: y.view(-1)[3:5].mul_(2.0)),
            "flat of a slice": changed(lambda y: y[..., :2].flatten(1)[:, 1:4].mul_(2.0)),
            "diagonal": changed(lambda y: y.diagonal(dim1=1, dim2=2).mul_(2.0)),
            "function": changed(lambda y: torch.relu_(y[..., :3])),
            "option": changed(lambda y: F.relu(y[:, :2], inplace=True)),
            "twice, and read": changed(lambda y: times(y[..., 1:5].mul_(2.0), 3.0)),
            "of what is sharded": changed(lambda y: y[..., :2].copy_(y[..., 3:5])),
            "number": assign((..., 0), 0.0),
            "minus infinity": assign((..., slice(5, None)), -10.0),
            "steps": assign((..., slice(None, None, 2)), 1.0),
            "one sample": assign(0, lambda y: y[1] * 2),
            "part": assign((..., slice(3)), lambda y: y[..., :3].tanh()),
            "class token": assign((everything, 0), lambda y: y[:, 1]),
            "plain": assign((everything, 0), torch.ones(7)[:1]),
            "mask": changed(lambda y: y.__setitem__(torch.arange(len(y)) == 1, 3.0)),
            "mask of all": changed(lambda y: y.__setitem__(y.detach() > 0, 0.5)),
            "list": assign((..., [1, 3]), -2.0),
            "index": assign((everything, rows), lambda y: y[:, 2:4]),
            "two indices": assign((rows, steps), lambda y: y[:2, 2]),
            "index_put_": changed(lambda y: y.index_put_((rows, steps), y[:2, 2])),
            "index_add_": changed(lambda y: y.index_add_(1, rows, y[:, 2:4] * 2)),
            "index_fill_": changed(lambda y: y.index_fill_(-1, rows, 2.0)),
            "fill_": changed(lambda y: y[..., 2:].fill_(2.0)),
            "index_copy_": changed(lambda y: y.index_copy_(-1, rows, y[..., 2:4] * 2)),
            "masked_scatter_": changed(lambda y: y.masked_scatter_(y.detach() > 0, y.detach().flip(1))),
            "tril_": changed(lambda y: y.tril_()),
            "scatter_": changed(lambda y: y.scatter_(1, torch.zeros_like(plain(y)[:, :1], dtype=torch.long), 7.0)),
        },
        SHAPES[1:],  # even parts are no other code
    )


@case
def gradients_sharded_otherwise() -> None:
    """What was written into meets tensors sharded along other dims, and so does its gradient."""
    mesh = DeviceMesh("cpu", [0, 1])
    for dim in range(3):

        def added(x: torch.Tensor, dim: int = dim) -> torch.Tensor:
            other = torch.ones_like(plain(x).detach())
            return (distribute_tensor(other, mesh, [Shard(dim)]) if isinstance(x, DTensor) else other) + x

        def set_to(y: torch.Tensor) -> None:
            y[:, 0] = y[:, 1] * 2

        compare(
            {
                f"select along {dim}": lambda x, added=added: added(changed(lambda y: y[:, 0].mul_(2.0))(x)),
                f"set along {dim}": lambda x, added=added: added(changed(set_to)(x)),
            }
        )


@case
def writes_without_gradients() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    # In torch 2.11 parts that `unbind` makes don't know their strides.
    unbind = {"unbind": lambda y: [part.mul_(2) for part in y.unbind(-1)]} if DIFFERENTIATES_TWICE else {}
    for what, change in {
        **unbind,
        "select": lambda y: y.select(-1, 0).mul_(3.0),
        "chunk": lambda y: y.chunk(2, 1)[0].mul_(2),
        "flat": lambda y: y.view(-1)[3:5].mul_(2.0),
        "part": lambda y: y.__setitem__((..., slice(3)), -1.0),
        "detached": lambda y: y.detach()[..., :3].zero_(),
        "data": lambda y: y.data[..., :3].zero_(),
    }.items():
        for context in (torch.no_grad, torch.inference_mode):
            for shape in SHAPES:
                for dim in range(3):
                    with context(), MixedTensors(mesh):
                        x = torch.randn(shape)
                        dist.broadcast(x, 0)
                        found = distribute_tensor(x, mesh, [Shard(dim)])
                        change(found)
                        change(x)
                        message = f"{what} of {shape} along {dim} in {context.__name__}: {{}}".format
                        torch.testing.assert_close(plain(found), x, msg=message)


@case
def losses() -> None:
    """Every loss that torch reduces itself."""

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, x.numel()).view(x.shape)

    compare(
        {
            f"{name} {reduction}": lambda x, loss=loss, reduction=reduction: loss(x, reduction)
            for reduction in ("mean", "sum")
            for name, loss in {
                "mse": lambda x, r: F.mse_loss(x, like(x), reduction=r),
                "mse of both": lambda x, r: F.mse_loss(x, x.detach() * 0.5, reduction=r),
                "weighted mse": lambda x, r: F.mse_loss(x, like(x), reduction=r, weight=like(x).abs()),
                "l1": lambda x, r: F.l1_loss(x, like(x), reduction=r),
                "smooth l1": lambda x, r: F.smooth_l1_loss(x, like(x), reduction=r, beta=0.5),
                "huber": lambda x, r: F.huber_loss(x, like(x), r, 0.5),
                "bce": lambda x, r: F.binary_cross_entropy(x.sigmoid(), like(x).abs(), reduction=r),
                "bce of logits": lambda x, r: F.binary_cross_entropy_with_logits(x, like(x).abs(), reduction=r),
                "soft margin": lambda x, r: F.soft_margin_loss(x, like(x).sign(), reduction=r),
                "poisson": lambda x, r: F.poisson_nll_loss(x, like(x).abs(), reduction=r),
                "gaussian": lambda x, r: F.gaussian_nll_loss(x, like(x), like(x).abs(), reduction=r),
                "hinge": lambda x, r: F.hinge_embedding_loss(x, like(x).sign(), reduction=r),
                "ranking": lambda x, r: F.margin_ranking_loss(x, x.sin(), like(x).sign(), reduction=r),
                "kl": lambda x, r: F.kl_div(x, like(x).abs(), reduction="batchmean" if r == "sum" else r),
                "cross entropy": lambda x, r: F.cross_entropy(x, torch.ones_like(like(x)[:, 0]).long(), reduction=r),
                "nll": lambda x, r: F.nll_loss(x.log_softmax(1), torch.ones_like(like(x)[:, 0]).long(), reduction=r),
                "cosine": lambda x, r: F.cosine_embedding_loss(
                    x.flatten(1), like(x).flatten(1), torch.ones(len(x)), reduction=r
                ),
                "triplet": lambda x, r: F.triplet_margin_loss(x, like(x), x.detach().cos(), reduction=r),
                "multi margin": lambda x, r: F.multi_margin_loss(x[:, 0], torch.ones(len(x)).long(), reduction=r),
                "soft margins": lambda x, r: F.multilabel_soft_margin_loss(x, like(x).abs(), reduction=r),
            }.items()
        }
    )


@case
def rules() -> None:
    """Functions for which torch's rules are wrong, or miss in the backward pass."""
    compare(
        {
            "amax": lambda x: x / x.abs().amax(),
            "amin": lambda x: torch.amin(x) * x,
            "cumsum": lambda x: x.cumsum(-1) + torch.cumsum(x, dim=-2) + x.cumsum(0),
            "cumprod": lambda x: x.cumprod(-1) + torch.cumprod(x, 1),
            "logcumsumexp": lambda x: x.logcumsumexp(-1),
            "prod": lambda x: x.prod(-1, keepdim=True) * x,
            "hardswish": F.hardswish,
            "hardswish in place": changed(lambda y: F.hardswish(y, inplace=True)),
            "hardsigmoid": lambda x: F.hardsigmoid(x),
            "relu6": lambda x: F.relu6(x * 5),
            "hardtanh": lambda x: F.hardtanh(x),
            "logsigmoid": F.logsigmoid,
            "hardshrink": lambda x: F.hardshrink(x),
            "prelu": lambda x: F.prelu(x, torch.tensor([0.3])),
            "pool": lambda x: F.avg_pool1d(x, 2),
        }
    )


@case
def gradients_asked_for() -> str:
    """By `torch.autograd.grad`: for sharded tensors and plain ones; a second derivative of a vocabulary's loss."""
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    x, matrix, target = torch.randn(3, 4), torch.randn(4, 6), torch.tensor([1, 5, 0])
    results = []
    for sharded in (False, True):
        weight = distribute_tensor(matrix, mesh, [Shard(1)]) if sharded else matrix.clone()
        weight.requires_grad_()
        scale, unused = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
        with MixedTensors(mesh):
            loss = F.cross_entropy((x * scale) @ weight, target)
            found = torch.autograd.grad(loss, [scale, weight, unused], allow_unused=True, retain_graph=True)
            assert found[2] is None
            logits = (x * scale) @ weight
            penalties = torch.autograd.grad(logits.square().sum(), scale, create_graph=True)[0].square().sum()
            results.append([*map(plain, found[:2]), *map(plain, torch.autograd.grad(penalties, [weight, scale]))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    with MixedTensors(mesh), pytest.raises(RuntimeError, match="differentiated again") as raised:
        torch.autograd.grad(loss, [scale, weight], create_graph=True)
    return str(raised.value)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    serve({"all": CASES})
