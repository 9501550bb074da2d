"""What only shows in several keys at once, or on the machine: sizes that do not divide, absent devices and files.

Runs after `autolaunch.config.against_schema`, without torch and before any process is started.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autolaunch.config.arithmetic import check_matmul_precision, known_device
from autolaunch.config.classification import task_errors
from autolaunch.config.cluster import LOCAL
from autolaunch.config.command_line import typed_keys
from autolaunch.config.microbatches import batch_parts, check_batch_parts, with_batch_parts
from autolaunch.config.optimizer_groups import check_groups, check_library
from autolaunch.config.resume import COMPARING_TASKS, resolve_ckpt_path
from autolaunch.config.schema import IN_ONE_PROCESS, MISSING, Compare, Eval, Generate, LrFind, defaults_of, last_step
from autolaunch.config.sequence_parts import check_sequence_parts
from autolaunch.config.slurm import check_slurm, fitted_to_nodes
from autolaunch.data.present import check_data, test_data_error
from autolaunch.data.prompts import check_prompts, unknown_ids
from autolaunch.directories import CONF
from autolaunch.machine.devices import visible_devices
from autolaunch.machine.this_machine import memory_gib
from autolaunch.models.adapter_config import adapter_settings, check_llama
from autolaunch.models.facts import ModelFacts, begins_random, model_facts
from autolaunch.models.hf_tasks import task_of
from autolaunch.models.packed_attention import NOT_PACKED, may_pack, reason_of_config, refusal
from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.checkpoint.record import check_allowed
from autolaunch_strategies.config import (
    AXES,
    FLOAT8_RECIPES,
    SCHEDULES,
    ConfigError,
    ConfigErrors,
    MeshShape,
    as_typed,
    check_torchao,
    cp_backend,
    parallel_config,
    parse_mesh,
    parse_order,
    parse_recompute,
)
from autolaunch_strategies.config.experts import check_experts
from autolaunch_strategies.config.values import Where, typed, written
from autolaunch_strategies.plan.context import check_backends, read_context_plan
from autolaunch_strategies.plan.rules import read_plan
from autolaunch_strategies.schedules.schedule import default_virtual_stages

MOST_ON_CPU = 64
"""Ranks on the CPU of one machine beyond which a mesh is taken for one of GPUs: they would take all of its memory."""

SAMPLES = "autolaunch.tasks.samples.Samples"
"""What `callbacks=samples` is."""

BYTES_OF_A_RANK = 200 * 2**20
"""What a process has of its own when torch is imported and the ranks are joined, as measured; libraries are shared."""


def check(
    config: Mapping[str, Any], output_dir: Path, where: Where = typed, started_ranks: int | None = None
) -> tuple[MeshShape, list[ConfigError]]:
    """Check a validated config.

    Args:
        config: every key of the schema, resolved.
        output_dir: where the run will write; `ckpt_path=last` looks there.
        where: says where a value came from.
        started_ranks: how many ranks torchrun or srun has started; None if we start them.

    Returns:
        The mesh, with a size of -1 filled in, and every problem found.
    """
    errors: list[ConfigError] = []
    mesh: MeshShape | None = None
    with _collected(errors):
        mesh = _mesh(config, started_ranks)
    recompute: dict[str, Any] = {}
    with _collected(errors):
        parse_recompute(config["recompute"], config["recompute_save"], config["recompute_budget"])
        recompute = {key: config[key] for key in ("recompute", "recompute_save", "recompute_budget")}
    if mesh is not None:
        parallel = {axis: config[axis] for axis in AXES}
        keys = {key: config[key] for key in ("compile", "random_numbers", "ep")} | recompute
        if config["cluster"] is not None:
            # The planner has yet to choose the mesh, and keeps what was typed.
            keys["ep"] = 1
            parallel["dp"] = _for_any_mesh(config["dp"])
        errors += config_errors(parallel_config(mesh, **parallel, **keys), known_device(config))
        if config["task"] != "generate":  # which reads no data
            errors += check_batch_parts(config, _sharing_ranks(config, mesh), mesh.pp, where)
    errors += _float8(config)
    errors += check_matmul_precision(config, where)
    errors += _plans(config, mesh)
    errors += _time_limit(config, where)
    errors += _schedule(config, where)
    errors += _accumulation(config, mesh, where)
    errors += _labels(config, where)
    errors += task_errors(config, where)
    errors += _packed_attention(config, mesh, where)
    errors += _streaming(config, where)
    if config["task"] == "test" and (error := test_data_error(config["data"])):
        errors.append(error)
    with _collected(errors):
        _checkpoint(config, output_dir)
    errors += _own_objects(config)
    errors += _name(config, where)
    errors += check_groups(config, where)
    errors += check_library(config, mesh)
    errors += _generation(config, where)
    errors += _evaluation(config, where)
    errors += _adapter(config, mesh)
    errors += _restarts(config, mesh, where, started_ranks)
    errors += _planning(config, where)
    errors += _search(config, where)
    errors += _lr_find(config, where)
    errors += _unused(config, "compare", Compare, "", where)
    errors += check_slurm(config, output_dir, where, started_ranks)
    if config["module"] is None:
        facts: ModelFacts | None = None
        with _collected(errors):
            facts = model_facts(config["model"])
        if mesh is not None:
            errors += _divisibility(config, mesh, facts, where)
        if facts is not None:
            errors += _prompt_ids(config, facts.vocab_size)
        settled = config if mesh is None else with_batch_parts(config, mesh.pp)
        if config["task"] != "generate":
            errors += check_data(settled["data"], 1 if mesh is None else _sharing_ranks(config, mesh), facts)
    return mesh or MeshShape(), errors


def _for_any_mesh(dp: Mapping[str, Any]) -> Mapping[str, Any]:
    """The node dp without the numbers of replicas and shards, which depend on the mesh; level 0 never has them."""
    return dp if dp["sharding_level"] == 0 else {**dp, "replicate": None, "shard": None}


def _sharing_ranks(config: Mapping[str, Any], mesh: MeshShape) -> int:
    """The ranks of dp that share a batch: of a mesh that can't fill a cluster, the planner says that instead."""
    cluster = config["cluster"]
    fills = cluster is None or cluster["nodes"] * cluster["devices_per_node"] % mesh.size == 0
    return mesh.dp if fills else 1


@contextmanager
def _collected(errors: list[ConfigError]) -> Iterator[None]:
    """Add what is raised within to the errors."""
    try:
        yield
    except ConfigErrors as several:
        errors += several.errors
    except ConfigError as error:
        errors.append(error)


def _mesh(config: Mapping[str, Any], started_ranks: int | None) -> MeshShape:
    values = config["mesh"]
    # By the rules of a typed mesh, so that `mesh.dp=0` is refused like `mesh=0`.
    typed_sizes = MeshShape(**{axis: values[axis] for axis in AXES}).name
    return _fitted(parse_mesh(typed_sizes, parse_order(values["order"])), config, started_ranks)


def _fitted(shape: MeshShape, config: Mapping[str, Any], started_ranks: int | None) -> MeshShape:
    """The mesh on the devices that there are, or on the ranks that were started."""
    name = f"mesh={shape.name}"
    if started_ranks is not None:
        shape = shape.resolve(started_ranks, name)
        if shape.size != started_ranks:
            raise ConfigError(
                name,
                f"{_count(shape.size, 'rank')}, but {started_ranks} were started",
                f"a mesh of {_count(started_ranks, 'rank')}; -1 for an axis that takes what is left",
                f"mesh={_with_ranks(shape, started_ranks)}",
            )
        return shape
    if config["launch"]["name"] == "slurm" and config["cluster"] is None:
        return fitted_to_nodes(shape, config)
    if config["task"] in IN_ONE_PROCESS and -1 not in shape.sizes.values():
        return shape
    devices, source = _devices(config)
    if -1 in shape.sizes.values() and devices is None:
        raise ConfigError(
            name,
            "-1 takes what is left of the devices, but any number of ranks can share a CPU",
            "a size, or launch.devices beside it",
            f"{name} launch.devices=2",
        )
    if devices is None:
        if shape.size > MOST_ON_CPU:
            raise ConfigError(
                name,
                f"{shape.size:,} processes, and this machine has no GPU to give each of them",
                f"up to {MOST_ON_CPU} ranks; more of them if launch.devices says so",
                f"{name} launch.devices={shape.size}",
            )
        if config["launch"]["name"] == "local" and config["task"] not in IN_ONE_PROCESS:
            _check_memory(shape, name)
        return shape
    shape = shape.resolve(devices, name)
    if shape.size > devices:
        raise ConfigError(
            name,
            f"{_count(shape.size, 'rank')}, but {source}",
            f"a mesh of up to {_count(devices, 'rank')}" if devices else "the CPU, or a machine with GPUs",
            f"mesh={_with_ranks(shape, devices)}" if devices else "trainer.accelerator=cpu",
        )
    return shape


def launcher_beside_cluster(config: Mapping[str, Any], typed: Sequence[str], where: Where) -> Iterator[ConfigError]:
    """A launcher with other devices than the cluster that is planned for, and that is not this machine.

    A plan alone starts nothing, and a file that it is made with may say how something else is started: of its launcher
    counts what was typed.
    """
    cluster, launch, keys = config["cluster"], config["launch"], typed_keys(typed)
    if cluster is None or cluster["name"] == LOCAL:
        return
    nodes, each = cluster["nodes"], cluster["devices_per_node"]
    beside = f"with cluster={cluster['name']}x{nodes * each}"
    starts = config["task"] != "plan"
    if launch["name"] == "slurm":
        if (asked := launch["nodes"]) != nodes and (starts or "launch.nodes" in keys):
            yield ConfigError(
                f"{where('launch.nodes', asked)} {beside}",
                f"the job has {_count(asked, 'node')}, and the cluster {nodes} of {_count(each, 'device')}",
                f"launch.nodes={nodes}, or a cluster of {_count(asked, 'node')}",
                f"launch.nodes={nodes}",
            )
        gpus = launch["gpus_per_node"]
        if gpus and gpus < each and (starts or "launch.gpus_per_node" in keys):
            yield ConfigError(
                f"{where('launch.gpus_per_node', gpus)} {beside}",
                f"each node of the cluster has {each}",
                f"{each} or more, or null",
                f"launch.gpus_per_node={each}",
            )
    elif "launch.devices" in keys and (devices := launch["devices"]) not in (None, nodes * each):
        is_ours = (CONF / "cluster" / f"{cluster['name']}.yaml").is_file()
        sized = f"cluster={cluster['name']}x{devices}" if is_ours and devices <= each else ""  # a part of a node
        yield ConfigError(
            f"{where('launch.devices', devices)} {beside}",
            "two numbers of devices: it is the cluster that is planned for",
            f"{sized} alone, or launch.devices=null" if sized else "launch.devices=null",
            sized or "launch.devices=null",
        )


def _check_memory(shape: MeshShape, name: str) -> None:
    """Refuse more processes than a machine has memory for, whatever they train."""
    most = int(memory_gib() * 2**30 // BYTES_OF_A_RANK)
    if shape.size > max(most, 1):
        raise ConfigError(
            name,
            f"{shape.size} processes take {shape.size * BYTES_OF_A_RANK / 2**30:.1f} GiB before they have a model, and "
            f"this machine has {memory_gib():.1f} GiB",
            f"up to {_count(most, 'rank')}; more of them if launch.devices says so",
            f"mesh={_with_ranks(shape, most)}",
        )


def _devices(config: Mapping[str, Any]) -> tuple[int | None, str]:
    """(how many ranks can have a device of their own, who says so); None where there is no limit."""
    is_elsewhere = config["task"] == "plan" or config["launch"]["name"] == "slurm"
    if (cluster := config["cluster"]) is not None and is_elsewhere:
        count = cluster["nodes"] * cluster["devices_per_node"]
        return count, f"cluster={cluster['name']} has {count}"
    kind, count = visible_devices(config["trainer"]["accelerator"])
    machine = f"this machine shows {_count(count, kind.upper())}" if count is not None else ""
    wanted = config["launch"]["devices"]
    if wanted is None:
        return count, machine
    if count is not None and wanted > count:
        raise ConfigError(f"launch.devices={wanted}", machine, f"1 to {count}" if count else "", "launch.devices=null")
    return wanted, f"launch.devices={wanted}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _with_ranks(shape: MeshShape, ranks: int) -> str:
    """The mesh with dp changed so that it has so many ranks, or plain dp if the other axes do not divide them."""
    rest = shape.size // shape.dp
    return (replace(shape, dp=ranks // rest) if ranks % rest == 0 else MeshShape(dp=ranks)).name


def _divisibility(
    config: Mapping[str, Any], mesh: MeshShape, facts: ModelFacts | None, where: Where
) -> Iterator[ConfigError]:
    yield from check_sequence_parts(config, mesh, facts, where)
    if facts is None:
        return
    heads = facts.num_heads
    # Only heads: every other size may be cut unevenly, and a plan of one's own may leave attention whole.
    if heads is not None and heads % mesh.mp and config["mp"] is not None and config["mp"]["base"] != "none":
        fitting = ", ".join(map(str, _sizes_of_mp(config, facts)))
        yield ConfigError(
            f"mesh={mesh.name} with model={facts.name}",
            f"{heads} attention heads cannot be shared evenly by {mesh.mp} ranks of mp",
            f"mp of size {fitting}, or a plan of your own that leaves attention whole, with mp.base=none",
        )
    yield from _layers(config["pp"], mesh, facts)
    if config["ep"] > 1 and facts.num_experts is not None:
        cluster = config["cluster"]
        ranks = mesh.dp * mesh.cp * mesh.mp if cluster is None else cluster["nodes"] * cluster["devices_per_node"]
        try:
            check_experts(config["ep"], facts.num_experts, f"model={facts.name}", ranks)
        except ConfigError as error:
            yield error


def _sizes_of_mp(config: Mapping[str, Any], facts: ModelFacts) -> list[int]:
    """Sizes of mp that share the heads evenly; for a cluster those that its planner weighs."""
    fitting = [size for size in range(1, (facts.num_heads or 1) + 1) if (facts.num_heads or 1) % size == 0]
    if config["cluster"] is None or config["task"] != "plan":
        return fitting
    devices = config["cluster"]["nodes"] * config["cluster"]["devices_per_node"]
    shared = [number for number in (facts.num_kv_heads, facts.intermediate_size, devices) if number]
    return [size for size in fitting if all(number % size == 0 for number in shared)]


def _layers(pp: Mapping[str, Any] | None, mesh: MeshShape, facts: ModelFacts) -> Iterator[ConfigError]:
    """Fewer blocks than pipeline stages, where the cuts are between blocks; in a file are its own stages."""
    if mesh.pp == 1 or facts.num_layers is None or pp is None or pp["split_spec"] is not None:
        return
    per_rank = pp["virtual_stages"]
    if per_rank is None:
        per_rank = default_virtual_stages(pp["schedule"]) if pp["schedule"] in SCHEDULES else 1
    if facts.num_layers >= mesh.pp * per_rank:
        return
    stages = f"{mesh.pp} pipeline stages" if per_rank == 1 else f"{mesh.pp} x {per_rank} pipeline stages"
    fitting = facts.num_layers // per_rank
    fills = facts.num_layers >= mesh.pp
    single = "a schedule with one stage per rank" if fills else f"pp of size {facts.num_layers} with one stage per rank"
    allowed = [single] if per_rank > 1 else []
    allowed += [f"pp of size {fitting} or less"] if fitting > 1 else []
    yield ConfigError(
        f"mesh={mesh.name} with model={facts.name}" + (f" and pp={pp['name']}" if per_rank > 1 else ""),
        f"{facts.num_layers} layers cannot fill {stages}",
        ", or ".join([*allowed, "more layers"]),
        "pp=1f1b" if fills and pp["virtual_stages"] is None else "",
    )


def _float8(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Float8 without the library for it, or where no large matrix is trained."""
    precision = config["precision"]
    if precision not in FLOAT8_RECIPES:
        return
    if config["task"] != "plan" or config["cluster"] is None:  # then nothing is multiplied here
        try:
            check_torchao()
        except ConfigError as error:
            yield error
    if (adapter := config["adapter"]) is not None:
        yield ConfigError(
            f"precision={precision} with adapter={adapter['name']}",
            "the large matrices are frozen, and float8 gains nothing with the small ones that are trained beside them",
            "precision=bf16-mixed, or adapter=none",
            "precision=bf16-mixed",
        )


def _plans(config: Mapping[str, Any], mesh: MeshShape | None) -> Iterator[ConfigError]:
    """Every rule of every plan in the config, used or not: each is read by itself, so that all are told."""
    plans = {"mp.plan": (config["mp"] or {}).get("plan"), "cp.plan": (config["cp"] or {}).get("plan")}
    shards_sequences = mesh is not None and mesh.cp > 1 and config["cp"] is not None
    backend = cp_backend(config["cp"]["backend"]) if shards_sequences else None
    own = config["model"].get("mp_plans") if config["module"] is None else None
    if own is not None and not isinstance(own, Mapping):
        plans["model.mp_plans"] = own
    for name, plan in (own if isinstance(own, Mapping) else {}).items():
        key = f"model.mp_plans.{name}"
        if name not in ("tensor_parallel", "seq_parallel"):
            yield ConfigError(key, "no such plan", "tensor_parallel, seq_parallel")
        plans[key] = plan
    for key, plan in plans.items():
        rules = [{pattern: styles} for pattern, styles in plan.items()] if isinstance(plan, Mapping) else [plan]
        for rule in rules:
            if dotted := _dotted(rule):
                yield ConfigError(
                    f"{key}.{dotted}",
                    "dots in a key of the command line make groups of keys, not a name of a module",
                    "rules in braces",
                    f"'+{key}={{{dotted}: ...}}'",
                )
                continue
            try:
                read = read_context_plan(rule, backend, key) if key == "cp.plan" else read_plan(rule, key)
                if backend is not None:
                    check_backends(read, backend)
            except ConfigError as error:
                yield error
                continue
            for style in (style for item in read for style in item.styles if "." in style.name):
                yield from _absent_module(f"{key}: {read[0].pattern}", {"_target_": style.name})


def _dotted(rule: Any) -> str:
    """The pattern that `+mp.plan.model.lm_head=...` was meant to be, of what it became: groups in groups."""
    if not isinstance(rule, Mapping) or len(rule) != 1:
        return ""
    (name, value), *_ = rule.items()
    if not isinstance(value, Mapping) or len(value) != 1 or not str(next(iter(value))).islower() or "_target_" in value:
        return ""
    return f"{name}.{_dotted(value) or next(iter(value))}"


def _schedule(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    if config["module"] is not None or config["task"] not in ("fit", "plan", "compare", "dryrun"):
        return
    scheduler, max_steps = config["scheduler"], config["trainer"]["max_steps"]
    decays = scheduler["name"] != "constant"
    total = scheduler["total_steps"] or (max_steps if max_steps > 0 else None)
    counts = config["trainer"]["max_epochs"] not in (None, -1) and not config["data"].get("streaming")
    if decays and total is None and max_steps == -1 and not counts:
        ends = next(
            (key for key in ("max_epochs", "max_time") if config["trainer"][key] not in (None, -1)), "max_steps"
        )
        yield ConfigError(
            f"{where(f'trainer.{ends}', config['trainer'][ends])} with scheduler={scheduler['name']}",
            "without a last step the rate has no step at which its decay ends",
            "a scheduler.total_steps, a trainer.max_steps, or scheduler=constant",
            "scheduler.total_steps=10000",
        )
    if decays and total is not None and scheduler["warmup_steps"] > total:
        yield ConfigError(
            where("scheduler.warmup_steps", scheduler["warmup_steps"]),
            f"the warm-up is longer than the {total} steps of the schedule",
            f"0 to {total}",
            f"scheduler.warmup_steps={total // 10}",
        )
    trainer = config["trainer"]
    if max_steps == -1 and trainer["max_epochs"] in (None, -1) and trainer["max_time"] is None:
        yield ConfigError(
            where("trainer.max_steps", max_steps),
            "the training would never end",
            "a limit in trainer.max_steps, trainer.max_epochs or trainer.max_time",
            "trainer.max_epochs=1",
        )


def _time_limit(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """A time that lightning's Timer does not read."""
    limit = config["trainer"]["max_time"]
    if limit is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", limit.strip()):
        yield ConfigError(
            where("trainer.max_time", limit), "is no time", "days:hours:minutes:seconds", "trainer.max_time=00:01:30:00"
        )


def _accumulation(config: Mapping[str, Any], mesh: MeshShape | None, where: Where) -> Iterator[ConfigError]:
    """Batches to accumulate that are not the parts into which this project's data cut the batch of a step."""
    asked, data = config["trainer"]["accumulate_grad_batches"], config["data"]
    if asked is None or "_target_" in data or mesh is None:
        return
    accumulated, _ = batch_parts(config, mesh.pp)
    if asked != accumulated:
        pipelined = mesh.pp > 1 and config["pp"] is not None
        yield ConfigError(
            where("trainer.accumulate_grad_batches", asked),
            f"data={data['name']} gives the batch of an optimizer step in {accumulated} part"
            f"{'' if accumulated == 1 else 's'}; accumulating {asked} would train on another data.batch_size",
            "data.microbatches, the parts of data.batch_size; trainer.accumulate_grad_batches is for a data module of "
            "your own",
            f"data.microbatches={asked}"
            + (" pp.microbatches=" + str(config["pp"]["microbatches"] or mesh.pp) if pipelined else ""),
        )


def _streaming(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """Parts of an epoch whose length nobody knows, and a training that ends with one that never does."""
    data, trainer = config["data"], config["trainer"]
    if "_target_" in data or not data.get("streaming"):
        return
    for key in ("val_check_interval", "limit_train_batches"):
        if isinstance(trainer[key], float) and trainer[key] != 1.0:
            reason = "with data.streaming the length of an epoch is not known"
            yield ConfigError(where(f"trainer.{key}", trainer[key]), reason, "batches", f"trainer.{key}=1000")
    if trainer["overfit_batches"]:
        reason = "with data.streaming the data are not read again and again"
        write = "data.streaming=false"
        yield ConfigError(where("trainer.overfit_batches", trainer["overfit_batches"]), reason, write, write)
    entries = data["path"] if isinstance(data["path"], list | tuple) else [data["path"]]
    is_endless = any(isinstance(entry, Mapping) and entry.get("weight") is not None for entry in entries)
    if is_endless and last_step(trainer) == -1 and trainer["max_time"] is None:
        yield ConfigError(
            where("trainer.max_epochs", trainer["max_epochs"]),
            "with data.streaming and weights an epoch never ends: each source begins anew by itself",
            "trainer.max_steps, trainer.max_time",
            "trainer.max_steps=1000",
        )


def _labels(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """Positions of labels where nobody asks for them: a module or a model of one's own."""
    labels = config["data"].get("labels")
    if labels is None or "_target_" not in config["data"]:
        return
    for key, has_target in (("module", config["module"] is not None), ("model", "_target_" in config["model"])):
        if has_target:
            yield ConfigError(
                where("data.labels", labels),
                f"has no effect: with {key}._target_ the loss is that of your own code, on the labels as they are",
                "model=llama, model=hf",
                "data.labels=null",
            )
            return


def _packed_attention(config: Mapping[str, Any], mesh: MeshShape | None, where: Where) -> Iterator[ConfigError]:
    """A kernel for packed documents that can't be, or where there are none."""
    wanted = config["model"].get("packed_attention", "auto")
    if wanted == "auto" or config["module"] is not None or "_target_" in config["model"]:
        return
    key = where("model.packed_attention", wanted)
    if not may_pack(config):
        yield ConfigError(key, f"has no effect: {NOT_PACKED}", "auto", "model.packed_attention=auto")
    elif wanted == "varlen" and (reason := reason_of_config(config, mesh.cp if mesh else 1)) is not None:
        yield refusal(reason, key)


def _checkpoint(config: Mapping[str, Any], output_dir: Path) -> None:
    if config["ckpt_path"] is None and config["task"] == "export":
        raise ConfigError(
            "autolaunch export",
            "which checkpoint is to be exported is not said",
            "the path of a checkpoint, or `last` with the output_dir of the run",
            "autolaunch export ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
        )
    if config["checkpoint"]["keep_last"] == 0:
        raise ConfigError(
            "checkpoint.keep_last=0",
            "a checkpoint that is not kept can't be gone on from",
            "a number from 1, or -1 for all; checkpoint.enabled=false writes none",
            "checkpoint.keep_last=1",
        )
    allowed = config["resume"]["allow"]
    named = f"resume.allow={written(allowed)}"
    check_allowed(allowed, named, "resume.allow=[{}]")
    if allowed and (config["ckpt_path"] is None or config["task"] not in COMPARING_TASKS):
        raise ConfigError(
            named,
            "there is no checkpoint to go on from"
            if config["ckpt_path"] is None
            else f"{config['task']} takes the weights of any run: nothing is compared",
            "with fit and ckpt_path",
            "ckpt_path=last" if config["ckpt_path"] is None else "resume.allow=[]",
        )
    if config["checkpoint"]["data_position"] != "required" and "_target_" not in config["data"]:
        raise ConfigError(
            f"checkpoint.data_position={config['checkpoint']['data_position']}",
            "has no effect: the place in these data is always found again",
            "checkpoint.data_position=required; the others are for a data module of your own (data=custom)",
            "checkpoint.data_position=required",
        )
    resolve_ckpt_path(config, output_dir)


def _adapter(config: Mapping[str, Any], mesh: MeshShape | None) -> Iterator[ConfigError]:
    """An adapter where there is no model to put it into, or none of its names is in it; and what it leaves to train."""
    adapter, model, merged = config["adapter"], config["model"], config["export_merged"]
    if merged and config["task"] != "export":
        yield ConfigError(
            "export_merged=true",
            f"has no effect: {config['task']} exports nothing",
            "autolaunch export",
            "export_merged=false",
        )
    if config["module"] is not None:
        typed_here = {
            f"adapter={adapter['name']}" if adapter is not None else "": "adapter=none",
            "model.trainable" if model.get("trainable") else "": "model.trainable=null",
        }
        for key, write in typed_here.items():
            if key:
                yield ConfigError(
                    key,
                    "module is a LightningModule of your own: which parameters it trains is its own affair",
                    "adapters and requires_grad in its constructor (PEFT's work on every mesh)",
                    write,
                )
        return
    trainable = model.get("trainable")
    if trainable is not None and not trainable:
        yield ConfigError(
            "model.trainable=[]",
            "nothing would be trained",
            "patterns over names of parameters or modules; null for all",
            "model.trainable=null",
        )
    if adapter is None:
        return
    if trainable:
        yield ConfigError(
            f"model.trainable={written(trainable)} with adapter={adapter['name']}",
            "an adapter trains its own parameters and freezes all others",
            "adapter.modules_to_save for modules that are trained whole beside it",
            "model.trainable=null",
        )
    try:
        settings = adapter_settings(adapter)
        if "_target_" not in model and model["name"] == "llama":
            check_llama(settings)
        if settings.quant_type is not None:
            yield from _four_bits(config, mesh)
    except ConfigError as error:
        yield error


def _four_bits(config: Mapping[str, Any], mesh: MeshShape | None) -> Iterator[ConfigError]:
    """What weights of four bits, which are packed into numbers of another type, can't be joined with."""
    if mesh is not None and mesh.mp > 1:
        yield ConfigError(
            f"adapter=qlora with mesh={mesh.name}",
            "packed weights of four bits can't be cut along mp",
            "dp (level 3 shards them), pp and cp; or adapter=lora",
            f"mesh={replace(mesh, dp=mesh.dp * mesh.mp, mp=1).name}",
        )
    if (dtype := config["dp"] and config["dp"]["param_dtype"]) is not None:
        yield ConfigError(
            f"adapter=qlora with dp.param_dtype={dtype}",
            "a conversion of numbers would change the bits of packed weights",
            "precision, in which the rest of the model computes",
            "dp.param_dtype=null precision=bf16-true",
        )


def _generation(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """Prompts that are none, and keys of `generate` where nothing is generated."""
    yield from _unused(config, "generate", Generate, "callbacks=samples generates at each validation", where)
    if config["task"] != "generate":
        return
    keys = config["generate"]
    if config["module"] is not None or "_target_" in config["model"]:
        yield ConfigError(
            "autolaunch generate",
            "nothing is known of how a class of your own goes on with a text",
            "model=llama, model=hf",
        )
    elif (of := task_of(config["model"])) not in (None, "causal_lm"):
        yield ConfigError(
            f"autolaunch generate with model.task={of}",
            "such a model does not go on with a text",
            "model.task=causal_lm",
        )
    elif begins_random(config):
        yield ConfigError(
            "autolaunch generate",
            "no trained weights are named, and random ones have nothing to say",
            "ckpt_path: a checkpoint, a run, or last; model=hf with model.path",
            "ckpt_path=last",
        )
    try:
        check_prompts(keys["prompts"], "generate.prompts")
    except ConfigError as error:
        yield error


def _prompt_ids(config: Mapping[str, Any], vocab_size: int | None) -> Iterator[ConfigError]:
    """Prompts of token ids that the model does not know."""
    if config["task"] == "generate":
        yield from unknown_ids(config["generate"]["prompts"], vocab_size, "generate.prompts")
    for name, node in (config["callbacks"] or {}).items():
        if isinstance(node, Mapping) and node.get("_target_") == SAMPLES:
            yield from unknown_ids(node.get("prompts"), vocab_size, f"callbacks.{name}.prompts")


def _unused(config: Mapping[str, Any], task: str, schema: type, instead: str, where: Where) -> Iterator[ConfigError]:
    """Keys of a task where another one is run."""
    if config["task"] == task:
        return
    for name, default in defaults_of(schema).items():
        if (value := config[task][name]) != default:
            allowed = f"the line without it; autolaunch {task}" + (f"; {instead}" if instead else "")
            yield ConfigError(where(f"{task}.{name}", value), f"has no effect with {config['task']}", allowed)


def _evaluation(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """What lm-evaluation-harness needs: itself, tasks, and one model."""
    yield from _unused(config, "eval", Eval, "", where)
    if config["task"] != "eval":
        return
    keys = config["eval"]
    if not keys["tasks"]:
        yield ConfigError("eval.tasks", "which tasks is not said", "names of tasks", "eval.tasks=[hellaswag]")
    if (keys["path"] is None) == (config["ckpt_path"] is None):
        yield ConfigError(
            "autolaunch eval",
            "which model is not said" if keys["path"] is None else "eval.path and ckpt_path are two models",
            "the path of a checkpoint, which is exported first, or eval.path, an exported model",
            "autolaunch eval ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
        )
    elif keys["path"] is not None and not (Path(keys["path"]).expanduser() / "config.json").is_file():
        yield ConfigError(f"eval.path={keys['path']}", "no model: there is no config.json", "a directory of `export`")
    if importlib.util.find_spec("lm_eval") is None:
        yield ConfigError("autolaunch eval", "lm_eval is not installed", write="pip install 'autolaunch[eval]'")


def _planning(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """Keys of the planner where nothing is planned."""
    cluster, task = config["cluster"], config["task"]
    with_cluster = "cluster=local" if task == "plan" else "autolaunch plan ... cluster=local"  # added to the line
    if config["why"] is not None and (cluster is None or task != "plan"):
        yield ConfigError(
            where("why", config["why"]),
            "there is no choice to ask about",
            "`plan` with a cluster",
            f"{with_cluster} --why {shlex.quote(config['why'])}",
        )
    if config["rank"] and task != "dryrun":
        yield ConfigError(
            where("rank", config["rank"]),
            f"has no effect with {task}",
            "autolaunch dryrun",
            f"autolaunch dryrun ... 'rank={written(config['rank'])}'",
        )
    if config["full"] and (cluster is None or task != "plan"):
        yield ConfigError(
            where("full", True),
            "has no effect: only the planner's choice has a short account and a full one",
            "`plan` with a cluster",
            f"{with_cluster} --full",
        )


def _lr_find(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """Keys of lr_find for other tasks, rates that do not grow, and weights that are no beginning."""
    yield from _unused(config, "lr_find", LrFind, "", where)
    keys = config["lr_find"]
    if config["task"] != "lr_find":
        return
    if keys["min"] >= keys["max"]:
        yield ConfigError(
            where("lr_find.max", keys["max"]), f"the rates grow from lr_find.min={keys['min']:g}", "a larger rate"
        )
    if config["ckpt_path"] is not None:
        yield ConfigError(
            where("ckpt_path", config["ckpt_path"]),
            "the rates are tried on the weights with which a training begins",
            "model.path for weights that were exported",
            "ckpt_path=null",
        )


def _search(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """What jobs are compared by where they are compared by their speed."""
    search = config["search"]
    if search is None or search["name"] != "auto":
        return
    for key, default in (("objective", None), ("direction", "minimize")):
        if search[key] != default:
            yield ConfigError(
                where(f"search.{key}", search[key]),
                "has no effect: search=auto looks for the fastest run",
                "search=optuna, which compares any number that is logged",
                f"search.{key}={written(default)}",
            )
    cluster = config["cluster"]
    if cluster is not None and cluster["nodes"] > 1:
        name, devices = cluster["name"], cluster["devices_per_node"]
        yield ConfigError(
            f"search=auto with cluster={name}x{cluster['nodes'] * devices}",
            f"a search measures on the devices of one machine, and these are {cluster['nodes']}",
            "a cluster of one node; autolaunch plan for all of them",
            f"cluster={name}x{devices}",
        )


def _restarts(
    config: Mapping[str, Any], mesh: MeshShape | None, where: Where, started_ranks: int | None
) -> Iterator[ConfigError]:
    """Restarts where nobody here could start anything again, and fewer ranks than all where they can't come to it."""
    if config["launch"]["name"] != "local":
        return
    restarts, least = config["launch"]["max_restarts"], config["launch"]["min_devices"]
    if restarts and started_ranks is not None:
        yield ConfigError(
            where("launch.max_restarts", restarts),
            "ranks that torchrun or srun has started can be started again by these alone",
            "torchrun --max-restarts, sbatch --requeue; both with one output_dir, and ckpt_path=last to go on",
            f"torchrun --max-restarts={restarts} ... -m autolaunch ... output_dir=outputs/one ckpt_path=last",
        )
    elif restarts and config["search"] is not None:
        yield ConfigError(
            where("launch.max_restarts", restarts),
            "a trial that fails is an answer, and is not started again",
            "restarts of single runs and of the jobs of other sweeps",
            "launch.max_restarts=0",
        )
    if least is None:
        return
    if not restarts:
        yield ConfigError(
            where("launch.min_devices", least),
            "only a restart can go on with fewer ranks",
            "launch.max_restarts beside it",
            f"launch.max_restarts=3 launch.min_devices={least}",
        )
    if mesh is not None and config["cluster"] is None and least > mesh.size:
        yield ConfigError(
            where("launch.min_devices", least),
            f"mesh={mesh.name} has {_count(mesh.size, 'rank')} before anything fails",
            f"1 to {mesh.size}",
            f"launch.min_devices={mesh.size}",
        )


def _own_objects(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Callbacks, loggers, the module, the optimizer: each a mapping that says what it is by `_target_`."""
    for key in ("model", "data", "optimizer"):
        yield from _absent_module(key, config[key])
    nodes = {f"callbacks.{name}": node for name, node in (config["callbacks"] or {}).items()}
    nodes |= {f"logger.{name}": node for name, node in (config["logger"] or {}).items()}
    if config["module"] is not None:
        nodes["module"] = config["module"]
    for key, node in nodes.items():
        if node is None:
            continue  # `callbacks.x=null` switches one off
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            chosen = _choosing_option(key, config)
            yield ConfigError(
                f"{key}={written(node)}",
                "does not say what it is",
                f"{chosen} beside it" if chosen else "a mapping with _target_, the import path of a class",
                chosen or f"{key}._target_=package.Class",
            )
            continue
        yield from _absent_module(key, node)
        if key.startswith("logger.") and node.get("log_model") and _takes_files_alone(node["_target_"]):
            wandb = node["_target_"].endswith("WandbLogger")
            yield ConfigError(
                f"{key}.log_model={written(node['log_model'])}",
                f"has no effect: {node['_target_']} takes checkpoints for single files, and these are directories",
                "logger=wandb, which has a class of its own" if wandb else "log_model=false",
                f"{key}._target_=autolaunch.report.wandb_logger.WandbLogger" if wandb else f"{key}.log_model=false",
            )
        for name, value in node.items():
            if value == MISSING:
                yield ConfigError(f"{key}.{name}", "must be given", write=f"{key}.{name}=...")
        if key.startswith("logger.") and (extra := _absent_logger_package(node["_target_"])):
            yield ConfigError(
                f"{key}._target_={node['_target_']}",
                f"the package {extra[0]} is not installed",
                write=f"pip install 'autolaunch[{extra[1]}]'",
            )
    optimizer = config["optimizer"]
    if optimizer["name"] == "custom" and optimizer["_target_"] is None:
        yield ConfigError(
            "optimizer.name=custom",
            "does not say which optimizer",
            "the import path of a torch.optim.Optimizer class",
            "optimizer=custom optimizer._target_=torch.optim.RMSprop",
        )
    elif optimizer["name"] != "custom" and optimizer["_target_"] is not None:
        yield ConfigError(
            f"optimizer._target_={optimizer['_target_']}",
            f"optimizer={optimizer['name']} is a class of its own",
            "optimizer=custom with optimizer._target_",
            f"optimizer=custom optimizer._target_={optimizer['_target_']}",
        )


def _choosing_option(key: str, config: Mapping[str, Any]) -> str:
    """What chooses `callbacks.ema`, of which only keys were typed, beside the others; empty if it is no option."""
    group, _, name = key.partition(".")
    if not name or not (CONF / group / f"{name}.yaml").is_file():
        return ""
    others = [other for other, node in config[group].items() if isinstance(node, Mapping) and "_target_" in node]
    return shlex.quote(f"{group}=[{','.join([*others, name])}]") if others else f"{group}={name}"


def _name(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    """A name that is no name of a directory: what is written would stand beside `outputs/` or among other names."""
    name = config["name"]
    if name.strip() and name not in (".", "..") and "/" not in name and "\0" not in name:
        return
    last = name.strip().rstrip("/").rpartition("/")[2]
    yield ConfigError(
        where("name", name),
        "not the name of a directory in outputs/",
        "a name without /; output_dir says where else a run writes",
        as_typed("name", last if last.strip(".") else "my_run"),
    )


def _absent_module(key: str, node: Mapping[str, Any]) -> Iterator[ConfigError]:
    """A `_target_` whose package cannot be found; looked for without importing anything."""
    target = node.get("_target_")
    if not isinstance(target, str):
        return
    package, _, name = target.partition(".")
    if not name or not all(part.isidentifier() for part in target.split(".")):
        yield ConfigError(f"{key}._target_={target}", "not an import path", "module.Name, e.g. my_models.Net")
    elif importlib.util.find_spec(package) is None:
        yield ConfigError(
            f"{key}._target_={target}",
            f"no module {package} can be imported from here",
            f"an installed package, or {package}.py in the working directory",
        )


_LOGGER_PACKAGES = {
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), "tensorboard"),
    "WandbLogger": (("wandb",), "wandb"),
    "MLFlowLogger": (("mlflow",), "mlflow"),
}


def _takes_files_alone(target: str) -> bool:
    return target.startswith(("lightning.", "pytorch_lightning.")) and target.endswith(("WandbLogger", "MLFlowLogger"))


def _absent_logger_package(target: str) -> tuple[str, str] | None:
    """(package, extra of ours) that a logger of Lightning needs and that is not installed."""
    module, _, name = target.rpartition(".")
    if not module.startswith(("lightning", "autolaunch")) or name not in _LOGGER_PACKAGES:
        return None
    packages, extra = _LOGGER_PACKAGES[name]
    return None if any(importlib.util.find_spec(package) for package in packages) else (packages[0], extra)
