"""The engine of autolaunch: a Lightning strategy over an N-D device mesh, usable without the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autolaunch_strategies.config import ConfigError, DataParallel, MeshShape, ParallelConfig
    from autolaunch_strategies.lightning.ema import EMA
    from autolaunch_strategies.lightning.expert_bias import ExpertBias
    from autolaunch_strategies.lightning.strategy import MeshStrategy
    from autolaunch_strategies.loop.items import items_per_rank
    from autolaunch_strategies.loop.parallelize import clip_grad_norm_, parallelize
    from autolaunch_strategies.loop.process_mesh import ProcessMesh, get_mesh, set_mesh
    from autolaunch_strategies.paddle.config import InputSpec, ToDistributedConfig
    from autolaunch_strategies.paddle.to_distributed import to_distributed
    from autolaunch_strategies.pipeline.split import SplitPoint
    from autolaunch_strategies.tensor.styles.context import ContextParallel, PrepareContextParallel
    from autolaunch_strategies.tensor.styles.hooks import PrepareLayerInput, PrepareLayerOutput
    from autolaunch_strategies.tensor.styles.sequence import (
        SequenceParallelBegin,
        SequenceParallelDisable,
        SequenceParallelEnable,
        SequenceParallelEnd,
    )
    from autolaunch_strategies.tensor.styles.tensor import ColWiseParallel, RowWiseParallel

__all__ = [
    "EMA",
    "ColWiseParallel",
    "ConfigError",
    "ContextParallel",
    "DataParallel",
    "ExpertBias",
    "InputSpec",
    "MeshShape",
    "MeshStrategy",
    "ParallelConfig",
    "PrepareContextParallel",
    "PrepareLayerInput",
    "PrepareLayerOutput",
    "ProcessMesh",
    "RowWiseParallel",
    "SequenceParallelBegin",
    "SequenceParallelDisable",
    "SequenceParallelEnable",
    "SequenceParallelEnd",
    "SplitPoint",
    "ToDistributedConfig",
    "clip_grad_norm_",
    "get_mesh",
    "items_per_rank",
    "parallelize",
    "set_mesh",
    "to_distributed",
]

_HOMES = {
    "EMA": "lightning.ema",
    "ExpertBias": "lightning.expert_bias",
    "MeshStrategy": "lightning.strategy",
    "SplitPoint": "pipeline.split",
    "to_distributed": "paddle.to_distributed",
    **dict.fromkeys(("InputSpec", "ToDistributedConfig"), "paddle.config"),
    "items_per_rank": "loop.items",
    **dict.fromkeys(("parallelize", "clip_grad_norm_"), "loop.parallelize"),
    **dict.fromkeys(("ProcessMesh", "get_mesh", "set_mesh"), "loop.process_mesh"),
    **dict.fromkeys(("ColWiseParallel", "RowWiseParallel"), "tensor.styles.tensor"),
    **dict.fromkeys(("PrepareContextParallel", "ContextParallel"), "tensor.styles.context"),
    **dict.fromkeys(("PrepareLayerInput", "PrepareLayerOutput"), "tensor.styles.hooks"),
    **dict.fromkeys(
        (f"SequenceParallel{end}" for end in ("Begin", "End", "Enable", "Disable")), "tensor.styles.sequence"
    ),
}  # everything else lives in config, which imports no torch


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
