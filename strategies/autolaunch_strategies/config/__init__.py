"""What a parallel run is, as plain data: the mesh and one dataclass per axis, with what one of them says of itself.

Imports no torch, so that the command can check a config in milliseconds, and nothing of any other room. What needs the
rules of schedules or cuts is checked where these are known (`apply.check`). All public names are given here.
"""

from autolaunch_strategies.config.context import CP_NAMES, ContextParallel, check_shards_as, cp_backend
from autolaunch_strategies.config.context_backends import (
    CP_BACKEND_SPECS,
    CP_BACKENDS,
    CP_SPELLINGS,
    ContextBackend,
    backends_that,
    ulysses_degree,
)
from autolaunch_strategies.config.data_parallel import DataParallel
from autolaunch_strategies.config.errors import ConfigError, ConfigErrors, nearest, raise_all
from autolaunch_strategies.config.mesh_shape import (
    AXES,
    AXIS_SPELLINGS,
    AXIS_TABLE,
    DEFAULT_ORDER,
    SAME_DATA_AXES,
    SHARDING_AXES,
    Axis,
    MeshShape,
    looks_like_mesh,
    parse_mesh,
    parse_order,
)
from autolaunch_strategies.config.model_parallel import MP_NAMES, ModelParallel
from autolaunch_strategies.config.options import option
from autolaunch_strategies.config.parallel import CUDA_GRAPHS, RANDOM_NUMBERS, ParallelConfig, parallel_config
from autolaunch_strategies.config.pipeline import PP_NAMES, PipelineParallel
from autolaunch_strategies.config.precision import FLOAT8_RECIPES, check_torchao, lightning_precision
from autolaunch_strategies.config.recompute import RECOMPUTE_MODES, Recompute, parse_recompute
from autolaunch_strategies.config.schedules import SCHEDULE_SPECS, SCHEDULES, ScheduleSpec
from autolaunch_strategies.config.spelling import as_typed, on_command_line, quoted, to_write

__all__ = [
    "AXES",
    "AXIS_SPELLINGS",
    "AXIS_TABLE",
    "CP_BACKENDS",
    "CP_BACKEND_SPECS",
    "CP_NAMES",
    "CP_SPELLINGS",
    "CUDA_GRAPHS",
    "DEFAULT_ORDER",
    "FLOAT8_RECIPES",
    "MP_NAMES",
    "PP_NAMES",
    "RANDOM_NUMBERS",
    "RECOMPUTE_MODES",
    "SAME_DATA_AXES",
    "SCHEDULES",
    "SCHEDULE_SPECS",
    "SHARDING_AXES",
    "Axis",
    "ConfigError",
    "ConfigErrors",
    "ContextBackend",
    "ContextParallel",
    "DataParallel",
    "MeshShape",
    "ModelParallel",
    "ParallelConfig",
    "PipelineParallel",
    "Recompute",
    "ScheduleSpec",
    "as_typed",
    "backends_that",
    "check_shards_as",
    "check_torchao",
    "cp_backend",
    "lightning_precision",
    "looks_like_mesh",
    "nearest",
    "on_command_line",
    "option",
    "parallel_config",
    "parse_mesh",
    "parse_order",
    "parse_recompute",
    "quoted",
    "raise_all",
    "to_write",
    "ulysses_degree",
]
