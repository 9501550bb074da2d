"""Parts that look at values are stepped over; inputs are tried until the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.example_inputs import ExampleInputs
from autolaunch_strategies.tracing.inputs import with_inputs_that_run
from autolaunch_strategies.tracing.recorder import Observer, Recorder
from autolaunch_strategies.tracing.shapes import fake_inputs, fake_state, on_shapes_alone
from autolaunch_strategies.tracing.unreadable import reason_of, stepping_over


def run(model: nn.Module, placeholders: Mapping[str, str]) -> dict[str, str]:
    recorder = Recorder(model, [Observer()])
    with on_shapes_alone():
        state = fake_state(model)
        args, kwargs = fake_inputs((torch.ones(2, 4),), {})
        with recorder.watching():
            recorder.call(state, args, kwargs)
    return dict(placeholders)


class Looks(nn.Module):
    """Asks for a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class LooksElsewhere(Looks):
    """Another kind, with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: x if x.amax().item() > 0 else -x


class Caching(nn.Module):
    """Keeps what a call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.sizes: list[int] = []
        self.parts = nn.ModuleList([Looks(), nn.Linear(4, 4), LooksElsewhere(), Looks()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones_like(x) if self.mask is None else self.mask
        self.sizes.append(len(x))
        for part in self.parts:
            x = part(x * self.mask)
        return x


def test_all_parts_of_a_kind_are_stepped_over_and_put_back() -> None:
    model = Caching()
    own = model.parts[2].forward
    placeholders = stepping_over(model, lambda placeholders: run(model, placeholders))
    assert placeholders.keys() == {"parts.0", "parts.2", "parts.3"}
    assert all("_local_scalar_dense" in reason for reason in placeholders.values())
    assert (model.mask, model.sizes) == (None, [])
    assert model.parts[2].forward is own and "forward" not in vars(model.parts[0])


class Glue(nn.Module):
    """Asks for a value outside of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Looks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) if len(x.nonzero()) else x


class Mistaken(nn.Module):
    """Calls a layer of torch with what it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(("build", "error"), [(Glue, "nonzero"), (Mistaken, "reduction dim")])
def test_what_is_no_part_of_its_own_is_not_stepped_over(build: type[nn.Module], error: str) -> None:
    model = build()
    attempts: list[Any] = []
    with pytest.raises(Exception, match=error):
        stepping_over(model, lambda placeholders: attempts.append(1) or run(model, placeholders))
    assert len(attempts) == 1


def test_what_looks_at_values_is_named_by_its_line() -> None:
    with pytest.raises(Exception) as raised:
        stepping_over(Glue(), lambda placeholders: run(Glue(), placeholders))
    line = Glue.forward.__code__.co_firstlineno + 1
    assert f"`return self.part(x) if len(x.nonzero()) else x` (test_unreadable.py:{line})" in reason_of(raised.value)
    assert reason_of(ValueError("other\nlines")) == "other"


def test_inputs_are_tried_in_turn() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    tried: list[ExampleInputs] = []

    def attempt(inputs: ExampleInputs) -> torch.Tensor:
        tried.append(inputs)
        return model(*inputs.args)

    output = with_inputs_that_run(model, None, attempt, lambda problem: ConfigError("key", problem))
    assert [tuple(inputs.args[0].shape) for inputs in tried] == [(2, 8, 16), (2, 16)]
    assert tuple(output.shape) == (2, 4)


def test_the_refusal_says_why_each_failed() -> None:
    errors = iter([KeyError("weather"), ValueError(), RuntimeError("x" * 200 + "\nmore")])

    def attempt(inputs: ExampleInputs) -> None:
        raise next(errors)

    with pytest.raises(ConfigError) as raised:
        model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4))
        with_inputs_that_run(model, None, attempt, lambda problem: ConfigError("key", f"no luck: {problem}"))
    assert raised.value.problem.splitlines() == [
        "no luck: its forward does not run on any inputs that were tried",
        "    features for 0: 'weather'",
        "    features for 0: ValueError",
        f"    token ids for 1: {'x' * 160}",
    ]


def test_a_module_without_a_forward_is_told_so() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Embedding(3, 4)

    model = Steps()
    with pytest.raises(ConfigError) as raised:
        with_inputs_that_run(
            model, None, lambda inputs: model(*inputs.args), lambda problem: ConfigError("key", problem)
        )
    assert raised.value.problem == (
        "it has no forward: one of its own, which its training_step calls, shows what a step computes"
    )
