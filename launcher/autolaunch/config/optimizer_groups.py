"""Groups of parameters, and optimizers of other libraries: what can be checked without the model. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autolaunch.config.against_schema import alike, field_types
from autolaunch.config.schema import Optimizer
from autolaunch_strategies.config import ConfigError, MeshShape
from autolaunch_strategies.config.values import Where, checked_value, written

OPTIONS = {
    "adamw": ("lr", "weight_decay", "betas", "eps"),
    "adam": ("lr", "weight_decay", "betas", "eps"),
    "sgd": ("lr", "weight_decay", "momentum"),
}
"""Of the keys of `optimizer`, those that an optimizer of ours has a use for."""


def check_groups(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """What is wrong with `optimizer.groups` and `betas` of a job, whatever its parameters are called."""
    optimizer = config["optimizer"]
    groups = optimizer["groups"]
    if (problem := _betas_problem(optimizer["betas"], optimizer)) is not None:
        # Asked only now: to say where, files are read.
        yield ConfigError(
            where("optimizer.betas", optimizer["betas"]), problem, "two numbers", "'optimizer.betas=[0.9,0.95]'"
        )
    if groups and config["module"] is not None:
        yield ConfigError(
            where("optimizer.groups", groups),
            "has no effect: module is a LightningModule of your own, whose optimizer is its own",
            "groups in its configure_optimizers",
            "optimizer.groups=[]",
        )
        return
    for index, group in enumerate(groups):
        yield from _check_group(f"optimizer.groups[{index}]", group, optimizer)


def check_library(config: Mapping[str, Any], mesh: MeshShape | None) -> Iterator[ConfigError]:
    """Optimizers of bitsandbytes where parameters or their state would be sharded: they have no such operations."""
    target = config["optimizer"].get("_target_") or ""
    if config["task"] not in ("fit", "lr_find", "compare") or not target.startswith("bitsandbytes.") or mesh is None:
        return
    level = (config["dp"] or {}).get("sharding_level", 0)
    if mesh.mp > 1:
        sharding, write = f"mesh={mesh.name}", f"mesh={replace(mesh, dp=mesh.dp * mesh.mp, mp=1).name} dp=ddp"
    elif mesh.dp * mesh.cp > 1 and level:
        sharding, write = f"dp.sharding_level={level}", "dp=ddp"
    else:
        return
    yield ConfigError(
        f"optimizer._target_={target} with {sharding}",
        "parameters and their state would be sharded, for which bitsandbytes has no operations",
        "dp=ddp, pp, and cp with dp=ddp; or torchao.optim.AdamW8bit, which shards everything",
        write,
    )


def _check_group(key: str, group: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Iterator[ConfigError]:
    patterns = group.get("match")
    if not patterns or not all(
        isinstance(item, str) for item in ([patterns] if isinstance(patterns, str) else patterns)
    ):
        yield ConfigError(
            key,
            "does not say of which parameters",
            "match: a list of patterns over names of parameters or modules",
            "optimizer.groups=[{match: [lm_head], lr: 1e-4}]",
        )
    values = {name: value for name, value in group.items() if name != "match"}
    if not values:
        yield ConfigError(key, "changes nothing", "options of the optimizer beside match", f"{key}.weight_decay: 0.0")
    known = OPTIONS.get(optimizer["name"])
    fields = {item.name: item for item in dataclasses.fields(Optimizer)}
    for name, value in values.items():
        path = f"{key}.{name}"
        if known is not None and name not in known:
            close = alike(name, known)
            meant = f"; did you mean {close}?" if close else ""
            yield ConfigError(
                f"{path}={written(value)}",
                f"{optimizer['name']} has no such option{meant}",
                f"match, {', '.join(known)}",
            )
        elif name in fields:
            _, error = checked_value(value, fields[name], field_types(Optimizer)[name], path)
            if error is not None:
                yield error
            elif name == "betas" and (problem := _betas_problem(value, optimizer)) is not None:
                yield ConfigError(f"{path}={written(value)}", problem, "two numbers", f"{path}: [0.9,0.95]")


def _betas_problem(betas: Sequence[float] | None, optimizer: Mapping[str, Any]) -> str | None:
    """What is wrong with other than two for adam and adamw; a class of one's own may take any number of them."""
    if optimizer["name"] in ("adam", "adamw") and betas is not None and len(betas) != 2:
        return f"{optimizer['name']} averages gradients and their squares: it takes two"
    return None
