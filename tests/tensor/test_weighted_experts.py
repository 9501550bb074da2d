"""Experts whose results are multiplied by their weights are told from those that do something else with these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies.apply.order import foresee
from autolaunch_strategies.config import ConfigError, parallel_config
from autolaunch_strategies.tensor.weighted_experts import are_only_multiplied
from tests.support.messages import assert_told

EXPERTS, WIDTH, INNER = 4, 8, 12


class Experts(nn.Module):
    """As people write them; `kind` says what is done with weights. The biases are zeros, as they begin."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.num_experts, self.kind = EXPERTS, kind
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.2)
        self.bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))
        self.drop = nn.Dropout(0.5)
        self.calls: list[int] = []

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden))
        if self.kind == "normalised":
            weights = weights / weights.sum(-1, keepdim=True)
        if self.kind == "sigmoid":
            weights = weights.sigmoid()
        mixed = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, places = torch.where(index == expert)
            weight = weights[rows, places, None]
            x = hidden[rows] * weight if self.kind == "before" else hidden[rows]
            made = self.drop(F.gelu(x @ self.up[expert]) @ self.down[expert])
            if self.kind == "bias":
                made = made * weight + self.bias[expert]
            elif self.kind != "before":
                made = (made + self.bias[expert]) * weight
            mixed.index_add_(0, rows, made)
        return mixed + hidden if self.kind == "residual" else mixed


class Swapped(Experts):
    def forward(self, hidden: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, index, weights)


class Unreadable(Experts):
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a kernel of GPUs")


class Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 3, dtype=torch.int64)
        self.embed, self.router, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList([experts])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.head(self.blocks[0](x, index=index, weights=weights)).view(*ids.shape, -1)


OTHERS = ("before", "bias", "normalised", "sigmoid", "residual")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        pytest.param(lambda: Experts(), True, id="plain"),
        pytest.param(lambda: Swapped(), True, id="swapped"),
        pytest.param(lambda: Unreadable(), None, id="unreadable"),
        pytest.param(lambda: Swapped("before"), False, id="swapped-before"),
        *(pytest.param(lambda kind=kind: Experts(kind), False, id=kind) for kind in OTHERS),
    ],
)
def test_what_is_done_with_weights(experts: Any, expected: bool | None, device: str) -> None:
    with torch.device(device):
        module = experts().to(torch.bfloat16)
    model = Model(module)
    state, before = torch.get_rng_state(), {key: value.clone() for key, value in module.state_dict().items()}
    assert are_only_multiplied(module, model) is expected
    assert torch.equal(torch.get_rng_state(), state)
    assert (module.num_experts, module.training, module.calls) == (EXPERTS, True, [])
    if device == "cpu":
        torch.testing.assert_close(module.state_dict(), before)


@pytest.mark.parametrize("kind", OTHERS)
def test_others_are_not_shared_out(kind: str) -> None:
    model = Model(Experts(kind))
    with pytest.raises(ConfigError) as error:
        foresee(model, parallel_config("2", ep=2, dp=0))
    assert_told(error.value, "ep with blocks.0 (Experts)", "weights", write="ep=1")


@pytest.mark.parametrize(("kind", "style"), [("plain", "DivideExperts"), ("bias", "GatherWhenUsed")])
def test_along_mp_others_are_gathered(kind: str, style: str) -> None:
    plan = foresee(Model(Experts(kind)), parallel_config("1x2", mp="auto"))["mp"]["plan"]
    assert style in str(plan["blocks.*"])


def test_every_mixture_of_transformers_is_multiplied() -> None:
    pytest.importorskip("transformers")
    from autolaunch_strategies.experts.find import find_mixtures
    from tests.experts.cases import MODELS, made

    for name in MODELS:
        with torch.device("meta"):
            model = made(name, {})
        assert {are_only_multiplied(mixture.module, model) for mixture in find_mixtures(model)} == {True}, name
