"""Inputs with which a model runs: those that are worth a try, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.example_inputs import ExampleInputs, example_inputs
from autolaunch_strategies.tracing.step import Step
from autolaunch_strategies.tracing.unreadable import reason_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Steps:
    """What a module around a model shows of how it is called."""

    example: Any = None
    """Inputs for the model itself that the user names."""
    named: Step | None = None
    """The forward of the module around it, on inputs that the user names."""
    training: Step | None = None
    """Its training step on the first batch."""


def no_steps(_: nn.Module) -> Steps:
    """Of a model with nothing around it."""
    return Steps()


def with_inputs_that_run(
    model: nn.Module,
    example: Any,
    attempt: Callable[[ExampleInputs], Result],
    refusal: Callable[[str], ConfigError],
    steps: Steps | None = None,
    attempt_step: Callable[[Step], Result] | None = None,
) -> Result:
    """What `attempt` returns for the first example inputs of `model` with which it does not fail.

    Args:
        example: inputs that the user names; None for the model's own, or made-up ones.
        refusal: the error if it fails with all of them, given the words that say so and why each failed.
        steps: that call the model, too, of a module around it.
        attempt_step: as `attempt`, for one of them.

    Raises:
        ConfigError: that of `refusal`, or one of `attempt_step`.
    """
    reasons = []
    for origin, run in _ways(model, example, attempt, steps or Steps(), attempt_step):
        try:
            return run()
        except ConfigError:
            raise
        except Exception as error:  # whatever a model's forward may raise: other inputs may do
            reasons.append(f"\n    {origin}: {reason_of(error)[:160]}")
    reasons = list(dict.fromkeys(reasons))
    if reasons and all('missing the required "forward"' in reason for reason in reasons):
        raise refusal("it has no forward: one of its own, which its training_step calls, shows what a step computes")
    raise refusal("its forward does not run on any inputs that were tried" + "".join(reasons))


def _ways(
    model: nn.Module,
    example: Any,
    attempt: Callable[[ExampleInputs], Result],
    steps: Steps,
    attempt_step: Callable[[Step], Result] | None,
) -> Iterator[tuple[str, Callable[[], Result]]]:
    """What the user names, what can be guessed, and last of all what data have to be read for."""
    if steps.named is not None and attempt_step is not None:
        yield steps.named.origin, partial(attempt_step, steps.named)
    for inputs in example_inputs(model, example):
        yield inputs.origin, partial(attempt, inputs)
    if steps.training is not None and attempt_step is not None:
        yield steps.training.origin, partial(attempt_step, steps.training)
