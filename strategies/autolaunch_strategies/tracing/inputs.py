"""Inputs with which a model runs: those that are worth a try, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.config.errors import first_line
from autolaunch_strategies.model.example_inputs import ExampleInputs, example_inputs

Result = TypeVar("Result")


def with_inputs_that_run(
    model: nn.Module,
    example: Any,
    attempt: Callable[[ExampleInputs], Result],
    refusal: Callable[[str], ConfigError],
) -> Result:
    """What `attempt` returns for the first example inputs of `model` with which it does not fail.

    Args:
        example: inputs that the user names; None for the model's own, or made-up ones.
        refusal: the error if it fails with all of them, given the words that say so and why each failed.

    Raises:
        ConfigError: that of `refusal`.
    """
    reasons = []
    for inputs in example_inputs(model, example):
        try:
            return attempt(inputs)
        except Exception as error:  # whatever a model's forward may raise: other inputs may do
            reasons.append(f"\n    {inputs.origin}: {first_line(error)[:160]}")
    raise refusal("its forward does not run on any inputs that were tried" + "".join(reasons))
