"""Hooks that a model puts on its parameters run, or the config that would lose them is refused by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

from autolaunch_strategies.apply.order import foresee
from autolaunch_strategies.config import ConfigError, parallel_config
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.materialise import materialise
from autolaunch_strategies.plan.rules import read_plan
from autolaunch_strategies.tensor.model_parallel import apply_plan, matched
from tests.support.messages import assert_told
from tests.support.one_rank import mesh_of_one_rank

WIDTH, EXPERTS = 8, 4


def after(parameter: torch.Tensor) -> None:
    parameter.grad *= 0


def before(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0


REGISTER: dict[str, Callable[[nn.Parameter], Any]] = {
    "before": lambda parameter: parameter.register_hook(before),
    "after": lambda parameter: parameter.register_post_accumulate_grad_hook(after),
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.einsum("td,tkdf->tkf", hidden, self.up[index])
        return (made * weights.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x.reshape(-1, WIDTH), index.reshape(-1, 2), weights.reshape(-1, 2)).view_as(x)


class Model(nn.Module):
    def __init__(self, hooked: str = "", kind: str = "before") -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 3, dtype=torch.int64)
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)
        self.handle = REGISTER[kind](self.get_parameter(hooked)) if hooked else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def refused(model: nn.Module, mesh: str, **axes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        foresee(model, parallel_config(mesh, **axes))
    return error.value


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_sharding_over_dp_is_refused(kind: str, level: int) -> None:
    error = refused(Model("blocks.1.up.weight", kind), "2", dp=level)
    assert_told(error, "dp", "blocks.1.up.weight", "hooks", write="dp=ddp", allowed=("whole",))


@pytest.mark.parametrize("kind", REGISTER)
def test_sharding_along_mp_is_refused_until_its_rule_is_removed(kind: str) -> None:
    model = Model("embed.weight", kind)
    assert_told(refused(model, "1x2", mp="auto"), "mp.plan", "embed.weight", "hooks", write="'mp.plan={embed: null}'")
    foresee(model, parallel_config("1x2", mp={"plan": {"embed": None}}))
    inside = refused(Model("blocks.1.up.weight", kind), "1x2", mp="auto")
    assert_told(inside, "mp.plan", "blocks.1.up.weight", write="'mp.plan={blocks.*.up: null}'")


def test_a_tied_parameter_is_named_with_every_rule() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    model.embed.weight.register_hook(before)
    error = refused(model, "1x2", mp="auto")
    assert_told(error, "mp.plan", "embed.weight", write="'mp.plan={embed: null, head: null}'")


def test_sharing_experts_out_is_refused() -> None:
    error = refused(Model("blocks.0.experts.up"), "2", ep=2, dp=0)
    assert_told(error, "ep=2", "blocks.0.experts.up", "hooks", write="ep=1")


@pytest.mark.parametrize(
    ("hooked", "mesh", "axes"),
    [
        pytest.param("embed.weight", "2", {"dp": 0}, id="ddp"),
        pytest.param("embed.weight", "1", {"dp": 3}, id="one rank"),
        pytest.param("blocks.0.norm.weight", "1x2", {"mp": "auto"}, id="whole along mp"),
        pytest.param("embed.weight", "2", {"dp": 0, "ep": 2}, id="beside experts"),
    ],
)
def test_parameters_that_stay_may_have_hooks(hooked: str, mesh: str, axes: dict[str, Any]) -> None:
    foresee(Model(hooked), parallel_config(mesh, **axes))


def test_hooks_that_were_removed_do_not_count() -> None:
    model = Model("embed.weight")
    model.handle.remove()
    foresee(model, parallel_config("2x2", dp=3, mp="auto"))


def test_what_torchs_styles_shard_is_refused_when_they_are_applied() -> None:
    model = Model("head.weight")
    matches, _ = matched(model, read_plan({"head": ColwiseParallel()}))
    with mesh_of_one_rank() as mesh, pytest.raises(ConfigError) as error:
        apply_plan(model, mesh, matches)
    assert_told(error.value, "mp.plan", "head.weight", "hooks")


@pytest.mark.parametrize("kind", REGISTER)
def test_they_run_in_a_model_that_was_built_without_memory(kind: str) -> None:
    construction = Construction(seed=3)
    with construction.recording():
        model = Model("embed.weight", kind)
    construction.remember(model)
    materialise(model, torch.device("cpu"), construction)
    ids = torch.arange(6).view(2, 3)
    model(ids).sum().backward()
    assert not model.embed.weight.grad.any()
    model.handle.remove()
    model(ids).sum().backward()
    assert model.embed.weight.grad.any()
