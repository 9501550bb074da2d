"""Linear layers of a stage: the numbers of autocast, with one copy of each weight for all microbatches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autolaunch_strategies.pipeline.linear_layers import Casts, StageLinears, WeightGradients, add_weight_gradients
from autolaunch_strategies.torch_private.backward import run_backward_of


class Copies(TorchDispatchMode):
    """Counts copies of matrices in another type, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32:
            self.of[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def model(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 5))
    layers[0].weight.requires_grad_(not frozen)
    return layers


def trained(
    mode: StageLinears | None, *, frozen: bool = False, again: bool = False
) -> tuple[list[torch.Tensor | None], Copies, set[tuple[int, ...]]]:
    """(gradients of parameters and of inputs of three microbatches, copies, shapes of bf16 matrices that were kept)."""
    layers, copies, kept = model(frozen), Copies(), set()
    inputs = [torch.randn(3, 4, 8).requires_grad_() for _ in range(3)]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.dim() == 2:
            kept.add(tuple(tensor.shape))
        return tensor

    with copies, mode or torch.enable_grad():
        outputs = []
        for item in inputs:
            with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda it: it):
                outputs.append(checkpoint(layers, item, use_reentrant=False) if again else layers(item))
        for output in outputs:
            run_backward_of([output], [torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)])
    return [item.grad for item in (*layers.parameters(), *inputs)], copies, kept


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"again": True}])
def test_numbers_are_those_of_autocast_with_one_copy_of_each_weight(options: dict[str, bool]) -> None:
    expected, each_time, kept = trained(None, **options)
    mode = StageLinears(WeightGradients(), Casts(), puts_off=False)
    found, once, kept_here = trained(mode, **options)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    weights = [(24, 8), (8, 24), (5, 8)]
    assert all(each_time.of[shape] >= 3 for shape in weights)
    assert [once.of[shape] for shape in weights] == [1, 1, 1]
    if not options.get("again"):
        assert any(shape in kept or shape[::-1] in kept for shape in weights)
    assert not any(shape in kept_here or shape[::-1] in kept_here for shape in weights)


def test_a_layer_that_is_not_trained_keeps_no_input() -> None:
    layer, kept = nn.Linear(8, 24, bias=False).requires_grad_(False), []
    with (
        StageLinears(WeightGradients(), Casts(), puts_off=False),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda it: kept.append(it) or it, lambda it: it),
    ):
        layer(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert kept and all(tensor is layer.weight for tensor in kept)


def test_copies_follow_weights_that_have_changed() -> None:
    weight, casts = nn.Parameter(torch.ones(2, 2)), Casts()
    first = casts.of(weight, torch.bfloat16)
    assert casts.of(weight, torch.bfloat16) is first and casts.of(weight, torch.float32) is weight
    with torch.no_grad():
        weight.mul_(2)
    assert casts.of(weight, torch.bfloat16).sum() == 8
    casts.clear()
    assert not casts._copies


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_weights_may_come_later(autocast: bool) -> None:
    gradients = WeightGradients()
    layers, item = model(frozen=False), torch.randn(3, 4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), StageLinears(gradients, Casts(), puts_off=True):
        output = layers(item)
    gradients.put_off = True
    output.backward(torch.ones_like(output))
    gradients.put_off = False
    assert item.grad is not None and layers[0].weight.grad is None and layers[0].bias.grad is not None
    add_weight_gradients(gradients.take())
    whole = model(frozen=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = whole(item.detach().requires_grad_())
    expected.backward(torch.ones_like(expected))
    for one, other in zip(layers.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_gradients_of_gradients_are_refused() -> None:
    """A penalty on gradients would be computed without the graph of the first backward pass, so wrong."""
    item = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), StageLinears(WeightGradients(), Casts(), puts_off=False):
        output = model(frozen=False)(item)
        (gradient,) = torch.autograd.grad(output.float().sum(), item, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
