"""Keys that other tools have and people type: what they are called here."""

from __future__ import annotations

import re

from autolaunch_strategies.config import AXIS_SPELLINGS, ConfigError

_STRATEGIES = {
    "ddp": "dp=ddp",
    "fsdp": "dp=fsdp",
    "fsdp2": "dp=fsdp",
    "deepspeed": "dp=zero2",
    "deepspeed_stage_1": "dp=zero1",
    "deepspeed_stage_2": "dp=zero2",
    "deepspeed_stage_3": "dp=fsdp",
    "model_parallel": "mesh=dp2xmp2 dp=fsdp",
    "auto": "mesh=auto",
}
"""Lightning's names of strategies -> what to write here."""


def slip(override: str, key: str, value: str) -> ConfigError | None:
    """What to write in place of a key of another tool; None if it is none that is known."""
    if key in AXIS_SPELLINGS and re.fullmatch(r"-?\d+", value):
        return ConfigError(override, "how many ranks an axis has is told by the mesh", write=f"mesh={key}{value}")
    if key in ("strategy", "trainer.strategy"):
        named = _STRATEGIES.get(value) or next(
            (line for name, line in _STRATEGIES.items() if value.startswith(f"{name}_")), ""
        )
        return ConfigError(
            override,
            "there are no strategies to choose from: mesh says how the ranks are arranged, dp what they share",
            "dp=ddp, zero1, zero2, fsdp, hsdp; mesh=dp2xmp2",
            named,
        )
    return None
