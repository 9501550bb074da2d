"""What `to_distributed` can be told. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autolaunch_strategies.config import (
    AXES,
    AXIS_SPELLINGS,
    ConfigError,
    ContextParallel,
    DataParallel,
    MeshShape,
    ModelParallel,
    PipelineParallel,
    nearest,
    parallel_config,
)


@dataclass
class InputSpec:
    """One tensor that a model is called with, as Paddle's: ``InputSpec([4, 1024], "int64", "input_ids")``."""

    shape: Sequence[int | None]
    """Of a batch of all ranks. None, or -1, is a size as in the first batch."""
    dtype: Any = "float32"
    """A name of torch (or numpy), or a `torch.dtype`."""
    name: str | None = None
    """An argument of the model's `forward`; by position if it has none of this name."""
    stop_gradient: bool = False
    """Accepted as in Paddle. What is planned does not depend on it."""

    def __post_init__(self) -> None:
        where = f"InputSpec(shape={self.shape!r})"
        if isinstance(self.shape, str) or not isinstance(self.shape, Sequence):
            raise ConfigError(where, "a shape is a list of sizes", "whole numbers above 0; None where it varies")
        sizes = [None if size == -1 else size for size in self.shape]
        for size in sizes:
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigError(where, f"{size!r} is no size", "whole numbers above 0; None where it varies")
        self.shape = sizes


@dataclass
class ToDistributedConfig:
    """What `to_distributed` is told beyond the model, the optimizer and the data; all of it may be left out.

    What names a way to run is kept, and the planner chooses the rest.
    """

    input_spec: Sequence[InputSpec] | None = None
    """What the model is called with, to find out what it costs. By default the first batch shows it."""
    sequence_parallel: bool = False
    """Where layers are sharded along mp, shard activations between blocks along the sequence, too."""
    axes: Sequence[str] = ("dp", "mp")
    """Axes that the planner may give more than one rank. The others ask something of the training code or of the model:
    pp that `model.forward_backward` takes the place of forward and ``loss.backward()`` (see `parallelize`), cp that
    attention is `F.scaled_dot_product_attention`."""
    mesh: str | int | MeshShape | Mapping[str, int] | None = None
    """The mesh itself: ``"2x2"``, ``"dp2xmp2"``; its axes need not be in `axes`."""
    dp: DataParallel | Mapping[str, Any] | int | str | None = None
    """What is sharded along dp: ddp, zero1, zero2, fsdp, hsdp, a level, or the fields of `config.DataParallel`."""
    mp: ModelParallel | Mapping[str, Any] | str | None = None
    """How layers are sharded: auto, tensor_parallel, seq_parallel, or the fields of `config.ModelParallel`."""
    pp: PipelineParallel | Mapping[str, Any] | str | None = None
    """How stages work: exact, the name of a schedule, or the fields of `config.PipelineParallel`."""
    cp: ContextParallel | Mapping[str, Any] | str | None = None
    """How attention sees sharded sequences: gather, ring, ulysses, usp, or the fields of `config.ContextParallel`."""
    recompute: str | int | None = None
    """Activation checkpointing: none, selective, full, a number n for every n-th block, or offload."""
    compile: bool | None = None
    """Whether blocks are compiled (`torch.compile`, one by one)."""
    ep: int | None = None
    """Over how many ranks the experts of a mixture are shared out: a divisor of dp x cp x mp and of their number."""
    hardware: Any = None
    """The machines: a `planner.hardware.Hardware`, or the keys of a file in conf/cluster as a mapping. By default this
    machine: what `autolaunch calibrate` has measured here, else the built-in profile of its devices."""

    def check(self) -> None:
        """Check everything that can be seen without a model.

        Raises:
            ConfigError: a wrong type, an unknown axis, a mesh or the config of an axis that is none.
        """
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(
                f"config.sequence_parallel={self.sequence_parallel!r}", "not True or False", "True or False"
            )
        specs = self.input_spec
        if specs is not None and (
            isinstance(specs, str)
            or not isinstance(specs, Sequence)
            or not specs
            or not all(isinstance(spec, InputSpec) for spec in specs)
        ):
            raise ConfigError(
                "config.input_spec",
                f"a list of InputSpec is needed, not {_type_in_words(specs)}",
                "one InputSpec for each tensor that the model is called with",
                'ToDistributedConfig(input_spec=[InputSpec([4, 1024], "int64", "input_ids")])',
            )
        axes = [self.axes] if isinstance(self.axes, str) else list(self.axes)
        if wrong := [axis for axis in axes if axis not in AXIS_SPELLINGS]:
            raise ConfigError(f"config.axes={tuple(axes)}", f"no axis is called {wrong[0]!r}", ", ".join(AXES))
        self.axes = tuple(AXIS_SPELLINGS[axis] for axis in axes)
        parallel_config(
            1 if self.mesh is None else self.mesh, self.dp, self.mp, self.pp, self.cp, self.recompute or "none",
            compile=bool(self.compile), ep=1 if self.ep is None else self.ep,
        )  # fmt: skip


def checked_config(config: Any) -> ToDistributedConfig:
    """`config`, or the default one for None.

    Raises:
        ConfigError: not a config, or a wrong one.
    """
    if config is None:
        return ToDistributedConfig()
    if not isinstance(config, ToDistributedConfig):
        known = [item.name for item in fields(ToDistributedConfig)]
        close = ""
        if isinstance(config, Mapping):
            close = next((nearest(str(key), known) for key in config if nearest(str(key), known)), "")
        raise ConfigError(
            "config",
            f"a ToDistributedConfig is needed, not {type(config).__name__}",
            f"fields: {', '.join(known)}",
            f"ToDistributedConfig({close or 'sequence_parallel'}=...)",
        )
    config.check()
    return config


def _type_in_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return type(value).__name__
