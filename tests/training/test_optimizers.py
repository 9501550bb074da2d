"""Optimizers of sharded parameters: the numbers of one device, whatever stands beside them in a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autolaunch.models.muon import Muon
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.training.optimizers import (
    _BY_ELEMENT,
    adapt_optimizer,
    check_optimizer_in_stages,
    prefer_fused,
)
from tests.support.messages import Told, assert_only_told
from tests.support.one_rank import mesh_of_one_rank


def trained(kind: Any, parameters: list[nn.Parameter], fused: bool) -> Any:
    """The optimizer after three steps, the last parameter with a gradient from the second one on."""
    optimizer = kind(parameters, lr=0.01)
    adapt_optimizer(optimizer)
    if fused:
        prefer_fused(optimizer)
    for step in range(3):
        for parameter in parameters[: None if step else -1]:
            parameter.grad = parameter.detach() * (step - 0.5) + 0.25
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", sorted(_BY_ELEMENT, key=lambda kind: kind.__name__))
def test_sharded_and_plain_parameters_of_a_group_are_updated_as_on_one_device(kind: Any) -> None:
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((4, 3), (3,), (2, 2), (5,))]
    with mesh_of_one_rank() as mesh:
        placements = ([Shard(0)], [Replicate()], None, [Shard(0)])
        mixed = [
            nn.Parameter(value.clone() if placed is None else distribute_tensor(value.clone(), mesh, placed))
            for value, placed in zip(values, placements, strict=True)
        ]
        expected = [nn.Parameter(value.clone()) for value in values]
        one, here = trained(kind, expected, fused=False), trained(kind, mixed, fused=True)
        assert bool(here.param_groups[0].get("fused")) == (kind in (torch.optim.Adam, torch.optim.AdamW))
        assert all(mine is parameter for mine, parameter in zip(here.param_groups[0]["params"], mixed, strict=True))
        assert here.state.keys() == {mine for mine, other in zip(mixed, expected, strict=True) if other in one.state}
        for parameter, other in zip(mixed, expected, strict=True):
            pairs = [(parameter, other), *((here.state[parameter][name], it) for name, it in one.state[other].items())]
            for value, wanted in pairs:
                if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim()):
                    assert isinstance(value, DTensor) == isinstance(parameter, DTensor)
                plain = value.full_tensor() if isinstance(value, DTensor) else value
                torch.testing.assert_close(torch.as_tensor(plain), torch.as_tensor(wanted), check_dtype=False)


def test_a_way_that_somebody_chose_stays() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    for options in ({"foreach": True}, {"foreach": False}, {"fused": False}, {"capturable": True}):
        optimizer = torch.optim.AdamW([{"params": parameters[:1], **options}, {"params": parameters[1:]}])
        prefer_fused(optimizer)
        assert [group["fused"] for group in optimizer.param_groups] == [options.get("fused"), True]
    optimizer = torch.optim.AdamW([{"params": parameters}, {"params": [nn.Parameter(torch.zeros(1, device="meta"))]}])
    prefer_fused(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [True, None]


@pytest.mark.parametrize("closure", [False, True])
def test_memory_that_is_laid_out_otherwise_is_updated_as_on_one_device(closure: bool) -> None:
    """torch's fused step on a CPU goes through memory from where a tensor begins, whatever the tensor's strides."""
    values = [torch.arange(24.0).view(4, 6), torch.arange(24.0).view(6, 4).t(), torch.arange(6.0)]
    gradients = [torch.randn(6, 4).t(), torch.randn(4, 6), torch.tensor(2.0).expand(6)]

    def after_three_steps(mesh: Any) -> list[torch.Tensor]:
        parameters = [nn.Parameter(value.clone()) for value in values]
        if mesh is not None:
            parameters = [
                nn.Parameter(DTensor.from_local(value.clone(), mesh, [Replicate()], run_check=False))
                for value in values[:1]
            ] + parameters[1:]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=False if mesh is None else None)
        adapt_optimizer(optimizer)
        prefer_fused(optimizer)

        def differentiate() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                is_sharded = isinstance(parameter, DTensor)
                parameter.grad = DTensor.from_local(gradient, mesh, [Replicate()]) if is_sharded else gradient

        for _ in range(3):
            if not closure:
                differentiate()
            optimizer.step(differentiate if closure else None)
        return [item.full_tensor() if isinstance(item, DTensor) else item.detach() for item in parameters]

    with mesh_of_one_rank() as mesh:
        for found, wanted in zip(after_three_steps(mesh), after_three_steps(None), strict=True):
            torch.testing.assert_close(found, wanted)


def test_a_step_that_fails_leaves_the_parameters_in_their_place() -> None:
    """Who catches what it raised (no memory for the state) and goes on clears gradients and trains on."""
    with mesh_of_one_rank() as mesh:
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        adapt_optimizer(optimizer)
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        fails = [True]

        def limited(*_: Any) -> None:
            if fails.pop():
                raise torch.OutOfMemoryError("no memory")

        limited_by = optimizer.register_step_pre_hook(limited)  # behind the one that puts placeholders
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        limited_by.remove()
        assert optimizer.param_groups[0]["params"] == [parameter]
        optimizer.zero_grad()
        assert parameter.grad is None
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.testing.assert_close(parameter.full_tensor(), torch.full((4, 3), 1 - 0.001 - 0.1))
        assert optimizer.state.keys() == {parameter}


class ClipsTheNorm(torch.optim.SGD):
    """As LAMB of several libraries: gradients are divided by their norm over all parameters where that is large."""

    def __init__(self, params: Any, lr: float, most: float = 1.0) -> None:
        super().__init__(params, lr)
        self.most = most

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        gradients = [item.grad for group in self.param_groups for item in group["params"] if item.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(torch.clamp(norm / self.most, min=1.0))
        super().step()
        return loss


class CallsNoClosure(torch.optim.SGD):
    """Gradients divided by their norm over all parameters, in a loop that has called `backward`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [item.grad for group in self.param_groups for item in group["params"] if item.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class LearnsItsRate(torch.optim.Optimizer):
    """As D-adaptation and Prodigy: one distance for all parameters, which grows from a small one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        moved = scale = 0.0
        for item in (item for group in self.param_groups for item in group["params"] if item.grad is not None):
            state = self.state[item]
            state.setdefault("start", item.clone())
            state.setdefault("sum", torch.zeros_like(item)).add_(item.grad)
            moved += float(((state["start"] - item) * item.grad).sum())
            scale += float(state["sum"].abs().sum())
        for group in self.param_groups:
            group["d"] = max(group["d"], moved / scale)
            for item in group["params"]:
                if item.grad is not None:
                    item.sub_(group["d"] * item.grad)
        return loss


class ScalesByNorms(torch.optim.Optimizer):
    """As LAMB and LARS have it: by the norm of each matrix."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for item in group["params"]:
                if item.grad is not None:
                    item.sub_(group["lr"] * item.norm() / item.grad.norm() * item.grad)
        return loss


class AddsNoise(torch.optim.SGD):
    """Langevin dynamics."""

    def __init__(self, params: Any, lr: float, generator: torch.Generator | None = None) -> None:
        super().__init__(params, lr)
        self.generator = generator

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for item in (item for group in self.param_groups for item in group["params"] if item.grad is not None):
            item.data += torch.randn(item.shape, generator=self.generator)
        return loss


class FindsNoise(torch.optim.AdamW):
    """One of a user's that is derived from torch's, and has more attributes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.generator, self.seen = torch.Generator(), {}

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.seen[len(self.seen)] = self.param_groups[0]["lr"]
        return loss


def layers(kind: Any, split: bool, **options: Any) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (3, 3), (5, 3))]
    return kind([{"params": [item]} for item in parameters] if split else parameters, lr=0.1, **options)


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        *((kind, split) for kind in (ClipsTheNorm, CallsNoClosure, LearnsItsRate) for split in (False, True)),
        (torch.optim.LBFGS, False),  # it takes no groups
    ],
)
@pytest.mark.parametrize("begins", [0.0, 0.5], ids=["warmup", "constant"])
def test_an_optimizer_that_joins_parameters_is_refused_in_stages(kind: Any, split: bool, begins: float) -> None:
    optimizer = layers(kind, split)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: begins)  # wraps its step, bound to it
    with pytest.raises(ConfigError) as caught:
        check_optimizer_in_stages(optimizer)
    assert_only_told(
        caught.value, Told(f"pp with {kind.__name__}", "depends on the gradients of others", allowed=("AdamW", "pp"))
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "kind", [torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.Muon, Muon, ScalesByNorms, FindsNoise, AddsNoise]
)
def test_an_optimizer_that_takes_each_parameter_by_itself_runs_in_stages(kind: Any, split: bool) -> None:
    """And nothing is left of its trial: neither parameters nor its state nor random numbers, and no hook is called."""
    optimizer = layers(kind, split)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: pytest.fail("a hook is called"))
    random, state = torch.get_rng_state(), dict(optimizer.state)
    check_optimizer_in_stages(optimizer)
    assert torch.equal(torch.get_rng_state(), random) and dict(optimizer.state) == state
    for group in optimizer.param_groups:
        assert all(torch.equal(item, torch.ones_like(item)) and item.grad is None for item in group["params"])


def test_a_line_search_is_refused_in_stages() -> None:
    with pytest.raises(ConfigError, match="pp with LBFGS"):
        check_optimizer_in_stages(layers(torch.optim.LBFGS, False, line_search_fn="strong_wolfe"))


def test_an_optimizer_that_draws_from_a_generator_runs_in_stages() -> None:
    generator = torch.Generator()
    before = generator.get_state()
    check_optimizer_in_stages(layers(AddsNoise, False, generator=generator))
    assert torch.equal(generator.get_state(), before)


def test_an_optimizer_that_cannot_be_tried_is_believed() -> None:
    class NeedsMore(torch.optim.SGD):
        def step(self, closure: Any = None, *, scale: float) -> Any:  # type: ignore[override]  # what is tried here
            raise AssertionError("never called")

    check_optimizer_in_stages(layers(NeedsMore, False))


class JoinsMatrices(torch.optim.Optimizer):
    """Keeps a plain matrix beside each parameter, as Shampoo does; torch can't add it to a sharded one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for item in self.param_groups[0]["params"]:
            item.sub_(torch.eye(len(item)) @ item.grad)
        return loss


def test_an_optimizer_that_fails_on_sharded_parameters_says_what_can_be_done() -> None:
    def fails() -> None:
        raise RuntimeError("the model's own DTensor")

    with mesh_of_one_rank() as mesh:
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        optimizer = JoinsMatrices([parameter], lr=0.1)
        adapt_optimizer(optimizer)
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        assert_only_told(
            caught.value,
            Told("optimizer=JoinsMatrices", "sharded parameters", allowed=("dp=ddp without mp", "torch")),
        )
        with pytest.raises(RuntimeError, match="the model's own"):
            optimizer.step(fails)
