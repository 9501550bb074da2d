"""From a resolved job to what the planner needs, and to its choice. Imports torch only for a new profile."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autolaunch.config.arithmetic import arithmetic_words
from autolaunch.config.cluster import hardware_of
from autolaunch.config.command_line import typed_keys
from autolaunch.config.schema import USUAL_STEPS
from autolaunch.planning.known_profiles import KnownProfile, is_known
from autolaunch.planning.wanted import wanted_by
from autolaunch_strategies.config import FLOAT8_RECIPES, ConfigError, lightning_precision

if TYPE_CHECKING:
    from torch import nn

    from autolaunch_strategies.planner.hardware import Hardware
    from autolaunch_strategies.planner.plan import Plan
    from autolaunch_strategies.planner.profile import ModelProfile, Recipe


log = logging.getLogger(__name__)

MakeProfile = Callable[[Mapping[str, Any], str], "ModelProfile"]
"""What takes the arguments of `profiled` and does the same."""


def profile_of(
    config: Mapping[str, Any], device_type: str, make: MakeProfile | None = None
) -> tuple[ModelProfile, Recipe]:
    """What the model of a resolved job costs on such a device, and what a step of its training is.

    Args:
        make: what makes a profile that is not kept; by default this process.

    Raises:
        ConfigError: the size of the batch is not in the config, or the model can't be run on shapes alone.
    """
    from autolaunch_strategies.planner.recipe import recipe_of

    data = config["data"]
    if "batch_size" not in data:
        raise ConfigError(
            f"data._target_={data['_target_']}",
            "does not say how many samples a step has, so nothing can be planned for it",
            "a class that takes batch_size (samples per optimizer step, over all ranks), with +data.batch_size=...",
        )
    known = KnownProfile(config, device_type)
    profile = known.read()
    if profile is None:
        profile = (make or profiled)(config, device_type)
        known.keep(profile)
    if without := _not_compiled(config):
        profile = dataclasses.replace(profile, refused={**profile.refused, "compile": without})
    optimizer = config["optimizer"]
    recipe = recipe_of(
        data["batch_size"],
        lightning_precision(config["precision"]),
        optimizer["_target_"] or optimizer["name"],
        optimizer["momentum"],
        config["dp"],
        # What a module of one's own computes is not known; the first step of a pipeline would tell.
        mean_loss=not config["module"] and config["model"].get("loss") != "output",
        tf32=config["matmul_precision"] in ("high", "medium"),
        float8=FLOAT8_RECIPES.get(config["precision"]),
    )
    return profile, recipe


def profiled(config: Mapping[str, Any], device_type: str) -> ModelProfile:
    """The profile, from the model itself.

    Raises:
        ConfigError: as `profile_of`.
    """
    is_new_here = "torch" not in sys.modules
    from autolaunch.models import build_adapted_model, build_module
    from autolaunch.models.own_plan import own_plan
    from autolaunch_strategies.model.construction import Construction
    from autolaunch_strategies.planner.profile_cache import cached_profile
    from autolaunch_strategies.planner.subject import Holder

    known = is_known(config)
    with Construction(config["seed"]).recording():
        if known:
            module: nn.Module = Holder(build_adapted_model(config)[0])
        else:
            module = build_module(config)
    arguments: dict[str, Any] = {
        "positions": config["data"].get("seq_len"),
        "own_plan": own_plan(config),
        "precision": lightning_precision(config["precision"]),
        "param_dtype": config["dp"]["param_dtype"],
        "device_type": device_type,
        **({} if known else _called(module, config)),
    }
    profile = cached_profile(module, **arguments)
    if is_new_here:
        gc.freeze()  # so that looking for garbage does not go through all of torch each time
    if known:  # ids of `data.seq_len` positions, as everybody has them
        profile = dataclasses.replace(profile, guessed="")
    return profile


def _called(module: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a training step on the job's data shows, for `profile_module`: what the model is called with, or the step.

    The latter if it calls more than the model. Nothing if that can't be found out, or is named.
    """
    from autolaunch.tasks.first_batch import step_on_first_batch
    from autolaunch_strategies.model.example_inputs import ExampleInputs
    from autolaunch_strategies.planner.subject import Subject
    from autolaunch_strategies.tracing.step import calls_in

    subject = Subject.of(module, None)
    if subject.example is not None or (step := step_on_first_batch(module, config)) is None:
        return {}
    try:
        calls = calls_in(step)
        if not {*calls.outermost} <= {"", subject.prefix.rstrip(".")}:
            return {"step": step}
        return {"example": ExampleInputs(step.origin, *calls.arguments(subject.model), is_guess=False)}
    except Exception as error:  # whatever reading data or a step raises
        log.debug("no step shows how %s is called: %s", type(module).__name__, error, exc_info=True)
        return {}


def plan_of(config: Mapping[str, Any], typed: Iterable[str], make: MakeProfile | None = None) -> Plan:
    """The planner's choice for `config["cluster"]`; what was typed is kept.

    Args:
        typed: the overrides of the command line.
        make: as `profile_of`.

    Raises:
        ConfigError: nothing fits, or what was typed can't be.
    """
    from autolaunch_strategies.planner.choose import make_plan

    hardware = hardware_of(config["cluster"])
    _check_float8(config["precision"], hardware)
    wanted = wanted_by(typed, config)
    profile, recipe = profile_of(config, hardware.device, make)
    return make_plan(profile, dataclasses.replace(recipe, steps=_steps(config, typed)), hardware, wanted)


def _check_float8(precision: str, hardware: Hardware) -> None:
    """Refuse float8 on GPUs that have none. CPUs compute it, slowly.

    Raises:
        ConfigError: no peak is known of it.
    """
    if precision in FLOAT8_RECIPES and hardware.device == "cuda" and not hardware.flops.get("fp8"):
        raise ConfigError(
            f"precision={precision}",
            f"cluster.peak_tflops has no fp8 for {hardware.name}",
            "clusters of GPUs of compute capability 8.9 or more (L4, H100, ...)",
            "precision=bf16-mixed",
        )


def _steps(config: Mapping[str, Any], typed: Iterable[str]) -> int | None:
    """Of the whole training. A plan is not made for the usual few where nobody has said when it ends."""
    steps = config["trainer"]["max_steps"]
    unsaid = config["task"] == "plan" and steps == USUAL_STEPS and "trainer.max_steps" not in typed_keys(typed)
    return None if unsaid or steps < 1 else steps


def _not_compiled(config: Mapping[str, Any]) -> str:
    """Why the blocks of a job are not compiled, whatever its model is; empty if they may be."""
    if config["random_numbers"] == "by_position":
        return "random_numbers=by_position finds which module draws while Python runs"
    targets = [str((item or {}).get("_target_", "")) for item in (config["callbacks"] or {}).values()]
    if any(target.endswith("ExpertBias") for target in targets):
        return "callbacks=expert_bias counts the tokens of experts while Python runs"
    return ""


def choice_of(
    config: Mapping[str, Any],
    typed: list[str],
    by_device: Mapping[str, str],
    make: MakeProfile | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """(overrides that make the choice, the account of it as plain data: `planner.document`, and `why` if it was asked).

    Args:
        config: of a resolved job.
        typed: the overrides of the command line.
        by_device: of the job.
        make: as `profile_of`.

    Raises:
        ConfigError: as `plan_of`; or what `config["why"]` asks for is no way to run.
    """
    from autolaunch_strategies.planner.document import document
    from autolaunch_strategies.planner.explain import asked_of, why
    from autolaunch_strategies.planner.settings import overrides

    plan = plan_of(config, typed, make)
    account = document(plan)
    account["warnings"] = [*account["warnings"], *_remarks(plan), *_without_use(plan, typed)]
    account["precision"] = ", ".join(arithmetic_words(config, by_device))
    if config["why"]:
        account["why"] = why(plan, asked_of(config["why"])).to_dict()
    chosen = overrides(plan.chosen, plan.profile, plan.recipe)
    if "microbatches" not in config["data"]:
        chosen = [item for item in chosen if not item.startswith("data.microbatches=")]
    if "compile" in typed_keys(typed):  # as a mode, perhaps
        chosen = [item for item in chosen if not item.startswith("compile=")]
    return chosen, account


FEW_TOKENS = 512
"""Per device and step: with fewer, devices mostly wait for each other."""


def _remarks(plan: Plan) -> list[str]:
    """What no mesh can mend, and the key that would."""
    profile, recipe, hardware = plan.profile, plan.recipe, plan.hardware
    remarks = []
    tokens = recipe.batch_size * profile.positions / hardware.devices
    if tokens < FEW_TOKENS and hardware.device == "cuda" and profile.positions > 1:
        remarks.append(
            f"A step has {tokens:.0f} tokens for each device, so devices mostly wait: a larger data.batch_size "
            f"(now {recipe.batch_size}) or data.seq_len (now {profile.positions}) would use them."
        )
    if profile.guessed:
        remarks.append(
            f"Nothing shows how {profile.name} is called, so {profile.guessed} were made up: with "
            "`example_input_array` in the module, or data that can be read here, times and memory are those of yours."
        )
    fast = hardware.flops.get("bf16", 0) / hardware.flops.get(recipe.compute, float("inf"))
    if recipe.compute == "fp32" and fast >= 2:
        remarks.append(f"These devices multiply bf16 {fast:.0f} times as fast as fp32: precision=bf16-mixed.")
    if batch := _batch_that_divides(plan):
        remarks.append(batch)
    return remarks


def _without_use(plan: Plan, typed: Iterable[str]) -> list[str]:
    """What was typed for an axis of which the chosen mesh has one rank, unless just that was asked for; and sequence
    parallelism that shards nothing."""
    remarks, keys = [], typed_keys(typed)
    if plan.chosen.mp > 1 and plan.chosen.sequence_parallel and "sequence_parallel" in plan.profile.refused:
        remarks.append(f"mp=seq_parallel is without use here: {plan.profile.refused['sequence_parallel']}.")
    for axis in ("mp", "pp", "cp"):
        unused = [key for key in keys if key.split(".")[0] == axis and key != "pp.microbatches"]  # parts of any batch
        if not unused or getattr(plan.chosen, axis) > 1 or plan.wanted.get(axis) == (1,):
            continue
        sizes = getattr(plan.looked.candidates, axis)
        more = f"; mesh.{axis}={sizes[sizes > 1].min()} asks for more" if (sizes > 1).any() else ""
        named = " ".join(f"{key}={keys[key]}" if key == axis else key for key in unused)
        remarks.append(f"{named} is without use here: the chosen mesh has one rank along {axis}{more}.")
    return remarks


NEAR = 0.15
"""By what share of itself a batch may be changed so that it divides: more is another training."""


def _batch_that_divides(plan: Plan) -> str:
    """Which batch nearby, a multiple of the devices, a step takes less time for by sequence; empty if there is none."""
    from autolaunch_strategies.planner.choose import make_plan
    from autolaunch_strategies.planner.reasons import in_seconds

    batch, devices = plan.recipe.batch_size, plan.hardware.devices
    other = max(round(batch / devices), 1) * devices
    if batch % devices == 0 or abs(other - batch) > NEAR * batch:
        return ""
    try:
        even = make_plan(
            plan.profile, dataclasses.replace(plan.recipe, batch_size=other), plan.hardware, plan.wanted, top=0
        )
    except ConfigError:  # such as microbatches that were typed, and don't divide it
        return ""
    gain = 1 - even.seconds / other / (plan.seconds / batch)
    if gain <= 2 * plan.noise:
        return ""
    return (
        f"{batch} does not divide among {devices} devices: with data.batch_size={other} a step is predicted to take "
        f"{in_seconds(even.seconds)}, {gain:.0%} less for each sample."
    )
