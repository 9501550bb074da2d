"""The axis mp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autolaunch_strategies.config.options import option


@dataclass
class ModelParallel:
    """How the layers of a model are sharded over the ranks of the mp axis."""

    name: str = option("Which plan this is; set by the group.", "auto")
    base: str = option(
        "Rules that mp.plan is laid over: `model` (the model's own, or else derived), `derive`, or `none`.",
        "model",
        choices=("model", "derive", "none"),
    )
    sequence_parallel: bool = option("Shard activations between blocks along the sequence, too.", False)
    overlap: bool = option(
        "Send parts of a sequence while matrices are multiplied (async tensor parallel): compile and GPUs only.", False
    )
    plan: dict[str, Any] = option(
        "Rules of your own, `pattern: style`; one with a pattern of the base takes its place, null removes it.", {}
    )


MP_NAMES: dict[str, ModelParallel | None] = {
    "none": None,
    "auto": ModelParallel(),
    "tensor_parallel": ModelParallel("tensor_parallel"),
    "seq_parallel": ModelParallel("seq_parallel", sequence_parallel=True),
}
"""What the names of the group mp mean."""
