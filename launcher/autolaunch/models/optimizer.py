"""The optimizer and the learning rate of a run, from the groups `optimizer` and `scheduler`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from autolaunch.instantiate import build, locate
from autolaunch.models.parameter_names import matching
from autolaunch_strategies.config import ConfigError, nearest

_OWN_KEYS = (
    "lr",
    "betas",
    "eps",
    "momentum",
)  # what the schema fills in, whether a class of the user's takes it or not


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer_cfg: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer over the parameters that require gradients: matrices with weight decay, the rest without.

    Those that `optimizer_cfg["groups"]` names have the options that stand there.

    Args:
        parameters: of the model, with their names; norms and biases are known by having fewer than two dims.
        optimizer_cfg: the fields of `autolaunch.config.schema.Optimizer`; with `_target_`, any further key is an
            argument.

    Raises:
        ConfigError: no such optimizer, a `_target_` that cannot be called so, or a group without a parameter.
    """
    cfg = {key: value for key, value in optimizer_cfg.items() if value is not None}
    name = cfg.pop("name", "adamw")
    groups = parameter_groups(parameters, cfg)
    cfg = {key: value for key, value in cfg.items() if key not in ("weight_decay", "groups")}
    if "_target_" in cfg:
        return _build_custom(cfg, groups)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=cfg["lr"], momentum=cfg.get("momentum", 0.0))
    if name in ("adam", "adamw"):
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        own: dict[str, Any] = {key: cfg[key] for key in ("betas", "eps") if key in cfg}
        return kind(groups, lr=cfg["lr"], **own | ({"betas": tuple(own["betas"])} if "betas" in own else {}))
    if name == "custom":
        raise ConfigError(
            "optimizer=custom",
            "it does not say which optimizer",
            "the import path of a torch.optim.Optimizer class",
            "optimizer._target_=torch.optim.Adagrad",
        )
    raise ConfigError(f"optimizer.name={name}", "no such optimizer", "adamw, adam, sgd, custom with _target_")


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer_cfg: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The groups of an optimizer as torch takes them: matrices, the rest, then both of each of `groups` that has such.

    Args:
        parameters: with their names; those without gradients are in none.
        optimizer_cfg: see `build_optimizer`; without `groups` there are two, each perhaps without a parameter.

    Raises:
        ConfigError: a pattern matches nothing that is trained and in none of the groups before.
    """
    parameters = list(parameters)
    trained = {id(parameter): parameter for _, parameter in parameters if parameter.requires_grad}
    decay = optimizer_cfg.get("weight_decay", 0.0)
    own: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer_cfg.get("groups") or ()):
        key, matches = f"optimizer.groups[{index}].match", set[int]()
        for pattern in [group["match"]] if isinstance(group["match"], str) else group["match"]:
            here = matching(pattern, parameters, key, "the model", f"{key}=[{{}}]")
            if not here & (trained.keys() | matches):
                raise ConfigError(
                    f"{key}: {pattern}",
                    "of what it matches, nothing is trained and in none of the groups before",
                    "patterns of which each adds parameters; the first group that matches counts",
                )
            matches |= here & trained.keys()
        options = {name: value for name, value in group.items() if name != "match"}
        own += _by_dims([trained.pop(number) for number in list(trained) if number in matches], decay, options)
    return [*_by_dims(list(trained.values()), decay, {}), *(group for group in own if group["params"])]


def _by_dims(parameters: list[nn.Parameter], decay: float, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two groups: matrices, and what has fewer than two dims, which only `options` can give a weight decay."""
    options = {name: tuple(value) if name == "betas" else value for name, value in options.items()}
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    rest = [parameter for parameter in parameters if parameter.ndim < 2]
    return [
        {"params": matrices, "weight_decay": decay, **options},
        {"params": rest, "weight_decay": 0.0, **options},
    ]


def _build_custom(cfg: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    takes = inspect.signature(locate(cfg["_target_"], "optimizer")).parameters
    for option in {option for group in groups for option in group} - {"params"}:
        if option in takes:
            continue
        if option != "weight_decay":
            close = nearest(option, takes)
            raise ConfigError(
                f"optimizer.groups: {option}",
                f"{cfg['_target_']} takes no argument {option}" + (f"; did you mean {close}?" if close else ""),
                ", ".join(name for name in takes if name != "params"),
            )
        for group in groups:
            del group["weight_decay"]
    if cfg["_target_"] == "torch.optim.Muon" and any(item.ndim != 2 for group in groups for item in group["params"]):
        raise ConfigError(
            "optimizer._target_=torch.optim.Muon",
            "it takes matrices alone, and the model has norms, biases or stacked experts, too",
            "autolaunch.models.muon.Muon, which gives all else to AdamW; embeddings and heads by optimizer.groups",
            "optimizer._target_=autolaunch.models.muon.Muon "
            "'optimizer.groups=[{match: [.*embed_tokens, lm_head], muon: false}]'",
        )
    refused = tuple(key for key in _OWN_KEYS if key not in takes)
    return build(cfg, "optimizer", refused, params=groups)


def learning_rate_factor(scheduler_cfg: Mapping[str, Any], total_steps: int) -> Callable[[int], float]:
    """The share of `optimizer.lr` at optimizer step 0, 1, 2, ...

    Warm-up takes `warmup_steps` steps of ``(step + 1) / (warmup_steps + 1)``: no step is wasted on a rate of zero. Then
    `constant` stays at 1; `linear` and `cosine` (half a wave) fall to `min_lr_ratio`, which they reach after the last
    step, and stay there.

    Args:
        scheduler_cfg: the fields of `autolaunch.config.schema.Scheduler`.
        total_steps: `trainer.max_steps`, used unless the schedule has its own `total_steps`.

    Raises:
        ConfigError: no such schedule, or a decay without an end or with its end inside the warm-up.
    """
    name = scheduler_cfg.get("name", "cosine")
    warmup, lowest = scheduler_cfg.get("warmup_steps", 0), scheduler_cfg.get("min_lr_ratio", 0.0)
    total = scheduler_cfg.get("total_steps") or total_steps
    if name not in ("constant", "cosine", "linear"):
        raise ConfigError(f"scheduler.name={name}", "no such schedule", "constant, cosine, linear")
    if name != "constant" and total <= 0:
        raise ConfigError(
            f"scheduler={name} with trainer.max_steps={total_steps}",
            "the rate falls until the last step, and there is none",
            "scheduler=constant, or a step at which the decay ends",
            "scheduler.total_steps=10000",
        )
    if name != "constant" and warmup >= total:
        raise ConfigError(
            f"scheduler.warmup_steps={warmup}",
            f"the rate would still rise when the schedule ends, at step {total}",
            f"0 to {total - 1}",
            f"scheduler.warmup_steps={total // 10}",
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if name == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        height = 1.0 - progress if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return lowest + (1.0 - lowest) * height

    return factor


def end_of_training(total_steps: int, trainer: pl.Trainer) -> int:
    """The optimizer step at which training ends: `total_steps`, or that of its last epoch; -1 if nothing says.

    Args:
        total_steps: `trainer.max_steps`; -1 where epochs or a time end the training.
    """
    if total_steps > 0 or trainer.max_epochs in (None, -1):
        return total_steps
    try:
        steps = trainer.estimated_stepping_batches
    except MisconfigurationException:  # accumulation changes from epoch to epoch
        return -1
    return int(steps) if math.isfinite(steps) else -1


def steps_left(trainer: pl.Trainer) -> float:
    """How many optimizer steps follow those that are done, while `trainer` trains; inf if nothing says.

    What is left of an epoch may be another number than of a whole one that ends there: a run that was resumed may have
    begun it in batches of another size.
    """
    left = trainer.max_steps - trainer.global_step if trainer.max_steps > 0 else math.inf
    loop: Any = trainer.fit_loop
    accumulated = trainer.accumulate_grad_batches
    if trainer.max_epochs in (None, -1) or math.isinf(loop.max_batches):
        return left
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    per_epoch = math.ceil(loop.max_batches / accumulated)
    is_over = epochs.processed == epochs.started or batches.processed >= loop.max_batches
    of_this = 0 if is_over else per_epoch - batches.processed // accumulated
    return min(left, (trainer.max_epochs - epochs.started) * per_epoch + of_this)


def optimizer_and_schedule(
    parameters: Iterable[tuple[str, nn.Parameter]],
    optimizer_cfg: Mapping[str, Any],
    scheduler_cfg: Mapping[str, Any],
    total_steps: int,
) -> dict[str, Any]:
    """What `LightningModule.configure_optimizers` returns: the optimizer and its rate per optimizer step.

    Raises:
        ConfigError: as `build_optimizer` and `learning_rate_factor`.
    """
    optimizer = build_optimizer(parameters, optimizer_cfg)
    schedule = Schedule(optimizer, learning_rate_factor(scheduler_cfg, total_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """One factor for the rates of all groups, also of those that callbacks add while it trains (`BaseFinetuning`).

    A group that is added has its rate at once, and follows the schedule from there.
    """

    def get_lr(self) -> list[float | torch.Tensor]:
        self.lr_lambdas += self.lr_lambdas[:1] * (len(self.base_lrs) - len(self.lr_lambdas))  # of a checkpoint
        factor = self.lr_lambdas[0]
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"] / (factor(self.last_epoch - 1) or 1.0)))
            self.lr_lambdas.append(factor)
        return super().get_lr()
