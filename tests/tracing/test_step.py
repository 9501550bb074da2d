"""A step of a module shows what its parts are called with, and leaves no trace."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from autolaunch_strategies.apply.order import foresee
from autolaunch_strategies.config import ConfigError, parallel_config
from autolaunch_strategies.lightning.first_step import first_step
from autolaunch_strategies.tracing.step import NotCalled, arguments_in, calls_in
from tests.lightning import any_signature
from tests.support.messages import Told, assert_only_told


def step_of(module: pl.LightningModule) -> Any:
    batch = next(iter(any_signature.series()))
    return first_step(module, lambda: batch)


def test_arguments_of_a_call_whatever_happens_behind_it() -> None:
    module = any_signature.Conditioned()
    (sample,), kwargs = arguments_in(step_of(module), module.model)
    assert (sample.device.type, sample.shape, kwargs["added"]["static"].shape) == ("meta", (8, 6, 4), (8, 3))


def test_a_forward_that_the_step_calls_itself() -> None:
    module = any_signature.NBeats()
    (batch,), _ = arguments_in(step_of(module), module)
    assert batch["past"].shape == (8, 6, 4)


def test_what_is_not_called_is_told_with_what_is() -> None:
    module = any_signature.Adversaries()
    with pytest.raises(NotCalled, match=r"parts of it by themselves \(generator, discriminator\)"):
        arguments_in(step_of(module), module)


def test_what_a_step_calls_itself() -> None:
    assert calls_in(step_of(any_signature.Adversaries())).outermost == ["generator", "discriminator"]
    assert calls_in(step_of(any_signature.Conditioned())).outermost == ["model"]
    assert calls_in(step_of(any_signature.NBeats())).outermost == [""]


class Talks(any_signature.Conditioned):
    """Counts, keeps, logs, prints, draws and changes itself in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.kept = 0, list[torch.Tensor]()
        self.norm = nn.BatchNorm1d(3)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "past": batch["past"][:, :6]}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        print("a step")
        self.kept.append(self.norm(batch["static"] + torch.rand(3, device=self.device)))
        return super().training_step(batch, batch_idx)


def test_nothing_is_left_of_it() -> None:
    module, printed = Talks(), io.StringIO()
    step = step_of(module)
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    attributes = dict(module.__dict__)
    with contextlib.redirect_stdout(printed):
        arguments_in(step, module.model)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert (module.steps, module.kept, printed.getvalue()) == (0, [], "")
    assert module.__dict__ == attributes
    assert all(parameter.grad is None for parameter in module.parameters())


def test_data_are_read_only_where_nothing_else_shows_it() -> None:
    class Guessable(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))

        def training_step(self, batch: Any) -> Any:
            return self.model(batch)

    def read() -> Any:
        raise AssertionError("it was read")

    config = parallel_config("mp2xpp2", mp="auto", pp="exact")
    module = Guessable()
    assert "token" not in foresee(module, config, None, first_step(module, read))["pp"]["order_from"]


def test_data_that_cannot_be_read_are_told() -> None:
    def read() -> Any:
        raise OSError("no such file")

    module = any_signature.Conditioned()
    with pytest.raises(ConfigError) as error:
        foresee(module, parallel_config("pp2", pp="exact"), None, first_step(module, read))
    tried = ["order", "Net", "training_step with the first batch: no such file"]
    assert_only_told(error.value, Told("pp", *tried, allowed=("`example_input_array`",)))


def test_of_two_modules_in_one_step_the_largest_is_cut() -> None:
    module = any_signature.Adversaries()
    account = foresee(module, parallel_config("pp2", pp="exact"), None, step_of(module))
    assert account["pp"]["stages"]
