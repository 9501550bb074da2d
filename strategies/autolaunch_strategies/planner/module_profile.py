"""The profile of any module, from forward and backward passes on shapes alone: it may be on meta and of any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.example_inputs import ExampleInputs
from autolaunch_strategies.planner.assembly import Assembly
from autolaunch_strategies.planner.first_look import FirstLook
from autolaunch_strategies.planner.measured_pass import MeasuredPass
from autolaunch_strategies.planner.model_call import PRECISIONS, Loss, ModelCall, sized_inputs
from autolaunch_strategies.planner.profile import ModelProfile
from autolaunch_strategies.planner.subject import Subject, parameter_sharding
from autolaunch_strategies.tracing.inputs import with_inputs_that_run
from autolaunch_strategies.tracing.step import Step
from autolaunch_strategies.tracing.unreadable import reason_of, stepping_over

_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def profile_module(
    module: nn.Module,
    positions: int | None = None,
    *,
    example: Any = None,
    loss: Loss | None = None,
    own_plan: Mapping[str, Any] | None = None,
    precision: str = "32-true",
    param_dtype: str | None = None,
    device_type: str = "cuda",
    name: str | None = None,
    step: Step | None = None,
) -> ModelProfile:
    """What one training step of `module` costs per sequence. The module is left as it was, and may be on meta.

    Args:
        module: any module, or a LightningModule around one.
        positions: tokens of a sequence; None: as in the example.
        example: inputs for one call (as lightning's `example_input_array`, which is the default, or `ExampleInputs`);
            others are found by the kind of the first layers. The batch is the first dim of every tensor that has it.
        loss: of what the model returns; by default its own `loss`, or cross entropy in fp32 over the last dim, as the
            launcher's modules compute it.
        own_plan: the mp plan that comes with the model.
        precision: as lightning names it.
        param_dtype: of gathered parameters, as `dp.param_dtype`.
        device_type: where it will run (cuda or cpu): kernels of attention and autocast differ.
        name: what the profile is called; by default the class of the model.
        step: of `module`, which calls more than one module of it: it is profiled in place of a forward.

    Returns:
        the profile. What mp shards is followed through the operators by DTensor's rules for one axis; parts of a
        model that can't run on shapes alone (see `Assembly`) count with their matrix products only.

    Raises:
        ConfigError: no inputs are known with which the model runs, or an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision}", "no such precision", ", ".join(PRECISIONS))
    subject = Subject.of(module, example, whole=step is not None)
    sharding = parameter_sharding(subject, own_plan, step)
    model_call = ModelCall(subject, sharding, precision, _DTYPES[param_dtype], device_type, loss, step is not None)
    kind = name or type(subject.model).__name__

    def attempt(inputs: ExampleInputs) -> ModelProfile:
        profile = stepping_over(subject.model, partial(_passes, model_call, inputs, positions)).profile(kind)
        return replace(profile, guessed=inputs.origin if inputs.is_guess else "")

    def refusal(problem: str) -> ConfigError:
        example = "`example_input_array` as an attribute of the module: inputs with which its forward runs"
        allowed = example if step is None else f"a step that runs without values; or a forward, and {example}"
        return ConfigError("model", f"{kind} can't be profiled: {problem}", allowed)

    if step is None:
        return with_inputs_that_run(subject.model, subject.example, attempt, refusal)
    try:
        with step.as_forward():
            profile = attempt(ExampleInputs(step.origin, *step.arguments(), is_guess=False))
    except Exception as error:  # whatever a step may raise
        raise refusal(f"{step.origin} does not run on shapes alone: {reason_of(error)}") from error
    refused = {**profile.refused, "pp": "a step of it calls several modules, and stages are cut from one"}
    return replace(profile, refused=refused)


def _passes(
    model_call: ModelCall, inputs: ExampleInputs, positions: int | None, placeholders: Mapping[str, str]
) -> Assembly:
    model_call = replace(model_call)  # of the model as it is now: parts of it may have been stepped over since
    args, kwargs, length = sized_inputs(inputs, 1, positions)
    look = FirstLook(model_call, args, kwargs)
    two, three = (MeasuredPass(model_call, look, *sized_inputs(inputs, batch, positions)[:2]) for batch in (2, 3))
    return Assembly(model_call.subject, model_call.sharding, look, two, three, length, placeholders)
