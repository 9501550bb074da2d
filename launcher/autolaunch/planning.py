"""From a resolved job to what the planner needs, and to its choice for a cluster. Imports torch for the profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autolaunch.cluster import hardware_of
from autolaunch.wanted import wanted_by
from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from autolaunch_strategies.planner.choose import Plan
    from autolaunch_strategies.planner.profile import ModelProfile, Recipe


def profile_of(config: Mapping[str, Any], device_type: str) -> tuple[ModelProfile, Recipe]:
    """What the model of a resolved job costs on such a device, and what a step of its training is.

    Raises:
        ConfigError: the size of the batch is not in the config, or the model can't be run on shapes alone.
    """
    from autolaunch.models import build_module
    from autolaunch.tasks.run_parts import own_plan
    from autolaunch_strategies.construction import Construction
    from autolaunch_strategies.planner.module_profile import profile_module, recipe_of

    data, precision = config["data"], config["precision"]
    if "batch_size" not in data:
        raise ConfigError(
            "data",
            "does not say how many samples a step has, so nothing can be planned for it",
            "a key batch_size: samples per optimizer step, over all ranks",
            "+data.batch_size=...",
        )
    with Construction(config["seed"]).recording():
        module = build_module(config)
    mixed = precision == "bf16-mixed"
    profile = profile_module(
        module,
        data.get("seq_len"),
        element_bytes=2 if precision.startswith("bf16") else 4,
        own_plan=own_plan(config),
        sequence_parallel=bool(config["mp"] and config["mp"]["sequence_parallel"]),
        device_type=device_type,
        mixed=mixed,
    )
    recipe = recipe_of(
        module,
        batch_size=data["batch_size"],
        precision=precision,
        optimizer=config["optimizer"]["name"],
        dp=config["dp"],
        compiled=bool(config["compile"]),
        mean_loss=not config["module"],
    )
    return profile, recipe


def plan_of(config: Mapping[str, Any], typed: Iterable[str]) -> tuple[Plan, ModelProfile, Recipe]:
    """The planner's choice for `config["cluster"]`; what was typed is kept.

    Args:
        typed: the overrides of the command line.

    Raises:
        ConfigError: nothing fits, or what was typed can't be.
    """
    from autolaunch_strategies.planner.choose import make_plan

    hardware = hardware_of(config["cluster"])
    wanted = wanted_by(typed, config)
    profile, recipe = profile_of(config, hardware.device)
    return make_plan(profile, recipe, hardware, wanted), profile, recipe


def choice_of(config: Mapping[str, Any], typed: list[str]) -> tuple[list[str], dict[str, Any]]:
    """(overrides that make the choice, the account of it as plain data: `Plan.to_dict()`, and `why` if it was asked).

    Raises:
        ConfigError: as `plan_of`; or what `config["why"]` asks for is no way to run.
    """
    from autolaunch_strategies.planner.explain import asked_of, why
    from autolaunch_strategies.planner.settings import overrides

    plan, profile, recipe = plan_of(config, typed)
    account = plan.to_dict()
    if config["why"]:
        account["why"] = why(plan, asked_of(config["why"])).to_dict()
    return overrides(plan.chosen, profile, recipe), account
