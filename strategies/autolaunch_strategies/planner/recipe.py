"""How a training step treats numbers and data, from the plain values of a job. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autolaunch_strategies.config import ConfigError, DataParallel
from autolaunch_strategies.planner.profile import Recipe

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_PRECISIONS = {
    "32": ("fp32", None), "32-true": ("fp32", None), "64": ("fp64", None), "64-true": ("fp64", None),
    "bf16-true": ("bf16", None), "16-true": ("fp16", None),
    "bf16": ("fp32", "bf16"), "bf16-mixed": ("fp32", "bf16"), "16": ("fp32", "fp16"), "16-mixed": ("fp32", "fp16"),
}  # fmt: skip
"""Lightning's names -> (type of parameters, type of autocast)."""
_STATES = {"adamw": 2, "adam": 2, "adamax": 2, "nadam": 2, "radam": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1}
"""How many numbers an optimizer keeps for a parameter, in the parameter's type; momentum is one more."""


def recipe_of(
    batch_size: int,
    precision: str | int = "32-true",
    optimizer: str = "adamw",
    momentum: float = 0.0,
    dp: Mapping[str, Any] | None = None,
    *,
    trained: float = 1.0,
    mean_loss: bool = True,
    tf32: bool = False,
    float8: str | None = None,
) -> Recipe:
    """The recipe of a job.

    Args:
        batch_size: sequences per optimizer step, over all ranks.
        precision: as lightning names it: 32-true, bf16-mixed, ...
        optimizer: its name, or the import path of its class; one that is not known is taken to keep as much as AdamW.
        momentum: of SGD and RMSprop.
        dp: the group `dp` of a job: `param_dtype` and `reduce_dtype` count.
        trained: share of the parameters that can be trained that the optimizer has.
        mean_loss: whether the loss is a mean over samples.
        tf32: whether products of fp32 are computed in TF32.
        float8: torchao's recipe by which linear layers of blocks multiply in float8, if they do.

    Raises:
        ConfigError: an unknown precision.
    """
    name = str(precision)
    if name not in _PRECISIONS:
        raise ConfigError(f"precision={name}", "no such precision", ", ".join(key for key in _PRECISIONS if "-" in key))
    stored, autocast = _PRECISIONS[name]
    gathered = (dp or {}).get("param_dtype") or stored
    reduced = (dp or {}).get("reduce_dtype") or gathered
    compute = "fp8" if float8 else autocast or gathered
    casts = autocast is not None and _BYTES[gathered] > _BYTES[autocast]
    asked = {key: value for key, value in (dp or {}).items() if key in ("param_dtype", "reduce_dtype")}
    kind = optimizer.rpartition(".")[2].lower()
    full = "tf32" if tf32 else "fp32"
    states = _STATES.get(kind, 2) + (1 if momentum and kind in ("sgd", "rmsprop") else 0)
    return Recipe(
        batch_size=batch_size,
        compute=full if compute == "fp32" else "fp32" if compute == "fp64" else compute,
        rowwise=float8 == "rowwise",
        full=full,
        parameter_bytes=_BYTES[stored],
        gathered_bytes=_BYTES[gathered],
        cast_bytes=_BYTES[autocast] if casts and autocast else 0,
        gathers_casts=casts and stored == "fp32" and DataParallel(**asked).follows_autocast,
        gradient_bytes=_BYTES[stored],
        reduce_bytes=_BYTES[reduced],
        optimizer_bytes=states * _BYTES[stored],
        trained=trained,
        mean_loss=mean_loss,
    )
