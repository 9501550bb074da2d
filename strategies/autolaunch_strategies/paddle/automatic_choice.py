"""Which way to run a training: what the planner chooses for a model, an optimizer, a loader and the machine at hand."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.apply.order import foresee
from autolaunch_strategies.config import (
    AXES,
    CP_BACKENDS,
    DEFAULT_ORDER,
    SAME_DATA_AXES,
    ConfigError,
    MeshShape,
    ParallelConfig,
    PipelineParallel,
    parallel_config,
    parse_recompute,
    raise_all,
)
from autolaunch_strategies.data_parallel.first_batch import first_batch
from autolaunch_strategies.data_parallel.loader import global_batch_size
from autolaunch_strategies.paddle.config import ToDistributedConfig
from autolaunch_strategies.paddle.example_batch import ExampleBatch, example_of
from autolaunch_strategies.planner.candidate import PIPELINES, Candidate, recompute_code
from autolaunch_strategies.planner.hardware import Hardware, hardware_from
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.settings import cut_names

log = logging.getLogger(__name__)

MACHINES = "autolaunch_strategies.machines"
"""Entry points that know the machine at hand: (ranks, accelerator, where) -> what a file of conf/cluster has."""

EXAMPLE_SAMPLES = 2
"""Size of the batch with which a model is looked at: small, and not 1, which means more than one thing."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why; ``str()`` is for people."""

    settings: ParallelConfig
    batch_size: int | None
    """Samples of a full batch of all ranks, if the loader says so."""
    reasons: tuple[str, ...]
    account: Mapping[str, Any] = field(default_factory=dict)
    """The planner's `document`; empty where the model could not be profiled."""
    example: Any = None
    """What the model is called with, on meta."""

    @property
    def mesh(self) -> MeshShape:
        """Sizes of the axes."""
        return self.settings.mesh

    def __str__(self) -> str:
        settings, mesh = self.settings, self.mesh
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1) or "one device"
        lines = [f"to_distributed: {sizes}"]
        if mesh.dp * mesh.cp > 1:
            replicate, shard = settings.dp.split(mesh.dp)
            sharded = {0: "nothing", 1: "optimizer state", 2: "optimizer state and gradients"}
            kept = sharded.get(settings.dp.sharding_level, "parameters, gradients and optimizer state")
            over = f" over {shard * mesh.cp} ranks" + (f", {replicate} replicas" if replicate > 1 else "")
            level = settings.dp.sharding_level
            lines.append(f"  dp: level {level}, {kept} sharded{over if level else ''}")
            if self.batch_size is not None and mesh.dp > 1:
                lines.append(f"      batches of {self.batch_size}: {self.batch_size // mesh.dp} on each of {mesh.dp}")
        if mesh.mp > 1 and settings.mp is not None:
            also = " and sequences between blocks" if settings.mp.sequence_parallel else ""
            lines.append(f"  mp: layers{also} sharded over {mesh.mp} ranks")
        if mesh.pp > 1 and settings.pp is not None:
            parts = f", {settings.pp.microbatches} microbatches" if settings.pp.microbatches else ""
            lines.append(f"  pp: {mesh.pp} ranks, {settings.pp.schedule}, loss {settings.pp.loss}{parts}")
        if mesh.cp > 1 and settings.cp is not None:
            lines.append(f"  cp: sequences sharded over {mesh.cp} ranks, {settings.cp.backend}")
        if settings.ep > 1:
            lines.append(f"  ep: experts shared out over {settings.ep} ranks")
        if settings.recompute.mode != "none":
            lines.append(f"  recompute: {settings.recompute.mode}")
        if settings.compile:
            lines.append("  compile: every block")
        return "\n".join([*lines, *(f"  because {reason}" for reason in self.reasons)])


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    config: ToDistributedConfig,
    devices: int,
    nodes: int,
    device: torch.device,
) -> Choice:
    """The planner's choice for a training on `nodes` of `devices` each; nothing is changed. On one rank.

    Raises:
        ConfigError: no way fits, or what `config` asks for can't be.
    """
    batch = first_batch(loader)
    size = global_batch_size(loader)
    example = example_of(model, config.input_spec, batch, size)
    if size is None and example is not None and batch is not None:
        size = example.samples  # a sampler of batches may make others: these are shared out exactly, too
    space = _Space(config, devices * nodes, size, loader.batch_size is not None)
    recipe = _recipe(model, optimizer, size or devices * nodes)
    hardware = _hardware(config.hardware, devices, nodes, device)
    profile, problem = _profile(model, example, device, space.own_plan)
    while True:
        if profile is None:
            choice = _by_rule(space, size, f"the model can't be profiled: {problem}")
        else:
            choice = _by_plan(profile, recipe, hardware, space, size)
        inputs = None if example is None else example.with_samples(EXAMPLE_SAMPLES)
        try:
            with example_named(model, inputs):
                foresee(model, choice.settings)
        except ConfigError as error:
            if not space.without_sharding_of(choice.mesh, error):
                raise
            continue
        return dataclasses.replace(choice, example=inputs)


@contextmanager
def example_named(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Within it `model` names `inputs` as its `example_input_array`, unless it names others itself."""
    if inputs is None or getattr(model, "example_input_array", None) is not None:
        yield
        return
    before = model.__dict__.get("example_input_array", model)
    model.__dict__["example_input_array"] = inputs
    try:
        yield
    finally:
        del model.__dict__["example_input_array"]
        if before is not model:
            model.__dict__["example_input_array"] = before


# --- what may be chosen ------------------------------------------------------------------------------------------


class _Space:
    """What the config and the size of the batch leave to the planner, less what turned out not to work."""

    def __init__(self, config: ToDistributedConfig, world: int, batch_size: int | None, is_fixed: bool) -> None:
        self.config, self.world, self.batch_size = config, world, batch_size
        self.settled = parallel_config(1, config.dp, config.mp, config.pp, config.cp, config.recompute or "none")
        self.mesh = _mesh_of(config, world)
        fitting = [size for size in _divisors(world) if batch_size is None or batch_size % size == 0]
        if self.mesh is not None:
            if is_fixed and self.mesh.dp not in fitting:
                raise _batch_error(f"config.mesh={self.mesh.name}", batch_size, self.mesh.dp)
            self.sizes = {axis: [size] for axis, size in self.mesh.sizes.items()}
        else:
            every = _divisors(world)
            self.sizes = {axis: every if axis in config.axes else [1] for axis in AXES}
            if "dp" in config.axes:
                self.sizes["dp"] = fitting
        self.problems: list[str] = []
        self.left_out = [size for size in _divisors(world) if size not in fitting]

    @property
    def own_plan(self) -> Mapping[str, Any] | None:
        """The rules for mp that take the place of all others, if the config has such."""
        mp = self.settled.mp
        return mp.plan if mp is not None and mp.base == "none" else None

    def meshes(self) -> list[MeshShape]:
        """Every mesh there may be."""
        meshes = []
        for pp in self.sizes["pp"]:
            for cp in self.sizes["cp"]:
                for mp in self.sizes["mp"]:
                    meshes += [MeshShape(dp, mp, pp, cp) for dp in self.sizes["dp"] if dp * mp * pp * cp == self.world]
        return meshes

    def without_sharding_of(self, mesh: MeshShape, error: ConfigError) -> bool:
        """Leave out what shards the model as `mesh` does, which `error` refuses; False if that was asked for."""
        axis = next((axis for axis in reversed(SAME_DATA_AXES) if mesh.sizes[axis] > 1), None)
        if self.mesh is not None or axis is None:
            return False
        self.sizes[axis] = [size for size in self.sizes[axis] if size != mesh.sizes[axis]]
        self.problems.append(f"{axis}={mesh.sizes[axis]} can't be: {str(error).splitlines()[0]}")
        return True

    def wanted(self, staged: bool) -> dict[str, tuple[int, ...]]:
        """For the planner: field of `Candidate` -> the values that it may have; `staged`: with pp, or without."""
        config, settled = self.config, self.settled
        wanted: dict[str, tuple[int, ...]] = {axis: tuple(sizes) for axis, sizes in self.sizes.items()}
        wanted["pp"] = tuple(size for size in self.sizes["pp"] if (size > 1) == staged)
        if not staged:
            wanted["microbatches"] = (1,)  # the loop makes one backward pass of every batch
        elif settled.pp is not None and config.pp is not None:
            name = "exact" if settled.pp.loss == "exact" else settled.pp.schedule
            if name in PIPELINES:
                wanted["pipeline"] = (PIPELINES.index(name),)
            if settled.pp.microbatches is not None:
                wanted["microbatches"] = (settled.pp.microbatches,)
        else:
            wanted["pipeline"] = (PIPELINES.index("exact"),)  # right for any loss
        if config.dp is not None:
            wanted["level"] = (settled.dp.sharding_level,)
            if settled.dp.sharding_level and (settled.dp.replicate or settled.dp.shard) and self.mesh is not None:
                wanted["replicate"] = (settled.dp.split(self.mesh.dp)[0],)
        sequence = config.sequence_parallel or (settled.mp is not None and settled.mp.sequence_parallel)
        wanted["sequence_parallel"] = (int(sequence),)
        if settled.cp is not None:
            wanted["backend"] = (CP_BACKENDS.index(settled.cp.backend),)
            if settled.cp.ulysses is not None:
                wanted["ulysses"] = (settled.cp.ulysses,)
        if config.ep is not None:
            wanted["ep"] = (config.ep,)
        if config.recompute is not None:
            wanted["recompute"] = (recompute_code(parse_recompute(config.recompute).mode),)
        if config.compile is not None:
            wanted["compile"] = (int(config.compile),)
        return wanted

    def settings(self, mesh: MeshShape, chosen: Mapping[str, Any]) -> ParallelConfig:
        """The config of the engine: what the person gave, and the rest as `chosen`, by the names of `parallel_config`.

        Raises:
            ConfigError: they don't go together.
        """
        config = self.config
        mp = config.mp
        if mp in (None, "none"):
            mp = "seq_parallel" if config.sequence_parallel else "auto"
        pp = None
        if mesh.pp > 1 or "pp" in config.axes or config.pp is not None:
            pp = config.pp if config.pp is not None else chosen.get("pp") or PipelineParallel()
        cp = (config.cp if config.cp is not None else chosen.get("cp") or "gather") if mesh.cp > 1 else None
        settings = parallel_config(
            mesh,
            config.dp if config.dp is not None else chosen.get("dp", {"sharding_level": 0}),
            mp if mesh.mp > 1 else None,
            pp,
            cp,
            config.recompute if config.recompute is not None else chosen.get("recompute", "none"),
            compile=config.compile if config.compile is not None else chosen.get("compile", False),
            ep=config.ep if config.ep is not None else chosen.get("ep", 1),
        )
        if config.sequence_parallel and settings.mp is not None:
            settings.mp = dataclasses.replace(settings.mp, sequence_parallel=True)
        raise_all(config_errors(settings))
        return settings

    def none_fits(self, problem: str) -> ConfigError:
        """Nothing is left; `problem`: what the planner says of it."""
        where = f"device_num x node_num = {self.world}"
        if self.batch_size is not None:
            where += f" with batches of {self.batch_size}"
        problems = [f"no way to run on {self.world} devices is left", *self.problems]
        if self.left_out:
            ranks = f"{_or(self.left_out)} ranks along dp"
            problems.append(f"batches of {self.batch_size} can't be shared out among {ranks}")
        problems.append(problem)
        allowed = []
        if self.left_out and self.batch_size is not None:
            more = self.world * -(-self.batch_size // self.world)
            allowed.append(f"a loader with batch_size={more}")
            fewer = [size for size in range(1, self.world) if self.batch_size % size == 0]
            allowed.append(f"{_or(fewer)} device{'' if fewer == [1] else 's'}")
        allowed.append("other axes (config.axes)")
        return ConfigError(where, "\n    ".join(line for line in problems if line), "; ".join(allowed))


def _mesh_of(config: ToDistributedConfig, world: int) -> MeshShape | None:
    if config.mesh is None:
        return None
    mesh = parallel_config(config.mesh).mesh.resolve(world, f"config.mesh={config.mesh}")
    if mesh.size != world:
        raise ConfigError(
            f"config.mesh={mesh.name}",
            f"the mesh has {mesh.size} ranks, but device_num x node_num is {world}",
            f"a mesh of {world} ranks",
        )
    if mesh.order != DEFAULT_ORDER:
        raise ConfigError(f"config.mesh.order={','.join(mesh.order)}", "ranks are laid out in the usual order here",
                          ",".join(DEFAULT_ORDER))  # fmt: skip
    return mesh


def _batch_error(where: str, batch_size: int | None, dp: int) -> ConfigError:
    assert batch_size is not None
    return ConfigError(
        f"{where} with batches of {batch_size}",
        f"{dp} ranks along dp can't share out {batch_size} samples evenly, and the batch of all ranks stays what it is",
        f"a batch size that {dp} divides, or a dp that divides {batch_size}",
        f"DataLoader(..., batch_size={dp * -(-batch_size // dp)})",
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _or(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


# --- what it is chosen by ----------------------------------------------------------------------------------------


def _profile(
    model: nn.Module, example: ExampleBatch | None, device: torch.device, own_plan: Mapping[str, Any] | None
) -> tuple[ModelProfile | None, str]:
    """What the model costs; or None, and why that is not known.

    Raises:
        ConfigError: it does not run on the inputs that the person has named.
    """
    from autolaunch_strategies.planner.module_profile import profile_module

    try:
        inputs = None if example is None else example.with_samples(EXAMPLE_SAMPLES)
        # The length is named, too: made-up inputs have it where these don't serve.
        positions = None if example is None else example.positions
        profile = profile_module(model, positions, example=inputs, own_plan=own_plan, device_type=device.type)
        return profile, ""
    except Exception as error:  # a forward pass on shapes alone may fail in any way: the run itself need not
        if example is not None and example.origin == "config.input_spec" and isinstance(error, ConfigError):
            raise
        reason = str(error).strip() or type(error).__name__
        log.info("to_distributed: the model can't be profiled: %s", reason)
        return None, reason.splitlines()[0]


def _recipe(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> Recipe:
    parameters = list(model.parameters())
    count = max(1, sum(parameter.numel() for parameter in parameters))
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    trainable = max(1, sum(parameter.numel() for parameter in parameters if parameter.requires_grad))
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / count
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    first = next((parameter.dtype for parameter in parameters if parameter.is_floating_point()), torch.float32)
    return Recipe(
        batch_size=batch_size,
        compute=kinds.get(first, "fp32"),
        parameter_bytes=size,
        gathered_bytes=size,
        gradient_bytes=size,
        reduce_bytes=size,
        optimizer_bytes=size * _states(optimizer),
        trained=sum(parameter.numel() for parameter in trained if parameter.requires_grad) / trainable,
        mean_loss=False,
    )


def _states(optimizer: torch.optim.Optimizer) -> float:
    """How many tensors of a parameter's size an optimizer keeps for it (two where that is not known)."""
    options: Mapping[str, Any] = optimizer.defaults
    name = type(optimizer).__name__
    if name in ("SGD", "RMSprop"):
        squares = float(name == "RMSprop") + bool(options.get("centered"))
        return squares + (options.get("momentum", 0) != 0)
    known = {"Adagrad": 1, "ASGD": 1, "Muon": 1, "Adafactor": 0}
    return known.get(name, 2) + bool(options.get("amsgrad"))


def _hardware(cluster: Any, devices: int, nodes: int, device: torch.device) -> Hardware:
    """The machines that the config describes, or this one, with so many devices."""
    if cluster is None:
        cluster = _this_machine(devices, "cpu" if device.type == "cpu" else "gpu", f"device_num={devices}")
        if nodes > 1 and not cluster.get("inter"):
            cluster = {**cluster, "inter": cluster["intra"]}
    if isinstance(cluster, Mapping):
        return hardware_from({**cluster, "nodes": nodes, "devices_per_node": devices}, "config.hardware")
    if not isinstance(cluster, Hardware):
        raise ConfigError(
            "config.hardware", f"not what a machine is described by: {type(cluster).__name__}",
            "a planner.hardware.Hardware, or the keys of a file in conf/cluster",
        )  # fmt: skip
    return dataclasses.replace(cluster, nodes=nodes, devices_per_node=devices)


def _this_machine(devices: int, accelerator: str, where: str) -> Mapping[str, Any]:
    """The machine at hand, of a package that knows it: what was calibrated here, names of GPUs.

    Raises:
        ConfigError: no installed package has an entry point of the group `MACHINES`.
    """
    for known in importlib.metadata.entry_points(group=MACHINES):
        machine: Mapping[str, Any] = known.load()(devices, accelerator, where)
        return machine
    raise ConfigError(
        "config.hardware", "nothing is known of this machine: the package autolaunch is not installed",
        "a planner.hardware.Hardware, or the keys of a file in conf/cluster",
    )  # fmt: skip


def _by_plan(profile: ModelProfile, recipe: Recipe, hardware: Hardware, space: _Space, size: int | None) -> Choice:
    """The planner's choice.

    Raises:
        ConfigError: nothing that may be chosen can be run and fits.
    """
    from autolaunch_strategies.planner.choose import make_plan
    from autolaunch_strategies.planner.document import document
    from autolaunch_strategies.planner.plan import Plan

    plans: list[Plan] = []
    problems: list[str] = []
    for staged in (False, True):
        wanted = {**space.wanted(staged), "devices": (space.world,)}
        if not all(wanted.values()):
            continue
        try:
            plans.append(make_plan(profile, recipe, hardware, wanted))
        except ConfigError as error:
            problems.append(error.problem)
    if not plans:
        problem = "; ".join(problems)
        if space.mesh is not None:  # what was asked for is tried: the engine has the last word
            return _by_rule(space, size, problem)
        raise space.none_fits(problem)
    # Stages ask more of the training loop: they have to be faster for sure.
    plan = min(plans, key=lambda plan: plan.seconds * (1 + plan.noise if plan.chosen.pp > 1 else 1))
    account = document(plan)
    settings = space.settings(plan.chosen.mesh, _chosen(plan.chosen, profile))
    reasons = ["config.mesh says so"] if space.mesh is not None else []
    return Choice(settings, size, (*reasons, *account["chosen"]["reasons"], *plan.warnings, *space.problems), account)


def _by_rule(space: _Space, size: int | None, problem: str) -> Choice:
    """Where the planner has no choice to offer: the mesh that was asked for, or as many replicas as there may be."""
    meshes = space.meshes()
    if not meshes:
        raise space.none_fits(problem)
    mesh = max(meshes, key=lambda mesh: (mesh.dp, mesh.mp, mesh.cp))
    asked = "config.mesh says so" if space.mesh is not None else "as many replicas as the batch allows are taken"
    return Choice(space.settings(mesh, {}), size, (asked, problem, *space.problems))


def _chosen(candidate: Candidate, profile: ModelProfile) -> dict[str, Any]:
    """A candidate by the names of `parallel_config`, without its mesh."""
    c = candidate
    dp: dict[str, Any] = {"sharding_level": c.level}
    if c.level and c.replicate > 1:
        dp["replicate"] = c.replicate
    chosen: dict[str, Any] = {"dp": dp, "recompute": c.recompute_name, "compile": c.compile == 1, "ep": c.ep}
    if c.pp > 1:
        exact = c.pipeline_name == "exact"
        pp = {"name": c.pipeline_name, "microbatches": c.microbatches}
        pp |= {} if exact else {"loss": "microbatch", "schedule": c.pipeline_name, "virtual_stages": c.virtual_stages}
        pp |= {"split_spec": dict.fromkeys(cut_names(c, profile), "END")} if c.split else {}
        chosen["pp"] = pp
    if c.cp > 1:
        chosen["cp"] = {"backend": c.backend_name} | ({"ulysses": c.ulysses} if c.context_backend.is_mixed else {})
    return chosen
