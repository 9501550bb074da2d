"""The engine of autolaunch: a Lightning strategy over an N-D device mesh, usable without the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autolaunch_strategies.config import ConfigError, DataParallel, MeshShape, ParallelConfig
    from autolaunch_strategies.parallelize_api import clip_grad_norm_, parallelize
    from autolaunch_strategies.pipeline.split import SplitPoint
    from autolaunch_strategies.process_mesh import ProcessMesh, get_mesh, set_mesh
    from autolaunch_strategies.strategy import MeshStrategy
    from autolaunch_strategies.styles.context import ContextParallel, PrepareContextParallel
    from autolaunch_strategies.styles.hooks import PrepareLayerInput, PrepareLayerOutput
    from autolaunch_strategies.styles.sequence import (
        SequenceParallelBegin,
        SequenceParallelDisable,
        SequenceParallelEnable,
        SequenceParallelEnd,
    )
    from autolaunch_strategies.styles.tensor import ColWiseParallel, RowWiseParallel
    from autolaunch_strategies.to_distributed_api import to_distributed
    from autolaunch_strategies.to_distributed_config import InputSpec, ToDistributedConfig

__all__ = [
    "ColWiseParallel",
    "ConfigError",
    "ContextParallel",
    "DataParallel",
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
    "parallelize",
    "set_mesh",
    "to_distributed",
]

_HOMES = {
    "MeshStrategy": "strategy",
    "SplitPoint": "pipeline.split",
    "to_distributed": "to_distributed_api",
    **dict.fromkeys(("InputSpec", "ToDistributedConfig"), "to_distributed_config"),
    **dict.fromkeys(("parallelize", "clip_grad_norm_"), "parallelize_api"),
    **dict.fromkeys(("ProcessMesh", "get_mesh", "set_mesh"), "process_mesh"),
    **dict.fromkeys(("ColWiseParallel", "RowWiseParallel"), "styles.tensor"),
    **dict.fromkeys(("PrepareContextParallel", "ContextParallel"), "styles.context"),
    **dict.fromkeys(("PrepareLayerInput", "PrepareLayerOutput"), "styles.hooks"),
    **dict.fromkeys((f"SequenceParallel{end}" for end in ("Begin", "End", "Enable", "Disable")), "styles.sequence"),
}  # everything else lives in config, which imports no torch


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
