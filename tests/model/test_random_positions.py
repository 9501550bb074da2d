"""Random numbers by position: what they are as random numbers, and that parts of a batch draw those of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.random_positions import PositionedNumbers, by_position, drawing_of_part, holding

KEEP = 0.8


class Draws(nn.Module):
    """What a function of a tensor gives within a module."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw, self.drop = draw, nn.Dropout(1 - KEEP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 1 - KEEP)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": dropped,
    "dropout-in-place": lambda x: F.dropout(x.clone(), 1 - KEEP, inplace=True),
    "channels": lambda x: F.dropout1d(x, 1 - KEEP),
    "samples": lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(KEEP),
    "flattened": lambda x: dropped(x.flatten(0, 1)).view_as(x),
    "rand": lambda x: torch.rand(x.shape),
    "rand-labels": lambda x: torch.rand(len(x))[:, None, None] * x,
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(2, 1000, (len(x), 1, 1)) * x,
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "normal_": lambda x: x * x.new_empty(len(x), 1, 1).normal_(1.0, std=0.1),
    "uniform_": lambda x: torch.empty_like(x).uniform_(0.9, 1.1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_of_a_batch_draw_what_the_whole_draws(name: str) -> None:
    model, x = Draws(DRAWS[name]), torch.randn(6, 4, 8)
    numbers = PositionedNumbers(model, seed=1)
    with numbers.step(3, 6, 0):
        whole, later = model(x), model(x)
    with numbers.step(3, 6, 0), drawing_of_part(4, 2, 6):
        of_a_microbatch = model(x[4:])
    with numbers.step(3, 3, 3):
        of_a_rank = model(x[3:])
    assert torch.equal(of_a_microbatch, whole[4:]) and torch.equal(of_a_rank, whole[3:])
    assert not torch.equal(whole, later), "another call draws other numbers"
    state = torch.get_rng_state()
    with numbers.step(4, 6, 0):
        assert not torch.equal(model(x), whole), "another step draws other numbers"
    assert torch.equal(torch.get_rng_state(), state), "no generator is asked"


@pytest.mark.parametrize("dim", [1, 2])
def test_a_part_of_a_dim_draws_what_the_whole_draws(dim: int) -> None:
    model, x, held = Draws(dropped), torch.randn(6, 4, 8), torch.tensor([0, 3])
    numbers = PositionedNumbers(model, seed=1)
    with numbers.step(0, 6, 0):
        whole = model(x)
    with numbers.step(0, 6, 0), holding({dim: (held, x.shape[dim])}):
        assert torch.equal(model(x.index_select(dim, held)), whole.index_select(dim, held))


def test_who_answers_attention_can_let_it_draw_by_position() -> None:
    """Torch's function is left alone then, so that it can be seen who calls it."""
    x, inwards, outwards = torch.randn(6, 4, 8), (torch.randn(24, 8), None), (torch.randn(8, 8), None)
    torch_function = F.scaled_dot_product_attention

    def of_function(attend: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return attend(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]

    def of_layer(attend: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(0, 1)
        out, _ = attend(rows, rows, rows, 8, 2, *inwards, None, None, False, 0.5, *outwards, need_weights=False)
        return out.transpose(0, 1)

    layer = F.multi_head_attention_forward
    for usual, asking in (
        (
            lambda x: of_function(F.scaled_dot_product_attention, x),
            lambda x: of_function(by_position(torch_function), x),
        ),
        (lambda x: of_layer(layer, x), lambda x: of_layer(by_position(layer), x)),
    ):
        with PositionedNumbers(model := Draws(usual), seed=1).step(0, 6, 0):
            expected = model(x)
        with PositionedNumbers(model := Draws(asking), seed=1, attention=False).step(0, 6, 0):
            assert F.scaled_dot_product_attention is torch_function
            assert torch.equal(model(x), expected)
        assert F.scaled_dot_product_attention is torch_function is by_position(torch_function)


def test_they_are_random() -> None:
    """Each statistic is one of many independent numbers, in units of its standard deviation."""
    model, noisy, x = Draws(dropped), Draws(lambda x: torch.randn_like(x)), torch.ones(4, 256, 128)
    waits = Draws(lambda x: torch.empty_like(x).exponential_(2.0))
    numbers = PositionedNumbers(nn.ModuleList([model, noisy, waits]), seed=1)
    with numbers.step(0, 4, 0):
        one, other, of_module = (((item != 0).float() - KEEP) for item in (model(x), model(x), model.drop(x)))
    with numbers.step(1, 4, 0):
        next_step = (model(x) != 0).float() - KEEP
    products = {"mean": one, "call": one * other, "module": other * of_module, "step": one * next_step}
    for dim in range(3):
        for lag in (1, 2):
            size = x.shape[dim] - lag
            products[f"{lag} along dim {dim}"] = one.narrow(dim, 0, size) * one.narrow(dim, lag, size)
    products["squares"] = one[:, 1:, 1:] * one[:, :-1, 1:] * one[:, 1:, :-1] * one[:, :-1, :-1]
    far = {name: float(item.sum() / item.square().sum().sqrt()) for name, item in products.items()}
    assert max(map(abs, far.values())) < 4, far
    with numbers.step(0, 4, 0):
        noise, waited = noisy(x), 2 * waits(x)
    assert abs(float(noise.mean())) < 4 / math.sqrt(noise.numel()) and abs(float(noise.var()) - 1) < 0.02
    assert 0 < float(waited.min()) < 1e-4 and abs(float((waited > 1).float().mean()) - math.exp(-1)) < 0.006
    assert abs(float(waited.mean()) - 1) < 4 / math.sqrt(waited.numel()) and abs(float(waited.var()) - 1) < 0.04


def test_outside_of_a_step_and_of_its_modules_torch_draws() -> None:
    model, x = Draws(dropped), torch.ones(6, 4)
    numbers = PositionedNumbers(model, seed=1)
    torch.manual_seed(1)
    expected = F.dropout(x), torch.rand(3), model(x)
    torch.manual_seed(1)
    with numbers.step(0, 6, 0):
        inside = F.dropout(x), torch.rand(3)
    assert all(torch.equal(*pair) for pair in zip(expected, (*inside, model(x)), strict=True))


class Repeats(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.block = times, Draws(lambda x: F.dropout(x * x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x


def test_a_checkpoint_of_the_models_own_draws_again_or_is_refused() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    numbers = PositionedNumbers(model := Repeats(1), seed=1)
    with numbers.step(0, 6, 0):
        out = model(x)
    with numbers.backward():
        out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x * (out / (x * x)))
    x.grad = None
    with numbers.step(0, 6, 0), holding({1: (torch.tensor([0, 1, 6, 7]), 8)}):
        of_a_part = model(x)
    with numbers.backward():
        of_a_part.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x * (of_a_part / (x * x)))
    assert not torch.equal(of_a_part, out), "other positions drop others"
    numbers = PositionedNumbers(model := Repeats(2), seed=1)
    with numbers.step(0, 6, 0), pytest.raises(ConfigError, match=r"(?s)block draws 2 times.*recompute=full"):
        model(x).sum().backward()


@pytest.mark.parametrize("name", ["normal_", "uniform_", "exponential_", "bernoulli_"])
def test_no_gradient_passes_what_is_filled_in_place(name: str) -> None:
    model, x = Draws(lambda x: getattr(x * 1, name)()), torch.ones(4, 3, requires_grad=True)
    with PositionedNumbers(model, seed=1).step(0, 4, 0):
        model(x).sum().backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_uniform_numbers_are_below_one(dtype: torch.dtype) -> None:
    """One would be rounded up, and its logarithm make noise without an end."""
    for draw in (lambda x: torch.rand_like(x), lambda x: torch.empty_like(x).uniform_()):
        model, x = Draws(draw), torch.empty(300, 1000, dtype=dtype)
        with PositionedNumbers(model, seed=1).step(0, 300, 0):
            drawn = model(x)
        assert 0 <= drawn.min() < 0.01 and 0.99 < drawn.max() < 1 and abs(float(drawn.float().mean()) - 0.5) < 0.004
