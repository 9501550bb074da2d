"""What a run computes in where nobody has said it: chosen by the kind of device that it runs on. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autolaunch.machine.devices import visible_devices
from autolaunch.machine.this_machine import multiplies_bf16
from autolaunch_strategies.config import ConfigError, lightning_precision
from autolaunch_strategies.config.values import Where

KEYS_BY_DEVICE = ("precision", "matmul_precision")


def device_of(config: Mapping[str, Any]) -> str:
    """`cuda` or `cpu`: what the ranks of a job compute on, be it here or elsewhere.

    Args:
        config: every key of the schema.
    """
    if config["cluster"] is not None:
        return str(config["cluster"]["device"])
    accelerator = config["trainer"]["accelerator"]
    if config["launch"]["name"] == "slurm":  # nodes of which this machine knows what is asked for
        return "cpu" if accelerator == "cpu" or config["launch"]["gpus_per_node"] == 0 else "cuda"
    return "cuda" if visible_devices(accelerator)[0] == "gpu" else "cpu"


def known_device(config: Mapping[str, Any]) -> str | None:
    """`device_of`, or None where nobody has said it: what is only planned, or run dry, need not run on this machine."""
    elsewhere = config["task"] in ("plan", "dryrun") and config["cluster"] is None
    return None if elsewhere else device_of(config)


def with_arithmetic(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the config with `precision` and `matmul_precision` chosen where they are null, the reason of each that was).

    A GPU computes in bf16-mixed. Products that stay in fp32 beside bf16 are computed in TF32, which is finer than bf16;
    where fp32 was asked for, they are fp32. On a CPU all is fp32, and `matmul_precision` stays null.
    """
    device, reasons = device_of(config), {}
    precision, products = config["precision"], config["matmul_precision"]
    if precision is None:
        precision, reasons["precision"] = _precision(config, device)
    if products is None and device == "cuda":
        if "16" in str(lightning_precision(precision)):
            products, reasons["matmul_precision"] = "high", "TF32 is finer than the bf16 beside it"
        else:
            products, reasons["matmul_precision"] = "highest", f"precision={precision} is all in fp32"
    return {**config, "precision": precision, "matmul_precision": products}, reasons


def _precision(config: Mapping[str, Any], device: str) -> tuple[str, str]:
    if device == "cpu":
        return "32-true", "default on a CPU"
    if config["cluster"] is None and config["launch"]["name"] != "slurm" and not multiplies_bf16():
        return "32-true", "default on GPUs that can't multiply bf16"
    return "bf16-mixed", "default on GPUs"


def check_matmul_precision(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """A way to compute products of fp32 on devices that know only one."""
    products = config["matmul_precision"]
    if products is not None and known_device(config) == "cpu":
        yield ConfigError(
            where("matmul_precision", products),
            "it has an effect on GPUs, and this runs on a CPU",
            "null; any other on GPUs",
            "matmul_precision=null",
        )


def arithmetic_words(config: Mapping[str, Any], reasons: Mapping[str, str]) -> list[str]:
    """What a job computes in, and why where nobody has said it: `bf16-mixed (default on GPUs)`, `fp32 products high`.

    Args:
        config: of `with_arithmetic`.
        reasons: of `with_arithmetic`.
    """
    values = {"precision": config["precision"], "matmul_precision": config.get("matmul_precision")}
    names = {"precision": "", "matmul_precision": "fp32 products "}
    return [
        f"{names[key]}{value}" + (f" ({reasons[key]})" if key in reasons else "")
        for key, value in values.items()
        if value is not None
    ]
