"""The optimizer and the learning rate of a run, from the groups `optimizer` and `scheduler`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autolaunch.instantiate import build, locate
from autolaunch_strategies.config import ConfigError

_OWN_KEYS = (
    "lr",
    "betas",
    "eps",
    "momentum",
)  # what the schema fills in, whether a class of the user's takes it or not


def build_optimizer(parameters: Iterable[nn.Parameter], optimizer_cfg: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer over the parameters that require gradients, in two groups: with weight decay (matrices), without.

    Args:
        parameters: of the model; norms and biases are known by having fewer than two dims.
        optimizer_cfg: the fields of `autolaunch.config.schema.Optimizer`; with `_target_`, any further key is an
            argument.

    Raises:
        ConfigError: no such optimizer, or a `_target_` that cannot be called so.
    """
    cfg = {key: value for key, value in optimizer_cfg.items() if value is not None}
    name = cfg.pop("name", "adamw")
    decay = cfg.pop("weight_decay", 0.0)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    if "_target_" in cfg:
        return _build_custom(cfg, groups)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=cfg["lr"], momentum=cfg["momentum"])
    if name in ("adam", "adamw"):
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        return kind(groups, lr=cfg["lr"], betas=tuple(cfg["betas"]), eps=cfg["eps"])
    if name == "custom":
        raise ConfigError(
            "optimizer=custom",
            "it does not say which optimizer",
            "the import path of a torch.optim.Optimizer class",
            "optimizer._target_=torch.optim.Adagrad",
        )
    raise ConfigError(f"optimizer.name={name}", "no such optimizer", "adamw, adam, sgd, custom with _target_")


def _build_custom(cfg: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    takes = inspect.signature(locate(cfg["_target_"], "optimizer")).parameters
    if "weight_decay" not in takes:
        for group in groups:
            del group["weight_decay"]
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


def optimizer_and_schedule(
    parameters: Iterable[nn.Parameter],
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
