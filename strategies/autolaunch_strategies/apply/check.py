"""What is wrong with a config whatever the model is: seen without a model, a device or torch."""

from __future__ import annotations

from autolaunch_strategies.config import CP_BACKENDS, CUDA_GRAPHS, SCHEDULES, ConfigError, ParallelConfig
from autolaunch_strategies.pipeline.split import parse_spec
from autolaunch_strategies.schedules.schedule import check_schedule


def config_errors(config: ParallelConfig, device: str | None = None) -> list[ConfigError]:
    """Every problem that can be seen without a model; an empty list if there is none.

    Args:
        device: the kind of device that it runs on (`cpu`, `gpu`, `cuda`), where that is known.
    """
    errors = []
    try:
        config.dp.split(config.mesh.dp)
    except ConfigError as error:
        errors.append(error)
    if config.dp.cpu_offload and config.dp.sharding_level == 0:
        errors.append(
            ConfigError(
                "dp.cpu_offload=true with dp.sharding_level=0",
                "only sharded state can be kept in host memory",
                "dp.sharding_level 1, 2 or 3",
                "dp.sharding_level=3 dp.cpu_offload=true",
            )
        )
    for key in ("param_dtype", "reduce_dtype"):
        value = getattr(config.dp, key)
        if value is not None and config.dp.sharding_level == 0:
            errors.append(
                ConfigError(
                    f"dp.{key}={value} with dp.sharding_level=0",
                    "level 0 computes with parameters and sums gradients in the type they are stored in",
                    "dp.sharding_level 1, 2 or 3; or precision=bf16-mixed, bf16-true, ...",
                    f"dp.sharding_level=3 dp.{key}={value}",
                )
            )
    if config.mesh.mp != 1 and config.mp is None:
        errors.append(
            ConfigError(
                f"mesh={config.mesh.name} with mp=none",
                f"the mesh has {config.mesh.mp} ranks along mp, but mp=none uses only one",
                "mp=auto, tensor_parallel, seq_parallel, or a plan of your own",
                "mp=auto",
            )
        )
    if config.compile in CUDA_GRAPHS and config.dp.sharding_level > 0 and config.mesh.dp * config.mesh.cp != 1:
        instead = "max-autotune-no-cudagraphs" if config.compile == "max-autotune" else "true"
        errors.append(
            ConfigError(
                f"compile={config.compile} with dp.sharding_level={config.dp.sharding_level}",
                "it runs CUDA graphs, which hold the addresses of parameters, and sharded ones are gathered to other "
                "memory in each pass",
                f"compile={instead}, or dp.sharding_level=0",
                f"compile={instead}",
            )
        )
    if config.recompute.mode == "budget" and not config.compile:
        errors.append(
            ConfigError(
                "recompute=budget with compile=false",
                "what is computed again is chosen when blocks are compiled",
                "compile=true, or recompute=selective, full",
                "recompute=budget compile=true",
            )
        )
    if config.compile and config.random_numbers == "by_position":
        errors.append(
            ConfigError(
                f"compile={str(config.compile).lower()} with random_numbers=by_position",
                "which module draws is found while Python runs, and compiled code has no modules",
                "compile=false, or random_numbers=by_rank",
                "random_numbers=by_rank",
            )
        )
    errors += _check_overlap(config, device)
    errors += _check_pipeline(config)
    errors += _check_context(config)
    if not errors:
        errors += _check_experts(config)
    return errors


def _check_overlap(config: ParallelConfig, device: str | None) -> list[ConfigError]:
    """Overlap where nothing is exchanged for matrices to be multiplied, or nothing puts both together."""
    if config.mp is None or not config.mp.overlap:
        return []
    if device == "cpu":
        return [
            ConfigError(
                "mp.overlap=true on a CPU",
                "ranks read parts of sequences out of each other's memory while they multiply, which only GPUs do",
                "mp.overlap=false, or trainer.accelerator=gpu",
                "mp.overlap=false",
            )
        ]
    if config.mesh.mp == 1:
        return [
            ConfigError(
                f"mp.overlap=true with mesh={config.mesh.name}",
                "one rank of mp exchanges nothing",
                "a mesh with an mp of 2 or more, or mp.overlap=false",
                "mp.overlap=false",
            )
        ]
    errors = []
    if not config.mp.sequence_parallel and not any(name in repr(config.mp.plan) for name in _MAY_SHARD_SEQUENCES):
        errors.append(
            ConfigError(
                f"mp.overlap=true with mp={config.mp.name}",
                "what overlaps is gathering sequences and scattering them again, and only sequence parallelism does it",
                "mp=seq_parallel, or mp.sequence_parallel=true",
                "mp=seq_parallel mp.overlap=true",
            )
        )
    if not config.compile:
        errors.append(
            ConfigError(
                "mp.overlap=true with compile=false",
                "it is the compiler that joins a matrix multiplication to what is sent for it",
                "compile=true, or mp.overlap=false",
                "compile=true mp.overlap=true",
            )
        )
    return errors


_MAY_SHARD_SEQUENCES = ("SequenceParallelBegin", "_target_")
"""Names in a plan of one's own; of a style that is somebody's own it is not known."""


def _check_experts(config: ParallelConfig) -> list[ConfigError]:
    """A degree of experts that does not divide the ranks among which parameters are sharded."""
    if -1 in config.mesh.sizes.values() or config.ep == 1:
        return []
    ranks, mesh = config.expert_ranks, config.mesh
    fitting = [str(size) for size in range(1, ranks + 1) if ranks % size == 0]
    if str(config.ep) in fitting:
        errors = []
    else:
        errors = [
            ConfigError(
                f"ep={config.ep} with mesh={config.mesh.name}",
                "experts are shared out over ranks of dp x cp x mp (of dp those of one replica), which are "
                f"{ranks // (mesh.cp * mesh.mp)} x {mesh.cp} x {mesh.mp} = {ranks} here",
                f"a divisor of {ranks}: {', '.join(fitting)}",
                f"ep={max(int(size) for size in fitting if int(size) <= config.ep)}",
            )
        ]
    if config.dp.reduce_dtype == "fp16":
        errors.append(
            ConfigError(
                f"dp.reduce_dtype=fp16 with ep={config.ep}",
                "torch divides gradients in fp16 twice where experts are not sharded any further",
                "dp.reduce_dtype=bf16, fp32 or null",
                "dp.reduce_dtype=fp32",
            )
        )
    return errors


def _check_context(config: ParallelConfig) -> list[ConfigError]:
    if config.cp is None:
        if config.mesh.cp == 1:
            return []
        return [
            ConfigError(
                f"mesh={config.mesh.name} with cp=none",
                f"the mesh has {config.mesh.cp} ranks along cp, but cp=none uses only one",
                f"cp={', '.join(CP_BACKENDS)}",
                "cp=gather",
            )
        ]
    if config.mesh.cp == 1 and config.cp.spec.is_mixed:
        return []  # a size that fits another mesh
    try:
        config.cp.split(config.mesh.cp)
    except ConfigError as error:
        return [error]
    return []


def _check_pipeline(config: ParallelConfig) -> list[ConfigError]:
    if config.pp is None:
        if config.mesh.pp == 1:
            return []
        return [
            ConfigError(
                f"mesh={config.mesh.name} with pp=none",
                f"the mesh has {config.mesh.pp} ranks along pp, but pp=none uses only one",
                f"pp=exact, or a schedule for losses that are means over samples: pp={', '.join(SCHEDULES)}",
                "pp=exact",
            )
        ]
    try:
        parse_spec(config.pp.split_spec)
        errors = []
    except ConfigError as error:
        errors = [error]
    if config.mesh.pp > 1:
        return errors + check_schedule(config.pp, config.mesh.pp, config.pp.microbatches)
    # On one rank no schedule is run; what is wrong whatever the mesh is told all the same.
    return errors if config.pp.schedule.endswith(".csv") else errors + check_schedule(config.pp, 1, None)
