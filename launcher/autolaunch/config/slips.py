"""Keys that other tools have and people type: what they are called here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from autolaunch_strategies.config import AXIS_SPELLINGS, ConfigError, nearest

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


_SHARDING = {
    **{"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"},
    **{"no_shard": "ddp", "shard_grad_op": "zero2", "full_shard": "fsdp", "hybrid_shard": "hsdp", "true": "fsdp"},
    "false": "ddp",
}
_PRECISIONS = {"fp8": "float8", "no": "32-true", "fp32": "32-true", "float32": "32-true", "false": "32-true"}
_SCHEDULES = {"constant_with_warmup": "constant", "warmupcosinelr": "cosine", "sqrt": "cosine"}
_RECOMPUTED = {"selective": "selective", "none": "none", "false": "none", "memory_budget": "budget"}

_LINES = {
    # how many ranks
    "nproc_per_node num_processes num_gpus n_gpus ngpu gpus devices world_size data_parallel_size dp_degree "
    "data_parallel_shard_degree dp_shard_size dp_shard": "mesh={value}",
    "data_parallel": "mesh=dp{value}",
    "tensor_parallel tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size tp_size tp_degree "
    "mp_degree autotp_size": "mesh=mp{value}",
    "pipeline_parallel pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size pp_size pp_degree":
        "mesh=pp{value}",
    "context_parallel context_parallel_degree context_parallel_size cp_size cp_degree "
    "sequence_parallel_size sep_degree": "mesh=cp{value}",
    "expert_parallel expert_parallel_degree expert_model_parallel_size expert_parallel_size ep_size ep_degree":
        "ep={value}",
    "data_parallel_replicate_degree dp_replicate_size dp_replicate": "dp=hsdp dp.replicate={value}",
    "nodes num_nodes nnodes num_machines": "launch=slurm launch.nodes={value}",
    # what is sharded, in which type, what is computed again
    "zero_stage zero_optimization.stage deepspeed.stage fsdp sharding_strategy fsdp_sharding_strategy": "dp={sharding}",
    "use_distributed_optimizer": "dp=zero1",
    "use_torch_fsdp2": "dp=fsdp",
    "cpu_offload enable_cpu_offload fsdp_offload_params offload_optimizer offload_param": "dp.cpu_offload=true",
    "sp sequence_parallel enable_sequence_parallel": "mp=seq_parallel",
    "pipeline_parallel_schedule pipeline_schedule": "pp={lower}",
    "num_microbatches pipeline_parallel_microbatches": "pp.microbatches={value}",
    "bf16 fp16 mixed_precision mixed_precision_param dtype torch_dtype amp": "precision={precision}",
    "gradient_checkpointing activation_checkpointing activation_checkpoint.mode fsdp_activation_checkpointing "
    "recompute_granularity use_activation_checkpointing": "recompute={recomputed}",
    "torch_compile compile.enable use_torch_compile": "compile={value}",
    "dynamo_backend": "compile=true",
    # the training
    "training.steps train_iters total_steps num_training_steps max_train_steps": "trainer.max_steps={value}",
    "epochs num_epochs num_train_epochs": "trainer.max_epochs={value}",
    "global_batch_size train_batch_size": "data.batch_size={value}",
    "local_batch_size micro_batch_size per_device_train_batch_size per_device_batch_size "
    "train_micro_batch_size_per_gpu": "data.batch_size=...",
    "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps": "data.microbatches={value}",
    "seq_length max_seq_length max_seq_len": "data.seq_len={value}",
    "learning_rate": "optimizer.lr={value}",
    "lr_scheduler lr_scheduler_type lr_decay_style decay_type": "scheduler={schedule}",
    "num_warmup_steps lr_warmup_iters lr_warmup_steps": "scheduler.warmup_steps={value}",
    "max_grad_norm max_norm clip_grad gradient_clipping clip_grad_norm": "trainer.gradient_clip_val={value}",
    "adam_beta2 beta2 optimizer.beta2": "optimizer.betas=[0.9,{value}]",
    "adam_beta1 beta1 optimizer.beta1": "optimizer.betas=[{value},0.95]",
    "seed_everything": "seed={value}",
    # what is trained, and what is written
    "model.flavor": "model.size={lower}",
    "model_name_or_path pretrained_model_name_or_path": "model=hf model.path={value}",
    "num_attention_heads": "model.num_heads={value}",
    "num_query_groups": "model.num_kv_heads={value}",
    "lora use_lora use_peft": "adapter=lora",
    "qlora use_qlora": "adapter=qlora",
    "dora use_dora": "adapter=dora",
    "lora_r lora_rank lora.r lora.rank peft.r peft.rank adapter.rank": "adapter=lora adapter.r={value}",
    "lora_alpha lora.alpha": "adapter=lora adapter.alpha={value}",
    "lora_dropout lora.dropout": "adapter=lora adapter.dropout={value}",
    "save_steps save_interval checkpointing_steps "
    "checkpoint.interval checkpoint.every": "checkpoint.every_n_steps={value}",
    "save_total_limit keep_latest_k": "checkpoint.keep_last={value}",
    "resume resume_from_checkpoint resume_from load_checkpoint": "ckpt_path={checkpoint}",
    "report_to": "logger={value}",
    "config config_file job.config_file": "experiment={value}",
}  # fmt: skip
_BY_KEY = {key: line for keys, line in _LINES.items() for key in keys.split()}
"""Keys of other tools -> the line to write; one without dots stands for itself in any section of theirs, too."""

_LINES_FOR_OPTIONS = {
    "optimizer adamw8bit adamw_8bit paged_adamw_8bit adam8bit":
        "optimizer=custom optimizer._target_=torchao.optim.AdamW8bit",
    "optimizer muon": "optimizer=custom optimizer._target_=autolaunch.models.muon.Muon "
        "'optimizer.groups=[{match: [.*embed_tokens, lm_head], muon: false}]'",
    "launch torchrun": "torchrun --nproc-per-node 2 -m autolaunch mesh=2",
    "launch srun sbatch": "launch=slurm",
}  # fmt: skip
_BY_PATH = {"model": "model=hf model.path", "data": "data=documents data.path"}
"""Groups of which most options of other tools are names or paths here."""

_BY_FILE = {"txt": "data=text data.path", "bin": "data=tokens data.path", "npy": "data=tokens data.path"}
"""Endings of files of data that are read in another way."""

_BY_OPTION = {(group, name): line for keys, line in _LINES_FOR_OPTIONS.items() for group, *names in [keys.split()]
              for name in names}  # fmt: skip
"""(group, what is no option of it) -> the line to write."""

OFF = ("false", "no", "off", "none", "0")
"""What other tools write for what is not wanted."""

_PER_DEVICE = "the batch size here counts all ranks: batch per device x ranks along dp x accumulated batches"
_NO_FP16 = "there is no fp16; bf16 takes as much memory and needs no scale of the loss"


def _line_of(key: str) -> str:
    key = key.lower().replace("-", "_")
    return _BY_KEY.get(key) or _BY_KEY.get(key.rpartition(".")[2], "")


def own_key(key: str) -> str:
    """What a key, an axis or a strategy of another tool is called here; empty if it is none that is known."""
    line = AXIS_SPELLINGS.get(key) or _line_of(key) or _STRATEGIES.get(key, "")
    return line.split(" ")[-1].partition("=")[0]


def foreign_line(key: str, value: str) -> str:
    """What to write for a key of torchtitan, Accelerate, Megatron or DeepSpeed; empty if it is none that is known."""
    line, lower = _line_of(key), value.lower()
    if line.startswith("experiment=") and not lower.endswith((".yaml", ".yml")):
        return ""  # the file of another tool
    if (line == "logger={value}" or "{" not in line) and lower in OFF:
        return ""  # what is off by default, so that there is nothing to write
    if re.fullmatch(r"\[\d+(,\s*\d+)*\]", value) and line == "mesh={value}":  # the numbers of devices
        value = str(value.count(",") + 1)
    if re.fullmatch(r"(mesh=[a-z]+|ep=)\{value\}", line) and not re.fullmatch(r"-?\d+", value):
        return ""  # `tensor_parallel=true` does not say how many ranks
    return line.format(
        value=value,
        lower=lower,
        sharding=_SHARDING.get(lower, "fsdp"),
        precision=_PRECISIONS.get(lower, "bf16-mixed"),
        recomputed=_RECOMPUTED.get(lower, "full"),
        schedule=_SCHEDULES.get(lower, lower),
        checkpoint=value if re.search(r"[/.]", value) else "last",
    )


def shape_meant(value: str) -> str:
    """The mesh that was meant by axes in a list (`tp2,pp2`) or by other signs (`(2,2)`, `2*2`), or an empty string."""
    if re.fullmatch(r"\(\d+(,\s*\d+)*\)|\d+(\s*[*\u00d7X]\s*\d+)+", value):
        return "x".join(re.findall(r"\d+", value))
    first, *rest = re.split(r"[\s,x]+", value.strip("()[]{}' "))
    if rest and re.fullmatch(r"-1|\d+", first):  # 3xmp2: sizes without names begin with dp
        first = f"dp{first}"
    parts = [re.fullmatch(r"([a-z]+)[=:]?(-1|\d+)", part) for part in (first, *rest)]
    axes = [AXIS_SPELLINGS.get(part[1]) if part else None for part in parts]
    if None in axes or len(set(axes)) < len(axes):
        return ""
    return "x".join(f"{part[1]}{part[2]}" for part in parts if part)


def line_for_option(group: str, option: str, options: Mapping[str, Mapping[str, str]]) -> str:
    """What to write in place of an option of another tool, of another group, or of a class; empty if it is neither.

    Args:
        options: of every group what its options are called, by us and by others, and their names here.
    """
    if line := _BY_OPTION.get((group, option.lower())):
        return line
    others = [f"{other}={names[option]}" for other, names in options.items() if other != group and option in names]
    if len(others) == 1:
        return others[0]
    is_class = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", option)
    return f"{group}=custom {group}._target_={option}" if is_class and "custom" in options.get(group, ()) else ""


def near_option(group: str, option: str, options: Iterable[str]) -> str:
    """The option of a group that was meant; empty if it is like none, as a model or data that is called otherwise."""
    return nearest(option, options, 0.7) if group in _BY_PATH else nearest(option, options)


def line_for_name(group: str, name: str) -> str:
    """What to write for the name of a model or of data that is like no option of ours; empty for other groups."""
    return f"{_BY_PATH[group]}=OWNER/{name}" if name and group in _BY_PATH else ""


def _axis_given_twice(value: str) -> str:
    """The axis that a mesh has twice (`2xdp2`, `2xmp2xtp2`), of which one size has no name; empty if there is none.

    Of meshes with names alone, `parse_mesh` says it.
    """
    first, *rest = value.split("x")
    parts = [re.fullmatch(r"([a-z]+)(-1|\d+)", part) for part in rest]
    if not re.fullmatch(r"-1|\d+", first) or None in parts:
        return ""
    axes = ["dp", *(AXIS_SPELLINGS.get(part[1], "") for part in parts if part)]
    return next((axis for axis in axes if axis and axes.count(axis) > 1), "")


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def slip(override: str, key: str, value: str, config: Mapping[str, Any] = _NOTHING) -> ConfigError | None:
    """What to write in place of a key of another tool; None if it is none that is known.

    Args:
        config: what is known of the rest. `task=plan` is asked for nodes by its cluster; an adapter or a cluster that
            is chosen stays.
    """
    if key.startswith("mesh.") and (axis := AXIS_SPELLINGS.get(key[5:])):
        return ConfigError(override, f"the axis is called {axis} here", write=f"mesh.{axis}={value}")
    if key == "mesh" and (shape := shape_meant(value)):
        return ConfigError(override, "not a mesh shape", write=f"mesh={shape}")
    if key == "mesh" and (axis := _axis_given_twice(value)):
        problem = f"{axis} is given twice: the size without a name, in front, is that of dp"
        allowed = "sizes of dp, mp, pp, cp in this order (2x2), or each by its name (dp2xmp2)"
        return ConfigError(override, problem, allowed)
    ending = value.rpartition(".")[2] if "." in value else ""
    if key in _BY_PATH and ("/" in value or ending in ("json", "jsonl", "parquet", "arrow", *_BY_FILE)):
        line = _BY_FILE.get(ending, _BY_PATH[key]) if key == "data" else _BY_PATH[key]
        return ConfigError(override, f"names no option: {key} has a path", write=f"{line}={value}")
    if line := foreign_line(key, value):
        problem = "no such key: another tool calls it so"
        if config.get("adapter") is not None and line.startswith("adapter=lora "):
            line = line.removeprefix("adapter=lora ")
        is_plan = config.get("task") == "plan"
        if is_plan and line.startswith("launch=slurm launch.nodes=") and re.fullmatch(r"[1-9]\d*", value):
            allowed = f"cluster.nodes={value} beside a cluster; {line} for the job of a mesh that is typed"
            beside = config.get("cluster") is not None
            return ConfigError(
                override, problem, allowed, f"cluster.nodes={value}" if beside else f"cluster=h100x{8 * int(value)}"
            )
        allowed = _PER_DEVICE if line.endswith("...") else _NO_FP16 if re.search(r"fp16|float16|half", override) else ""
        return ConfigError(override, problem, allowed, line)
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
