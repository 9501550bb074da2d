"""`plan.yaml`: everything needed to repeat a run, and why it was done that way, as an experiment file for Hydra."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import OmegaConfDumper

from autolaunch.config.schema import without_made
from autolaunch.job import write_beside
from autolaunch_strategies.config import AXES

SECTIONS = {
    "What is trained": ("name", "seed", "random_numbers", "precision", "matmul_precision", "model", "module", "data"),
    "On which devices, and how": (
        *("mesh", "dp", "mp", "pp", "cp", "ep"),
        *("recompute", "recompute_save", "recompute_budget", "compile"),
    ),
    "How it learns": ("optimizer", "scheduler", "trainer", "callbacks"),
    "What is written": ("checkpoint", "logger"),
    "How it runs": ("launch",),
}
"""Comment -> keys below it, in this order; keys that are in none of them come last."""

OF_ONE_RUN = (
    *("task", "output_dir", "ckpt_path", "resume", "export_path", "hydra", "experiment", "defaults", "reasons"),
    *("cluster", "search", "why", "full", "rank", "lr_find", "compare", "generate", "eval"),
)
"""Keys that say which run it was and not how to do it again."""

HEADER = """\
# @package _global_
# Written by autolaunch. Do the same again with `autolaunch experiment=<this file>`; change it here, or behind that
# with key=value: the keys below win over the options of their groups.
"""


def write_plan(
    output_dir: str | os.PathLike[str],
    config: Mapping[str, Any],
    reasons: Mapping[str, Any],
    choices: Mapping[str, str],
) -> Path:
    """Write `<output_dir>/plan.yaml` and return its path.

    Args:
        config: the resolved job: every key with its value.
        reasons: what was applied and why (`MeshStrategy.describe()`); written, not read back by Hydra.
        choices: config group -> chosen option; for the mesh the name of its shape, which then stands for its sizes.
    """
    defaults = [{f"override /{group}": option} for group, option in sorted(choices.items()) if _is_ours(group, option)]
    keys, reasons = _with_written_plan(without_made(config), reasons)
    text = [HEADER, _yaml({"defaults": [*defaults, "_self_"]})]
    keys = {key: value for key, value in keys.items() if key not in OF_ONE_RUN}
    if config.get("output_dir"):
        keys = _with_open_output_dir(keys, str(config["output_dir"]))
    if "mesh" in choices and isinstance(keys.get("mesh"), Mapping):
        keys["mesh"] = {key: value for key, value in keys["mesh"].items() if key not in AXES}
    rest = tuple(sorted(keys.keys() - {key for names in SECTIONS.values() for key in names}))
    for title, names in (*SECTIONS.items(), ("Further keys", rest)):
        if section := {name: keys[name] for name in names if name in keys}:
            text += [f"\n# --- {title} ---\n", _yaml(section)]
    if reasons:
        text += ["\n# --- What was applied, and why (not read back) ---\n", _yaml({"reasons": reasons})]
    path = Path(output_dir) / "plan.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(path, "".join(text))
    return path


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All of a plan as plain dicts, lists and values, `defaults` and `reasons` included."""
    plan = OmegaConf.to_container(OmegaConf.load(Path(path)), resolve=False)
    assert isinstance(plan, dict)
    return {str(key): value for key, value in plan.items()}


def _with_written_plan(
    config: Mapping[str, Any], reasons: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The plan that was found for mp, as the plan of the file: there it can be changed, and is then what happens."""
    applied = reasons.get("mp")
    if not applied or not config.get("mp"):
        return config, reasons
    mp = {**config["mp"], "base": "none", "plan": applied.get("plan", {})}
    return {**config, "mp": mp}, {**reasons, "mp": {key: value for key, value in applied.items() if key != "plan"}}


def _with_open_output_dir(value: Any, output_dir: str) -> Any:
    """The value with every path below this run's directory made one below the next run's."""
    if isinstance(value, Mapping):
        return {key: _with_open_output_dir(item, output_dir) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_open_output_dir(item, output_dir) for item in value]
    if isinstance(value, str):
        return re.sub(rf"(?<![\w./-]){re.escape(output_dir)}(?=/|$)", "${output_dir}", value)
    return value


def _is_ours(group: str, option: str | None) -> bool:
    of_planning = ("experiment", "cluster", "search")
    return option is not None and group not in of_planning and not group.startswith("hydra")


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.dump(_plain(values), Dumper=_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False)


@cache
def _dumper() -> type[yaml.Dumper]:
    """Writes texts as OmegaConf does, whose reader takes more words for numbers than YAML does (1e3); in C, if it can.

    A plan has thousands of lines, and OmegaConf's own dumper takes as long for them as the planner for the plan.
    """

    class Dumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]  # a base that is found when it runs
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(str, OmegaConfDumper.str_representer)
    return Dumper


def _plain(value: Any) -> Any:
    """The value made of what YAML knows: tuples and sets become lists, everything unknown its text."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str | int | bool) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
