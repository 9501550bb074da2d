"""Cases for the tests of styles: exact layouts of parameters and activations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from autolaunch_strategies import (
    ColWiseParallel,
    PrepareLayerInput,
    PrepareLayerOutput,
    ProcessMesh,
    RowWiseParallel,
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnable,
    SequenceParallelEnd,
    parallelize,
)
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.tensor.views import MixedTensors, plain
from autolaunch_strategies.torch_private.sharding_rules import DIFFERENTIATES_TWICE
from tests.support.cases import serve

MESH = ProcessMesh([[0, 1]], ["dp", "mp"])
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


class Holder(nn.Module):
    """A model around one layer, which rules call `layer`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.own = layer, nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def planned(layer: nn.Module, styles: Any, key: str = "layer") -> Holder:
    model = Holder(layer)
    parallelize(model, None, MESH, {"mp_config": {"parallelize_plan": styles if key == "" else {key: styles}}})
    return model


def layout(tensor: Any) -> str:
    """What a tensor is and what this rank holds of it: `S0 [2, 8]`, `R [4]`, `P [2, 4]`, or `plain [4, 4]`."""
    if not isinstance(tensor, DTensor):
        return f"plain {list(tensor.shape)}"
    placement = tensor.placements[0]
    kind = f"S{placement.dim}" if placement.is_shard() else "R" if placement.is_replicate() else "P"
    return f"{kind} {list(tensor.to_local().shape)}"


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.shift


class Lora(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 6)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 6))
        self.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_A @ self.lora_B


def equal_to_one_process(layer: Callable[[], nn.Module], styles: Any, x: torch.Tensor, key: str = "layer") -> Any:
    """Layouts of parameters, their gradients and the output; values are compared with one process."""
    torch.manual_seed(0)
    alone = layer()
    torch.manual_seed(0)
    model = planned(layer(), styles, key)
    out, expected = model(x), alone(x)
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    torch.testing.assert_close(whole, expected)
    (out * 2).sum().backward()
    (expected * 2).sum().backward()
    found = {"out": layout(out)}
    for (name, parameter), other in zip(model.layer.named_parameters(), alone.parameters(), strict=True):
        found[name] = layout(parameter)
        assert parameter.requires_grad == other.requires_grad
        if other.grad is not None:
            gradient = parameter.grad
            assert layout(gradient) == layout(parameter), name
            torch.testing.assert_close(
                gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, other.grad
            )
    for (name, buffer), other in zip(model.layer.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=f"{name}: {{}}".format)
    return found


@case
def placements() -> dict[str, Any]:
    x, tokens = torch.randn(2, 3, 4), torch.tensor([[0, 1, 5], [2, 3, 4]])
    column, row = ColWiseParallel(), RowWiseParallel()

    def both(first: Any, second: Any) -> dict[str, Any]:
        return {"layer.0": first, "layer.1": second}

    run = equal_to_one_process
    return {
        "column linear": run(lambda: nn.Linear(4, 6), column, x),
        "column linear 2-D": run(lambda: nn.Linear(4, 6), column, x[0]),
        "column embedding": run(lambda: nn.Embedding(6, 4), column, tokens),
        "column conv1d": run(lambda: Conv1D(6, 4), column, x),
        "row linear": run(lambda: nn.Linear(4, 6), row, x),
        "row linear of a whole input": run(lambda: nn.Linear(4, 6), RowWiseParallel(is_input_parallel=False), x),
        "row embedding": run(lambda: nn.Embedding(6, 4), row, tokens),
        "row conv1d": run(lambda: Conv1D(6, 4), row, x),
        "gathered 2-D": run(lambda: nn.Linear(4, 6), {"ColWiseParallel": {"gather_output": True}}, x[0]),
        "gathered 3-D": run(lambda: nn.Linear(4, 6), ColWiseParallel(gather_output=True), x),
        "gathered 4-D": run(lambda: nn.Linear(4, 6), ColWiseParallel(gather_output=True), x[None]),
        "uneven": run(lambda: nn.Linear(4, 5), ColWiseParallel(gather_output=True), x),
        "column then row": run(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), both(column, row), x, key=""),
        "column, norm, row": run(
            lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)),
            {"layer.0": column, "layer.2": row},
            x[0],
            key="",
        ),
        "column norm": run(lambda: nn.BatchNorm1d(4), ColWiseParallel(gather_output=True), x[0]),
        "raw weight": run(Raw, column, x, key="layer.weight"),
        "raw weight of rows": run(Raw, ColWiseParallel(shard_dim=0), x, key="layer.weight"),
        "raw both": run(Raw, {"layer.weight": column, "layer.shift": column}, x, key=""),
        "lora B": run(Lora, column, x, key="layer.lora_B"),
        "lora A": run(Lora, row, x, key="layer.lora_A"),
        "first writer wins": run(lambda: nn.Linear(4, 6), [column, RowWiseParallel()], x),
        "first key wins": run(lambda: nn.Linear(4, 6), {"layer": row, "lay.*": row}, x, key=""),
        "only the named parameter": run(lambda: nn.Linear(4, 6), column, x, key="layer.weight"),
    }


class LargestGradient(TorchDispatchMode):
    """The most rows that a gradient of a table has while it is active."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.rows = max(self.rows, len(out))
        return out


@case
def look_up() -> dict[str, Any]:
    """Tables that are sharded by their rows: evenly and not, padded, and with rows on one rank alone."""
    mesh, rows = DeviceMesh("cpu", [0, 1]), {}
    index = torch.tensor([[0, 4, 2], [3, 4, 1]])
    for what, count, padding in (
        ("even", 6, None), ("uneven", 5, None), ("padded", 5, 1), ("padded elsewhere", 5, -1), ("few", 1, None),
    ):  # fmt: skip
        table = torch.randn(count, 4)
        results = []
        for sharded in (False, True):
            weight = distribute_tensor(table, mesh, [Shard(0)]) if sharded else table.clone()
            weight.requires_grad_()
            with MixedTensors(mesh):
                out = plain(F.embedding(index.clamp(max=count - 1), weight, padding))
                with LargestGradient() as largest:
                    (out * torch.arange(4.0)).square().sum().backward()
            results.append([out, plain(weight.grad)])
        torch.testing.assert_close(results[1], results[0], msg=f"{what}: {{}}".format)
        rows[what] = largest.rows
    with MixedTensors(mesh), pytest.raises(RuntimeError, match="no row of 6"):
        F.embedding(index + 2, distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
    return rows


@case
def running_statistics() -> None:
    """Of inputs that are sharded along any dim, whichever function is called."""
    mesh, x = DeviceMesh("cpu", [0, 1]), torch.randn(4, 6, 8)
    raw: dict[str, Any] = {"weight": None, "bias": None, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
    for function in (
        partial(F.batch_norm, training=True),
        partial(torch.batch_norm, training=True, **raw),
        partial(F.instance_norm, use_input_stats=True),
        partial(torch.instance_norm, use_input_stats=True, **raw),
    ):
        for dim in range(3):
            expected, found = ({"running_mean": torch.zeros(6), "running_var": torch.ones(6)} for _ in range(2))
            whole = function(x, **expected)
            with MixedTensors(mesh):
                out = function(distribute_tensor(x, mesh, [Shard(dim)]), **found)
            torch.testing.assert_close(plain(out), whole)
            torch.testing.assert_close(found, expected, msg=f"{function} along {dim}: {{}}".format)


@case
def combined_parts() -> None:
    """What is combined by more than a sum, and comes back with a gradient that is to be added up over ranks."""
    mesh, x, weight = DeviceMesh("cpu", [0, 1]), torch.randn(4, 6), torch.randn(4, 6)
    index = torch.tensor([[3], [0], [2], [1]])
    for what, function in {
        "gather": lambda x: torch.logsumexp(x - x.gather(1, index), 1, keepdim=True),
        "embedding": lambda x: F.embedding(index, x).sum(1) @ x.T @ x,
        "maximum": lambda x: (x - x.amax(1, keepdim=True)).exp(),
        "maximum of all": lambda x: (x - x.max()).exp(),
        "norm": lambda x: x * x / x.norm(dim=1, keepdim=True),
        "norm of all": lambda x: x * x / x.norm(),
        "largest": lambda x: x * x / torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True),
    }.items():
        expected = x.clone().requires_grad_()
        alone = function(expected)
        (alone * weight).sum().backward()
        for dim in range(2):
            found = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
            with MixedTensors(mesh):
                out = function(found)
                (out * weight).sum().backward()
            message = f"{what} along {dim}: {{}}".format
            torch.testing.assert_close(plain(out), alone, msg=message)
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=message)


@case
def second_derivatives() -> None:
    """A penalty on the gradient for what a model is given, as of critics, and on those of its weights."""
    x = torch.randn(4, 6)
    for what, act in {"tanh": torch.tanh, "silu": F.silu, "norm": lambda x: F.layer_norm(x, (8,)).sin()}.items():

        class Critic(nn.Module):
            def __init__(self, act: Any = act) -> None:
                super().__init__()
                self.a, self.b, self.c, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1), act

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.c(self.act(self.b(self.act(self.a(x)))))

        def penalty(model: nn.Module) -> torch.Tensor:
            given = x.clone().requires_grad_()
            score = model(given).sum()
            (slope,) = torch.autograd.grad(score, given, create_graph=True)
            return score + (slope.norm(dim=1) - 1).square().mean()

        torch.manual_seed(0)
        alone = Critic()
        torch.manual_seed(0)
        model = planned(Critic(), {"layer.a": ColWiseParallel(), "layer.b": RowWiseParallel()}, "")
        if not DIFFERENTIATES_TWICE:
            with pytest.raises(ConfigError, match=r"torch 2\.12 or newer"):
                penalty(model)
            continue
        expected, found = penalty(alone), penalty(model)
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
        for (name, parameter), other in zip(model.layer.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(plain(parameter.grad), other.grad, msg=f"{what} {name}: {{}}".format)


class Seen(nn.Module):
    """Passes on what it gets and remembers its layout."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.got = layout(x)
        self.shape = list(x.shape)
        return x * scale


class Pair(nn.Module):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, mask


@case
def sequence() -> dict[str, Any]:
    x, found = torch.randn(2, 6, 4), {}
    for length in (6, 5):
        for turn in (True, False):
            start = planned(Seen(), SequenceParallelBegin(need_transpose=turn))
            begun = start(x[:, :length])
            end = planned(Seen(), SequenceParallelEnd(need_transpose=turn))
            out = end(begun)
            assert torch.equal(out, x[:, :length])
            disable = planned(Seen(), SequenceParallelDisable(need_transpose=turn))
            again = disable(begun)
            found[f"{length} {turn}"] = {
                "begin": layout(begun), "global": list(begun.shape), "end": layout(out),
                "inside disable": disable.layer.got, "after disable": layout(again),
            }  # fmt: skip
            assert torch.equal(again.full_tensor(), begun.full_tensor())
    enable = planned(Seen(), SequenceParallelEnable())
    out = enable(x)
    assert torch.equal(out, x)
    found["enable"] = [enable.layer.got, enable.layer.shape, layout(out)]
    keyword = planned(Seen(), SequenceParallelEnd(False))
    found["keyword"] = layout(keyword(scale=2.0, x=planned(Seen(), SequenceParallelBegin(False))(x)))
    pair = planned(Pair(), SequenceParallelBegin(False))
    hidden, mask = pair(mask=torch.ones(2, 6), hidden=x)
    found["tuple"] = [layout(hidden), layout(mask)]
    return found


@case
def hooks() -> dict[str, Any]:
    sizes = []

    def double(process_mesh: Any) -> Any:
        sizes.append(process_mesh.size())
        return lambda module, inputs: (inputs[0] * 2,)

    def add_one(process_mesh: Any) -> Any:
        return lambda module, inputs, output: output + 1

    model = planned(Seen(), [PrepareLayerInput(double), PrepareLayerOutput(add_one), PrepareLayerOutput(double_output)])
    return {"sizes": sizes, "out": model(torch.ones(2)).tolist()}


def double_output(process_mesh: Any) -> Any:
    return lambda module, inputs, output: output * 2


@case
def head_with_tied_weight() -> dict[str, str]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    found = {}
    for name, plan in {
        "both": {"embed": RowWiseParallel(), "head": ColWiseParallel()},
        "embed": {"embed": ColWiseParallel()},
        "head": {"head": ColWiseParallel()},
    }.items():
        torch.manual_seed(0)
        alone = Tied()
        torch.manual_seed(0)
        model = Tied()
        parallelize(model, None, MESH, {"mp_config": {"parallelize_plan": plan}})
        assert model.head.weight is model.embed.weight
        tokens = torch.tensor([[0, 1, 5], [2, 3, 4]])
        for item in (alone, model):
            F.cross_entropy(item(tokens).flatten(0, 1), tokens.flatten()).backward()
        torch.testing.assert_close(model.embed.weight.grad.full_tensor(), alone.embed.weight.grad)
        found[name] = layout(model.embed.weight)
    return found


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    serve({"all": CASES})
