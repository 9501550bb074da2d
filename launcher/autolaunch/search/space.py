"""What a search may run: the planner's candidates within what was typed, and the overrides that make each of them."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from autolaunch import __version__
from autolaunch.config.against_schema import validate
from autolaunch.config.arithmetic import with_arithmetic
from autolaunch.config.cluster import hardware_of
from autolaunch.config.command_line import typed_keys, unquoted
from autolaunch.config.compose import resolved
from autolaunch.config.origin import Origin
from autolaunch.job import ResolvedJob
from autolaunch.jobs.run import chosen_options, resolve_job
from autolaunch.planning.wanted import CHOSEN_GROUPS, wanted_by
from autolaunch.search.profile import profile_apart
from autolaunch_strategies.config import AXES, ConfigError, raise_all

if TYPE_CHECKING:
    from autolaunch_strategies.planner.candidate import Candidate, Candidates
    from autolaunch_strategies.planner.hardware import Hardware
    from autolaunch_strategies.planner.predictions import PlannerPredictions
    from autolaunch_strategies.planner.profile import ModelProfile, Recipe

OF_THE_SEARCH = ("search", "cluster", "output_dir", "logger", "ckpt_path", "resume")
"""Typed keys that are no part of a trial, whose values a trial has its own for, or that it does without."""

_DETERMINED = {
    "mesh": None,
    "ep": None,
    "recompute": None,
    "compile": None,
    "dp": ("name", "sharding_level", "replicate", "shard"),
    "mp": ("name", "sequence_parallel"),
    "pp": ("name", "schedule", "loss", "virtual_stages", "split", "split_spec", "microbatches"),
    "cp": ("name", "backend", "ulysses"),
    "data": ("microbatches",),
    "trainer": ("max_steps", "max_epochs", "max_time", "enable_progress_bar", "log_every_n_steps"),
}
"""Keys of the config that a candidate or a trial sets (None: all of a group): two searches that differ in them only may
share trials."""

_OF_NO_ACCOUNT = (
    "search",
    "cluster",
    "why",
    "full",
    "name",
    "output_dir",
    "launch",
    "logger",
    "checkpoint",
    "ckpt_path",
    "resume",
    "export_path",
)
"""Keys that no step time depends on."""


@dataclass
class Base:
    """The command line without what is to be found out."""

    job: ResolvedJob
    """Of the first combination of what was typed; what it says of meshes and the like is not used."""
    typed: list[str]
    """Overrides that every trial has."""
    wanted: list[dict[str, Any]]
    """For each combination of what was typed: field of `Candidate` -> the values that it may have."""
    hardware: Hardware
    profile: ModelProfile
    recipe: Recipe

    @property
    def facts(self) -> dict[str, Any]:
        """All that a step time depends on, besides the candidate."""
        from autolaunch_strategies.planner.hardware import hardware_to

        machines = hardware_to(self.hardware)
        for fitted in ("constants", "curves", "generation", "stack", "origin", "name"):
            machines.pop(fitted, None)
        return {
            "profile": self.profile.to_json(),
            "recipe": vars(self.recipe),
            "machines": machines,
            "config": _relevant(self.job.config),
            "versions": {
                "autolaunch": __version__,
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in ("torch", "lightning")},
            },
        }


def read_base(config: DictConfig, loader: ConfigLoader, arguments: Sequence[str], directory: Path, here: bool) -> Base:
    """Resolve what was typed, and profile its model.

    Args:
        config: what the sweep was composed to.
        loader: what composed it.
        arguments: the overrides of the command line.
        directory: of the sweep.
        here: whether the trials run on this machine, so that it must have what they need.

    Raises:
        ConfigError, ConfigErrors: what was typed cannot be run, or not be planned.
    """
    combinations = _with_machines(config, loader, _combinations(arguments))
    wanted, first = [], None
    for overrides in combinations:
        composed = loader.load_sweep_config(config, overrides)
        HydraConfig.instance().set_config(composed)
        job = _job(composed, directory, here)
        first = first or job
        wanted.append(wanted_by([unquoted(item) for item in overrides], job.config))
    assert first is not None
    HydraConfig.instance().set_config(config)
    if first.config["task"] != "fit":
        raise ConfigError(f"{first.config['task']} with search=auto", "only training is searched", "fit")
    if first.config["cluster"] is None:
        raise ConfigError("search=auto", "needs to know the machines", "cluster=local", "cluster=local search=auto")
    hardware = hardware_of(first.config["cluster"])
    profile, recipe = profile_apart(first, hardware.device)
    typed = [item for item in combinations[0] if not _belongs(item, OF_THE_SEARCH)]
    # What several values were typed for, the candidate says.
    swept = {key for key, value in typed_keys(combinations[0]).items() if typed_keys(arguments).get(key) != value}
    typed = [item for item in typed if not _belongs(item, sorted(swept))]
    return Base(first, typed, wanted, hardware, profile, recipe)


def _with_machines(config: DictConfig, loader: ConfigLoader, combinations: list[list[str]]) -> list[list[str]]:
    """Without a typed cluster it is this machine, with as many devices as a typed mesh has."""
    typed = typed_keys(combinations[0])
    if "cluster" in typed or "mesh" not in typed:
        return combinations
    meshes = [loader.load_sweep_config(config, overrides).mesh for overrides in combinations]
    sizes = sorted({math.prod(int(mesh[axis]) for axis in AXES) for mesh in meshes})
    if sizes[0] < 1:
        return combinations
    if len(sizes) > 1:
        raise ConfigError(
            f"meshes of {', '.join(map(str, sizes))} ranks", "they would use different numbers of devices", "one size"
        )
    return [[*overrides, f"cluster=localx{sizes[0]}"] for overrides in combinations]


def _combinations(arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of every combination of values that were typed; several are allowed where the planner chooses."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    overrides = OverridesParser.create().parse_overrides(list(arguments))
    for item in overrides:
        if item.is_sweep_override():
            key = unquoted(str(item.input_line))
            if not _belongs(key, (*CHOSEN_GROUPS, "data.microbatches")):
                raise ConfigError(
                    key,
                    "search=auto varies the way to run a training, not the training",
                    "one value; several for mesh, dp, mp, pp, cp, recompute, data.microbatches",
                )
            if not item.is_discrete_sweep():
                raise ConfigError(
                    key, "search=auto takes several values, no interval", write=f"{item.key_or_group}=1,2"
                )
    (batch,) = BasicSweeper.split_arguments(overrides, None)
    return [list(item) for item in batch]


def _job(config: DictConfig, directory: Path, here: bool) -> ResolvedJob:
    hydra = config.hydra
    if here:
        return resolve_job(config, hydra, directory)
    # What the machine of the command lacks does not matter to jobs that run elsewhere.
    values, wrong = validate(resolved(config), Origin(hydra))
    raise_all(wrong)
    values, by_device = with_arithmetic({**values, "output_dir": str(directory)})
    return ResolvedJob(values, directory, 1, [], __version__, chosen_options(hydra), by_device=by_device)


def _belongs(override: str, keys: Sequence[str]) -> bool:
    key = next(iter(typed_keys([override])))
    return any(key == known or key.startswith(f"{known}.") for known in keys)


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _OF_NO_ACCOUNT}
    for group, names in _DETERMINED.items():
        if names is None:
            kept.pop(group, None)
        else:
            kept[group] = {key: value for key, value in (kept[group] or {}).items() if key not in names}
    return kept


def predictions_of(base: Base) -> PlannerPredictions:
    """What the planner proposes for the base, with its predictions.

    Raises:
        ConfigError: nothing that could be run is within what was typed.
    """
    from autolaunch_strategies.planner.choose import look
    from autolaunch_strategies.planner.predictions import PlannerPredictions

    spaces: list[Candidates] = []
    reasons: list[str] = []
    for wanted in base.wanted:
        rejections, looked = look(base.profile, base.recipe, base.hardware, wanted)
        spaces.append(looked.candidates)
        reasons += [item.reason for item in rejections if not len(looked)]
    if not any(len(space) for space in spaces):
        raise ConfigError(
            f"search=auto on {base.hardware.devices} devices",
            "there is no way to run this within what was typed: " + "; ".join(reasons[:3]),
        )
    return PlannerPredictions(base.profile, base.recipe, base.hardware, spaces)


def candidate_overrides(base: Base, candidate: Candidate) -> list[str]:
    """What makes the candidate, as one would type it."""
    from autolaunch_strategies.planner.settings import overrides

    chosen = [unquoted(item) for item in overrides(candidate, base.profile, base.recipe)]
    # What was typed for all trials may be a mode.
    return [item for item in chosen if not (item == "compile=true" and "compile" in typed_keys(base.typed))]


def trial_overrides(base: Base, candidate: list[str], steps: int, timeout: float) -> list[str]:
    """The whole command line of a trial of so many optimizer steps.

    Args:
        candidate: what makes it, of `candidate_overrides`.
    """
    config = base.job.config
    chosen = typed_keys(candidate)
    kept = [item for item in base.typed if next(iter(typed_keys([item]))) not in chosen]
    scheduler, end = config["scheduler"], config["trainer"]["max_steps"]
    # The rate of a short run would fall faster, and its warm-up be longer than the run.
    total = [f"scheduler.total_steps={end}"] if scheduler["total_steps"] is None and end > 0 else []
    own = [
        "search=auto",
        f"search.timeout={timeout:.0f}",
        f"trainer.max_steps={steps}",
        "trainer.max_epochs=-1",
        "trainer.max_time=null",
        "trainer.limit_val_batches=0",
        "trainer.num_sanity_val_steps=0",
        "trainer.log_every_n_steps=1",
        "trainer.enable_progress_bar=false",
        "checkpoint.enabled=false",
        "logger=csv",
        *total,
    ]
    replaced = typed_keys(own)
    return [*(item for item in kept if next(iter(typed_keys([item]))) not in replaced), *candidate, *own]
