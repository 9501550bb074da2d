"""The schema of what `conf/` composes to: one dataclass per config group, every key with its default and its help.

Torch-free. The files of conf/ say what differs from it (`autolaunch.config.sources` serves it to Hydra as `_schema_`);
`autolaunch.config.against_schema` checks a composed config against it; `autolaunch.config.help` prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autolaunch.config.cluster import Cluster
from autolaunch.config.search import Search
from autolaunch.models.hf_tasks import MODEL_TASKS
from autolaunch.models.label_positions import LABELS
from autolaunch.models.packed_attention import PACKED_KERNELS
from autolaunch_strategies.checkpoint.record import COMPARED
from autolaunch_strategies.config import (
    AXES,
    DEFAULT_ORDER,
    FLOAT8_RECIPES,
    RANDOM_NUMBERS,
    ContextParallel,
    DataParallel,
    ModelParallel,
    PipelineParallel,
    option,
)

TASKS = {
    "fit": "train the model",
    "validate": "run the validation data through a trained model",
    "test": "run the test data through a trained model",
    "predict": "write the model's predictions of the validation data to <output_dir>/predictions",
    "lr_find": "train a few steps with a rate that grows, and suggest optimizer.lr by how the loss falls",
    "compare": "train a few steps with each of the values that a key is given, and say where they part",
    "generate": "let a model go on with prompts, on any mesh",
    "plan": "show what a run would do, and write it to plan.yaml, without starting it; with cluster= choose it, too",
    "dryrun": "run a step of some ranks of any mesh without devices: memory, collectives, messages",
    "calibrate": "measure this machine for the planner, and write it as a cluster",
    "export": "write a checkpoint as safetensors that `transformers` loads",
    "eval": "run benchmarks of lm-evaluation-harness on a checkpoint or an exported model",
}
"""The first word of the command line; `fit` if there is none."""

GROUPS = {
    "model": "what is trained",
    "adapter": "which parameters are trained: all, or small ones beside frozen layers",
    "data": "on what",
    "mesh": "how many ranks along each axis: dp x mp x pp x cp",
    "dp": "data parallel: what is sharded",
    "mp": "model (tensor) parallel",
    "pp": "pipeline parallel: in which order the stages work",
    "cp": "context parallel: how attention sees sequences that are sharded",
    "optimizer": "",
    "scheduler": "the learning rate over the steps",
    "trainer": "arguments of Lightning's Trainer",
    "callbacks": "what runs beside the training: one, or several as [early_stopping,ema]",
    "logger": "loggers beside metrics.csv",
    "launch": "how processes are started",
    "cluster": "for which machines `plan` chooses: h100x1024 is 1,024 of them; or the path of a YAML file",
    "search": "-m search=auto: measure what the planner proposes, and keep the fastest",
    "experiment": "several choices at once; or the path of a YAML file, such as a plan.yaml",
}
"""The config groups of conf/, and what is chosen by each; all other keys are in no group."""

SEVERAL_OPTIONS = ("callbacks", "logger", "experiment")
"""Groups of which several options may be chosen at once; of any other, Hydra would take the last without a word."""

IN_ONE_PROCESS = ("plan", "dryrun", "export", "eval", "calibrate")
"""Tasks that one process does for a mesh of any size, without its devices."""


@dataclass
class Mesh:
    """mesh=AxBxCxD (dp, mp, pp, cp), mesh=dp4xmp2, or a preset of conf/mesh."""

    dp: int = option("Ranks along the data parallel axis (-1: what is left).", 1, ge=-1)
    mp: int = option("Ranks along the model (tensor) parallel axis.", 1, ge=-1)
    pp: int = option("Ranks along the pipeline parallel axis.", 1, ge=-1)
    cp: int = option("Ranks along the context parallel axis.", 1, ge=-1)
    order: list[str] = option(
        f"Rank order, outermost axis first: a permutation of {', '.join(AXES)}.", list(DEFAULT_ORDER)
    )


LLAMA_PLANS: dict[str, Any] = {
    "tensor_parallel": {
        "model.embed_tokens": "RowWiseParallel",
        "model.layers.*.self_attn.(q|k|v)_proj": "ColWiseParallel",
        "model.layers.*.self_attn.o_proj": "RowWiseParallel",
        "model.layers.*.mlp.(gate|up)_proj": "ColWiseParallel",
        "model.layers.*.mlp.down_proj": "RowWiseParallel",
        "lm_head": "ColWiseParallel",
    },
    "seq_parallel": {
        "model.embed_tokens": ["RowWiseParallel", {"SequenceParallelBegin": {"need_transpose": False}}],
        "model.layers.*.self_attn": {"SequenceParallelDisable": {"need_transpose": False}},
        "model.layers.*.self_attn.(q|k|v)_proj": "ColWiseParallel",
        "model.layers.*.self_attn.o_proj": "RowWiseParallel",
        "model.layers.*.mlp": {"SequenceParallelDisable": {"need_transpose": False}},
        "model.layers.*.mlp.(gate|up)_proj": "ColWiseParallel",
        "model.layers.*.mlp.down_proj": "RowWiseParallel",
        "lm_head": [{"SequenceParallelEnd": {"need_transpose": False}}, "ColWiseParallel"],
    },
}
"""How mp shards a Llama."""

_TRAINABLE_HELP = (
    "Names of the parameters or modules that are trained, as patterns of plans; all others are frozen (null: all are "
    "trained)."
)

_PACKED_ATTENTION = (
    "What computes attention of packed documents: varlen, a kernel that computes nothing between them (CUDA, bf16 or "
    "fp16, without cp); sdpa, torch's own with a mask; auto, varlen wherever it can be."
)

_PLANS_HELP = "Plans for mp that come with this model: {tensor_parallel: {pattern: style}, seq_parallel: {...}}."


@dataclass
class LlamaModel:
    """model=llama: the decoder of Llama 2 and 3 in plain PyTorch."""

    name: str = option("Which model this is; set by the group.", "llama")
    size: str = option("Published shape to start from.", "debug", choices=("debug", "1b", "8b", "70b", "405b"))
    vocab_size: int | None = option("Number of token ids (null: the size's own).", None, ge=1)
    hidden_size: int | None = option("Width of the residual stream (null: the size's own).", None, ge=1)
    intermediate_size: int | None = option("Width of the SwiGLU (null: the size's own).", None, ge=1)
    num_layers: int | None = option("Number of decoder blocks (null: the size's own).", None, ge=1)
    num_heads: int | None = option("Number of query heads (null: the size's own).", None, ge=1)
    num_kv_heads: int | None = option("Number of key/value heads (null: the size's own).", None, ge=1)
    head_dim: int | None = option("Width of one head (null: hidden_size / num_heads).", None, ge=1)
    max_seq_len: int | None = option("Longest sequence the model takes (null: the size's own).", None, ge=1)
    rope_theta: float | None = option("Base of the rotary frequencies (null: the size's own).", None, gt=0)
    rope_scaling: dict[str, Any] | None = option(
        "Llama 3 rotary scaling: factor, low_freq_factor, high_freq_factor, original_max_seq_len "
        "(null: the size's own; {} for none).",
        None,
    )
    norm_eps: float | None = option("Epsilon of the RMS norms (null: the size's own).", None, gt=0)
    tie_embeddings: bool | None = option("Use the embedding as the output head (null: the size's own).", None)
    init_std: float = option("Standard deviation of the initial weights.", 0.02, gt=0)
    packed_attention: str = option(_PACKED_ATTENTION, "auto", choices=PACKED_KERNELS)
    trainable: list[str] | None = option(_TRAINABLE_HELP, None)
    mp_plans: dict[str, Any] = option(_PLANS_HELP, LLAMA_PLANS)


@dataclass
class HFModel:
    """model=hf: models of `transformers` (install autolaunch[hf])."""

    name: str = option("Which model this is; set by the group.", "hf")
    path: str | None = option(
        "Directory with config.json and safetensors to start from, or OWNER/NAME of a model of the Hugging Face hub.",
        None,
    )
    revision: str | None = option("Branch, tag or commit of a model of the hub (null: its main branch).", None)
    config: dict[str, Any] = option(
        "A `transformers` config: model_type and its fields (random weights), or overrides of the one in model.path.",
        {},
    )
    task: str = option(
        "What it is trained for, and with it which class of `transformers` it is.",
        "causal_lm",
        choices=tuple(MODEL_TASKS),
    )
    num_labels: int | None = option(
        "Classes of a classification, or numbers of a regression (null: those of its config).", None, ge=1
    )
    pretrained: bool = option("With model.path: read its weights (false: only its config, random weights).", True)
    attn_implementation: str | None = option(
        "Attention of `transformers` (null: sdpa, or eager for models that have no sdpa).",
        None,
        choices=("sdpa", "eager", "flash_attention_2", None),
    )
    packed_attention: str = option(_PACKED_ATTENTION, "auto", choices=PACKED_KERNELS)
    trainable: list[str] | None = option(_TRAINABLE_HELP, None)
    mp_plans: dict[str, Any] = option(_PLANS_HELP, {})


@dataclass(kw_only=True)
class CustomModel:
    """model=custom (or any model file of yours with `_target_`): every other key goes to the class as an argument."""

    name: str = option("Which model this is; shown in the summary.", "custom")
    _target_: str = option("Import path of a torch.nn.Module class, or of a function that returns a module.")
    loss: Any = option(
        "Loss of (output, target): cross_entropy, mse, or {_target_: ...}; `output` for a model that returns its loss.",
        "cross_entropy",
    )
    trainable: list[str] | None = option(_TRAINABLE_HELP, None)
    mp_plans: dict[str, Any] = option(_PLANS_HELP, {})


@dataclass
class Adapter:
    """adapter=lora, dora: PEFT's small matrices beside frozen layers are trained (install autolaunch[peft]).

    adapter=qlora: beside layers whose weights have four bits (install autolaunch[qlora]).
    """

    name: str = option("Which adapter this is; set by the group.", "lora", choices=("lora", "dora", "qlora"))
    path: str | None = option(
        "Directory of a published adapter (adapter_config.json, adapter_model.safetensors) to go on from.", None
    )
    r: int | None = option("Rank of the added matrices (null: 8, or that of adapter.path).", None, ge=1)
    alpha: float | None = option(
        "Their product is scaled by alpha / r (null: 2 r, or that of adapter.path).", None, gt=0
    )
    rslora: bool | None = option(
        "Scale by alpha / sqrt(r) instead, which suits high ranks (null: false, or that of adapter.path).", None
    )
    dropout: float | None = option(
        "Share of their inputs that is dropped in training (null: 0, or that of adapter.path).", None, ge=0, lt=1
    )
    target_modules: Any = option(
        "Layers that get them: all-linear (every linear layer but the head), a list of names or ends of names, or a "
        "regular expression over whole names (null: all-linear, or those of adapter.path).",
        None,
    )
    target_parameters: list[str] = option(
        "Parameters that get them where no layer holds them, such as experts.gate_up_proj, by ends of names.", []
    )
    modules_to_save: list[str] = option("Modules that are trained whole, by ends of names.", [])
    exclude: list[str] = option("Layers that get none although they are targets, by ends of names.", [])
    quant_type: str = option(
        "With adapter=qlora: the four-bit type of all linear layers but the head.", "nf4", choices=("nf4", "fp4")
    )


_MICROBATCHES = (
    "Parts into which a rank's share of the batch is cut: gradient accumulation, or the microbatches of a pipeline "
    "unless pp.microbatches is set."
)


_VALIDATION_FRACTION = (
    "Share of {}, at {} end, that is kept for validation (null: 0.05, or none where that is less than a batch)."
)


@dataclass
class TextData:
    """data=text: text files cut into sequences of tokens."""

    name: str = option("Which data this is; set by the group.", "text")
    path: Any = option(
        "A file, a directory, a glob, or a list of them (null: the English text inside Python's standard library).",
        None,
    )
    tokenizer: str | None = option(
        "`bytes` (one token per byte, 256 + 1 ids), or the path of a tokenizer.json (null: that of model.path, else "
        "bytes).",
        None,
    )
    seq_len: int = option("Tokens per sequence.", 256, ge=1)
    batch_size: int = option("Sequences per optimizer step, over all ranks.", 16, ge=1)
    microbatches: int = option(_MICROBATCHES, 1, ge=1)
    validation_fraction: float | None = option(_VALIDATION_FRACTION.format("the text", "its"), None, ge=0, lt=1)
    test_path: Any = option("What `autolaunch test` reads, given as data.path is.", None)
    num_workers: int = option("Loader processes per rank (0: load in the training process).", 0, ge=0)
    shuffle: bool = option("Visit the training sequences in random order (a function of seed and step only).", True)


@dataclass
class TokenData:
    """data=tokens: tokens in memory-mapped .bin or .npy files of any size."""

    name: str = option("Which data this is; set by the group.", "tokens")
    path: Any = option("A .bin or .npy file, a directory, a glob, or a list of them.", None)
    validation_path: Any = option("The same for validation (null: the last part of data.path).", None)
    test_path: Any = option("The same for `autolaunch test`.", None)
    dtype: str = option(
        "Type of the tokens in .bin files.", "uint16", choices=("uint8", "uint16", "int32", "uint32", "int64")
    )
    seq_len: int = option("Tokens per sequence.", 256, ge=1)
    batch_size: int = option("Sequences per optimizer step, over all ranks.", 16, ge=1)
    microbatches: int = option(_MICROBATCHES, 1, ge=1)
    validation_fraction: float | None = option(_VALIDATION_FRACTION.format("the tokens", "their"), None, ge=0, lt=1)
    num_workers: int = option("Loader processes per rank (0: load in the training process).", 0, ge=0)
    shuffle: bool = option("Visit the training sequences in random order (a function of seed and step only).", True)


@dataclass
class SyntheticData:
    """data=synthetic: token sequences made from the seed; a pattern that a model can learn."""

    name: str = option("Which data this is; set by the group.", "synthetic")
    vocab_size: int = option("Number of token ids that occur.", 256, ge=2)
    num_sequences: int = option("Sequences in the training set.", 65536, ge=1)
    num_validation_sequences: int = option("Sequences in the validation set.", 256, ge=0)
    num_test_sequences: int = option("Sequences in the test set.", 256, ge=0)
    seq_len: int = option("Tokens per sequence.", 256, ge=1)
    batch_size: int = option("Sequences per optimizer step, over all ranks.", 16, ge=1)
    microbatches: int = option(_MICROBATCHES, 1, ge=1)
    num_workers: int = option("Loader processes per rank (0: load in the training process).", 0, ge=0)
    shuffle: bool = option("Visit the training sequences in random order (a function of seed and step only).", True)


_ROWS_PATH = (
    "jsonl, json, parquet or arrow files{}, a directory of save_to_disk, or owner/name of a dataset of the hub; a list "
    "of these, or of {{path: ..., subset: ..., split: ..., weight: ...}} for shares of the sequences."
)
_SUBSET = "With names of the hub in data.path: which of several datasets under a name (null: the only one)."
_SPLIT = "With names of the hub or saved datasets in data.path, e.g. train or train[:5%] (null: train)."
_STREAMING = (
    "Tokenise rows while they are read, every time, instead of once before the first step: for data that are too large "
    "to wait for, or to download."
)
_SHUFFLE_BUFFER = "With data.streaming, rows that are shuffled, and packed, together (null: 1,024)."
_VALIDATION_PATH = "The same for validation (null: the last part of data.path)."
_LABELS = "What label t is: `same`, the token at t, as transformers has it."
_ON_BAD = "Rows that cannot be trained on: refuse them by file and line, or skip and count them."
_PACKING = (
    "none: each in a sequence of its own, padded; documents: several in one sequence, kept apart by positions that "
    "begin anew (for models that know documents by these, as most of transformers do)."
)


@dataclass
class DocumentData:
    """data=documents: texts, each with an end; rows of jsonl, json, parquet and arrow files, or whole text files."""

    name: str = option("Which data this is; set by the group.", "documents")
    path: Any = option(_ROWS_PATH.format(", text files"), None)
    subset: str | None = option(_SUBSET, None)
    split: str | None = option(_SPLIT, None)
    text_key: str = option("The column with the text.", "text")
    tokenizer: str | None = option(
        "A directory with a tokenizer, a tokenizer.json, or `bytes` (null: that of model.path, else bytes).", None
    )
    seq_len: int = option("Tokens per sequence.", 256, ge=1)
    too_long: str = option(
        "Documents of more than data.seq_len tokens: split them into several sequences, truncate, skip or refuse them.",
        "split",
        choices=("split", "truncate", "skip", "refuse"),
    )
    packing: str = option(_PACKING, "none", choices=("none", "documents"))
    streaming: bool = option(_STREAMING, False)
    shuffle_buffer: int | None = option(_SHUFFLE_BUFFER, None, ge=1)
    on_bad: str = option(_ON_BAD, "refuse", choices=("refuse", "skip"))
    labels: str = option(_LABELS, "same", choices=("same",))
    batch_size: int = option("Sequences per optimizer step, over all ranks.", 16, ge=1)
    microbatches: int = option(_MICROBATCHES, 1, ge=1)
    validation_path: Any = option(_VALIDATION_PATH, None)
    validation_fraction: float | None = option(_VALIDATION_FRACTION.format("each source", "its"), None, ge=0, lt=1)
    test_path: Any = option("The same for `autolaunch test`.", None)
    num_workers: int = option("Loader processes per rank (0: load in the training process).", 0, ge=0)
    shuffle: bool = option("Visit the training sequences in random order (a function of seed and step only).", True)


@dataclass
class ChatData:
    """data=chat: conversations, rendered by a chat template; what the assistant says is trained on."""

    name: str = option("Which data this is; set by the group.", "chat")
    path: Any = option(_ROWS_PATH.format(""), None)
    subset: str | None = option(_SUBSET, None)
    split: str | None = option(_SPLIT, None)
    columns: dict[str, str] = option(
        "Part of a conversation -> column: messages; or prompt, completion, and input, system, tools ({}: messages, "
        "conversations, prompt and completion, or instruction and output, whichever there is).",
        {},
    )
    tokenizer: str | None = option(
        "A directory with a tokenizer, or a tokenizer.json (null: that of model.path).", None
    )
    chat_template: str | None = option(
        "A file with a jinja template, or the template itself (null: that of the tokenizer).", None
    )
    train_on: str = option(
        "Tokens that are trained on: what the assistant says, its last answer, or all.",
        "assistant",
        choices=("assistant", "last", "all"),
    )
    train_on_eos: bool = option("Train on the token that ends an answer, too.", True)
    seq_len: int = option("Tokens per sequence.", 1024, ge=1)
    too_long: str = option(
        "Conversations of more than data.seq_len tokens: cut off their end, skip or refuse them.",
        "truncate",
        choices=("truncate", "skip", "refuse"),
    )
    packing: str = option(_PACKING, "none", choices=("none", "documents"))
    streaming: bool = option(_STREAMING, False)
    shuffle_buffer: int | None = option(_SHUFFLE_BUFFER, None, ge=1)
    on_bad: str = option(_ON_BAD, "refuse", choices=("refuse", "skip"))
    labels: str = option(_LABELS, "same", choices=("same",))
    batch_size: int = option("Sequences per optimizer step, over all ranks.", 16, ge=1)
    microbatches: int = option(_MICROBATCHES, 1, ge=1)
    validation_path: Any = option(_VALIDATION_PATH, None)
    validation_fraction: float | None = option(_VALIDATION_FRACTION.format("each source", "its"), None, ge=0, lt=1)
    test_path: Any = option("The same for `autolaunch test`.", None)
    num_workers: int = option("Loader processes per rank (0: load in the training process).", 0, ge=0)
    shuffle: bool = option("Visit the training sequences in random order (a function of seed and step only).", True)


@dataclass
class ClassificationData:
    """data=classification: texts with a label each, for model.task=sequence_classification."""

    name: str = option("Which data this is; set by the group.", "classification")
    path: Any = option(
        "jsonl, json, parquet or arrow files, a directory of save_to_disk, or owner/name of a dataset of the hub; or a "
        "list of these.",
        None,
    )
    subset: str | None = option(_SUBSET, None)
    split: str | None = option(_SPLIT, None)
    text_key: str = option("The column with the text.", "text")
    pair_key: str | None = option("The column with a second text that belongs to the first (null: none).", None)
    label_key: str = option(
        "The column with the label: the number or name of a class, a number to predict, or a list of these.", "label"
    )
    classes: list[str] | None = option(
        "Names of the classes, in the order of their numbers (null: labels are numbers).", None
    )
    tokenizer: str | None = option(
        "A directory with a tokenizer, a tokenizer.json, or `bytes` (null: that of model.path, else bytes).", None
    )
    seq_len: int = option("Tokens that a text is cut off or padded to.", 256, ge=1)
    on_bad: str = option(_ON_BAD, "refuse", choices=("refuse", "skip"))
    batch_size: int = option("Texts per optimizer step, over all ranks.", 16, ge=1)
    microbatches: int = option(_MICROBATCHES, 1, ge=1)
    validation_path: Any = option(_VALIDATION_PATH, None)
    validation_fraction: float | None = option(_VALIDATION_FRACTION.format("the texts", "their"), None, ge=0, lt=1)
    test_path: Any = option("The same for `autolaunch test`.", None)
    num_workers: int = option("Loader processes per rank (0: load in the training process).", 0, ge=0)
    shuffle: bool = option("Visit the training texts in random order (a function of seed and step only).", True)


@dataclass(kw_only=True)
class CustomData:
    """data=custom (or any data file of yours with `_target_`): every other key goes to the class as an argument."""

    name: str = option("Which data this is; shown in the summary.", "custom")
    _target_: str = option("Import path of a LightningDataModule class, or of a function that returns one.")
    labels: str | None = option(
        "With model=llama or hf, where labels stand: next (label t is the token after input t) or same (the token at "
        "t, as transformers has it; null: same).",
        None,
        choices=(*LABELS, None),
    )


@dataclass
class Optimizer:
    """optimizer=adamw, adam, sgd, or a file of yours with `_target_`."""

    name: str = option(
        "Which optimizer this is; set by the group.", "adamw", choices=("adamw", "adam", "sgd", "custom")
    )
    _target_: str | None = option("Import path of a torch.optim.Optimizer class (optimizer=custom).", None)
    lr: float = option("Learning rate (after warm-up).", 1e-3, ge=0)
    weight_decay: float = option("Weight decay, on matrices only (norms and biases have none).", 0.1, ge=0)
    betas: list[float] | None = option(
        "Averaging factors of adam and adamw (null: the class's own).", [0.9, 0.95], ge=0, lt=1
    )
    eps: float | None = option("Epsilon of adam and adamw (null: the class's own).", 1e-8, gt=0)
    momentum: float | None = option("Momentum of sgd (null: the class's own).", 0.0, ge=0, lt=1)
    groups: list[dict[str, Any]] = option(
        "Options of their own for parameters by name: [{match: [patterns], lr: ..., weight_decay: ...}]; of several "
        "that match a parameter, the first counts.",
        [],
    )


@dataclass
class Scheduler:
    """scheduler=constant, cosine, linear: the learning rate per optimizer step."""

    name: str = option("Shape of the decay after warm-up.", "cosine", choices=("constant", "cosine", "linear"))
    warmup_steps: int = option("Steps over which the rate rises linearly from zero.", 0, ge=0)
    min_lr_ratio: float = option("Final rate as a share of optimizer.lr.", 0.0, ge=0, le=1)
    total_steps: int | None = option("Step at which the decay ends (null: the last one).", None, ge=1)


USUAL_STEPS = 100
"""Optimizer steps of a training for which nobody says when it ends."""


def last_step(trainer: Mapping[str, Any]) -> int:
    """`trainer.max_steps` as a number: -1 for no limit."""
    if trainer["max_steps"] is not None:
        return trainer["max_steps"]
    ends_otherwise = trainer["max_epochs"] not in (None, -1) or trainer["max_time"] is not None
    return -1 if ends_otherwise else USUAL_STEPS


@dataclass
class Trainer:
    """trainer.*: the arguments of lightning's Trainer, by its names."""

    accelerator: str = option("Kind of device.", "auto", choices=("auto", "cpu", "gpu", "cuda"))
    max_steps: int | None = option(
        f"Optimizer steps after which training ends (-1: no limit; null: {USUAL_STEPS}, or no limit where max_epochs "
        "or max_time says when).",
        None,
        ge=-1,
    )
    max_epochs: int | None = option("Passes over the data after which training ends (null: no limit).", None, ge=-1)
    max_time: str | None = option("Time after which training ends, DD:HH:MM:SS.", None)
    limit_train_batches: int | float | None = option(
        "Batches of an epoch to use (a count or a share).", None, ge=0, share=1
    )
    limit_val_batches: int | float | None = option(
        "Validation batches to use (a count or a share).", None, ge=0, share=1
    )
    limit_test_batches: int | float | None = option("Test batches to use (a count or a share).", None, ge=0, share=1)
    limit_predict_batches: int | float | None = option("Batches to predict (a count or a share).", None, ge=0, share=1)
    val_check_interval: int | float | None = option(
        "Validate every so many batches or share of an epoch.", None, gt=0, share=1
    )
    check_val_every_n_epoch: int | None = option(
        "Validate every so many epochs (null: count steps across epochs).", 1, ge=1
    )
    num_sanity_val_steps: int = option("Validation batches run before training starts.", 0, ge=-1)
    log_every_n_steps: int = option("Write a row of metrics every so many optimizer steps.", 1, ge=1)
    accumulate_grad_batches: int | None = option(
        "Batches per optimizer step for a data module of your own (null: data.microbatches).", None, ge=1
    )
    gradient_clip_val: float | None = option("Clip gradients at this value (null: never).", 1.0, gt=0)
    gradient_clip_algorithm: str = option(
        "What is clipped: the norm over all parameters, or each value.", "norm", choices=("norm", "value")
    )
    nonfinite_patience: int | None = option(
        "End the run when loss or gradient norm have not been finite for so many steps (null: never).", 10, ge=1
    )
    deterministic: bool = option("Use deterministic algorithms only.", False)
    benchmark: bool | None = option("Let cuDNN choose its algorithms by measuring.", None)
    detect_anomaly: bool = option("Check every backward operation for NaN (slow).", False)
    fast_dev_run: int | bool = option("Run this many batches of everything and stop, to try the code.", False)
    overfit_batches: int | float = option("Train and validate on this many batches or share only.", 0.0, ge=0, share=1)
    enable_progress_bar: bool = option("Show the progress bar.", True)
    enable_model_summary: bool = option("Show lightning's table of modules.", False)
    profiler: str | None = option(
        "Lightning's profiler; what it measures is in <task>-profile* of the run's directory.",
        None,
        choices=("simple", "advanced", "pytorch", None),
    )


_YEAR = 365 * 24 * 60 * 60
"""The longest time, in seconds, that can be waited: clocks of torch and of Python overflow at far longer ones."""


@dataclass
class Checkpoint:
    """When and how checkpoints are written to <output_dir>/checkpoints."""

    enabled: bool = option("Write checkpoints.", True)
    every_n_steps: int | None = option("Write one every so many optimizer steps (null: not by steps).", None, ge=1)
    every_minutes: float | None = option("Write one every so many minutes (null: not by time).", 30.0, gt=0)
    emergency_seconds: float = option(
        "How long a run may take to finish its step and write a last checkpoint when a signal ends it.",
        60.0,
        gt=0,
        le=_YEAR,
    )
    keep_last: int = option("How many to keep (-1: all).", 2, ge=-1)
    monitor: str | None = option("Keep the best by this logged value, and the last one, instead of the last.", None)
    mode: str = option("Whether the best is the lowest or the highest.", "min", choices=("min", "max"))
    asynchronous: bool = option("Write in the background while training goes on.", False)
    verify: str = option(
        "Before loading: compare the content of every file with its hash, or sizes only.",
        "hash",
        choices=("hash", "size"),
    )
    data_position: str = option(
        "Where a data module of your own can't go on in the middle of an epoch: refuse to resume there, read again "
        "what was trained on, or begin the epoch's data again.",
        "required",
        choices=("required", "read_again", "start_over"),
    )
    trust: bool = option("Load checkpoints that run code: pickles that hold more than tensors and plain data.", False)


@dataclass
class Resume:
    """What a run with ckpt_path may do otherwise than the run that wrote the checkpoint."""

    allow: list[str] = option(
        f"What may be another: {', '.join(COMPARED)}. Everything else may change, and is told.", []
    )


@dataclass
class LrFind:
    """lr_find: rates that are tried, one after the other, each larger by the same factor."""

    min: float = option("The first rate.", 1e-6, gt=0)
    max: float = option("The last rate, unless the loss diverges before.", 1.0, gt=0)
    steps: int = option("How many optimizer steps, each with its rate; in place of trainer.max_steps.", 100, ge=3)


@dataclass
class Compare:
    """compare: how long is trained, and what counts as equal."""

    steps: int = option("How many optimizer steps; in place of trainer.max_steps.", 5, ge=1)
    tolerance: float = option("The largest relative difference of losses and gradient norms.", 1e-4, ge=0)


@dataclass
class Generate:
    """What `autolaunch generate` writes: to generated.jsonl and the screen."""

    prompts: list[Any] = option(
        "Texts; conversations [{role: user, content: ...}], for the tokenizer's chat template; or lists of token ids.",
        [],
    )
    max_new_tokens: int = option("Tokens after each prompt, at most.", 64, ge=1)
    temperature: float = option("By what logits are divided before a token is drawn (0: the likeliest).", 0.0, ge=0)
    top_p: float = option("Draw from the likeliest tokens that have this probability together.", 1.0, gt=0, le=1)


@dataclass
class Eval:
    """What `autolaunch eval` asks of lm-evaluation-harness (install autolaunch[eval]); it writes eval.json."""

    tasks: list[str] = option("Names of its tasks, such as hellaswag.", [])
    path: str | None = option("Directory of an exported model (null: ckpt_path is exported first).", None)
    include_path: str | None = option("Directory with YAML files of tasks of your own.", None)
    num_fewshot: int | None = option("Examples before each question (null: as the task says).", None, ge=0)
    limit: int | float | None = option("Questions of each task to ask (a count or a share; null: all).", None, gt=0)
    batch_size: int = option("Questions that are answered together.", 8, ge=1)
    chat_template: bool = option("Put questions into the tokenizer's chat template.", False)


@dataclass
class Launch:
    """What every way to start the processes of a run has."""

    name: str = option("Which launcher this is; set by the group.", "local", choices=("local", "slurm"))
    start_timeout: float = option("Seconds in which every rank must have begun its task.", 600.0, gt=0, le=_YEAR)
    hang_timeout: float | None = option(
        "Seconds without progress of any rank after which the run ends, telling where all are: if one is stopped, "
        "all wait for each other, or a step takes ten times as long as the longest before (null: never).",
        60.0,
        gt=0,
        le=_YEAR,
    )
    collective_timeout: float = option(
        "Seconds after which a collective that a rank never joins is an error, once the first step is done.",
        600.0,
        gt=0,
        le=_YEAR,
    )
    first_step_timeout: float = option(
        "The same until the first step is done (it compiles), and while a checkpoint is written or loaded; also how "
        "long a rank may work outside of steps while all others wait for it.",
        1800.0,
        gt=0,
        le=_YEAR,
    )
    wait: bool = option("Wait while another run is in the output directory, instead of an error.", False)
    numa: bool = option("On GPUs: run each rank on the processors beside its GPU, of those that it may use.", True)


@dataclass
class LocalLaunch(Launch):
    """launch=local: one process per rank on this machine."""

    devices: int | None = option("Devices of this machine to use (null: all that are visible).", None, ge=1)
    stop_timeout: float = option(
        "Seconds in which ranks may end by themselves after Ctrl-C or a failure.", 10.0, gt=0, le=_YEAR
    )
    logs: str = option("Who writes to the terminal; every rank has a log file.", "rank0", choices=("rank0", "all"))
    max_restarts: int = option(
        "Times that a run starts again by itself from its newest checkpoint after a rank has failed.", 0, ge=0
    )
    min_devices: int | None = option(
        "Ranks with which a restart may go on when one is gone for good, on a smaller mesh (null: all).", None, ge=1
    )


@dataclass
class SlurmLaunch(Launch):
    """launch=slurm: one job of Slurm, submitted and followed from here, requeued until it is done."""

    name: str = option("Which launcher this is; set by the group.", "slurm", choices=("local", "slurm"))
    nodes: int = option("Nodes of the job; the ranks of the mesh are shared evenly by them.", 1, ge=1)
    time: str | None = option("Time limit, such as 4:00:00 or 2-00:00:00 (null: the partition's).", None)
    partition: str | None = option("Partition, or several with commas (null: Slurm's default).", None)
    account: str | None = option("Account that is charged (null: Slurm's default).", None)
    qos: str | None = option("Quality of service (null: Slurm's default).", None)
    gpus_per_node: int | None = option(
        "GPUs asked for on each node (null: one per rank, none with trainer.accelerator=cpu).", None, ge=0
    )
    cpus_per_task: int | None = option("CPUs asked for each rank (null: Slurm's default, usually one).", None, ge=1)
    sbatch: list[str] = option("Further options of sbatch, such as --exclusive.", [])
    setup: list[str] = option("Lines of shell that run before the ranks start, such as `module load cuda`.", [])
    max_restarts: int = option("How often the job is requeued after a failure; time limits do not count.", 3, ge=0)
    submit: bool = option("Submit the job (false: write and print its script).", True)
    follow: bool = option("Show the log of the job until it has ended.", True)


@dataclass
class Job:
    """Everything a run needs, composed and resolved once, by the parent."""

    task: str = option("What to do; the first word of the command line.", "fit", choices=TASKS)
    name: str = option("Name of the run: part of its output directory.", "run")
    output_dir: str | None = option("Where everything is written (null: outputs/<name>/<date>_<time>).", None)
    seed: int = option("Seed of the initial weights, the data order and every random number.", 0, ge=0, le=2**32 - 1)
    precision: str | None = option(
        "Arithmetic, by lightning's names; float8 (rowwise scales) and float8-tensorwise: linear layers of blocks "
        "multiply in float8, all else is bf16-mixed (null: bf16-mixed on GPUs, 32-true on a CPU).",
        None,
        choices=("32-true", "bf16-mixed", "bf16-true", *FLOAT8_RECIPES, None),
        foreign_names={"32": "32-true", "fp32": "32-true", "fp8": "float8"},
    )
    matmul_precision: str | None = option(
        "How GPUs multiply what is in fp32, by torch.set_float32_matmul_precision: highest (fp32), high (TF32), medium "
        "(bf16 where it is faster) (null: high where precision is bf16 or float8, highest with 32-true).",
        None,
        choices=("highest", "high", "medium", None),
    )
    recompute: Any = option(
        "Activation checkpointing: none, full, a number n (every n-th block), selective, budget (chosen when blocks "
        "are compiled); or offload: what blocks save waits in host memory.",
        "none",
    )
    recompute_save: list[str] = option(
        "With recompute=selective: operators whose outputs are kept.", ["mm", "attention"]
    )
    recompute_budget: float | None = option(
        "With recompute=budget: the share, 0 to 1, of what compiled blocks keep that they may keep (null: 0.5).", None
    )
    compile: bool | str = option(
        "torch.compile every block: true, or a mode such as max-autotune-no-cudagraphs.", False
    )
    random_numbers: str = option(
        "What dropout draws: by_rank (from a generator on each rank, as torch does), by_position (a hash of where an "
        "element stands in the run, the same on every mesh).",
        "by_rank",
        choices=RANDOM_NUMBERS,
    )
    ep: int = option("Over how many ranks of dp x cp x mp the experts of a mixture are shared out.", 1, ge=1)
    ckpt_path: str | None = option(
        "Checkpoint to go on from: its path, that of a run (its newest), or `last`, the newest of output_dir or else "
        "of the runs of this name. validate, test, predict and generate take model, adapter and data from its job.",
        None,
    )
    export_path: str | None = option("Where `autolaunch export` writes (null: <output_dir>/export).", None)
    export_merged: bool = option(
        "Of a run with an adapter, export the model with the adapter merged into it, not the adapter alone.", False
    )
    module: dict[str, Any] | None = option(
        "A LightningModule of your own: {_target_: ..., arguments}; then model, optimizer and scheduler are its own.",
        None,
    )
    why: str | None = option("With `plan cluster=...`: why not this one, e.g. `mp=4,pp=2` (as --why).", None)
    full: bool = option(
        "With `plan cluster=...`: every figure, pictures, and what is done to each part of the model (as --full).",
        False,
    )
    rank: list[int] = option(
        "With `dryrun`: which ranks to run, such as [0,8] ([]: one of the first and the last stage, and one that "
        "stands elsewhere along every other axis).",
        [],
    )
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    resume: Resume = field(default_factory=Resume)
    lr_find: LrFind = field(default_factory=LrFind)
    compare: Compare = field(default_factory=Compare)
    generate: Generate = field(default_factory=Generate)
    eval: Eval = field(default_factory=Eval)
    mesh: Mesh = field(default_factory=Mesh)
    model: Any = field(default_factory=LlamaModel)
    adapter: Adapter | None = option("Small parameters to train beside a frozen model.", None)
    data: Any = field(default_factory=TextData)
    dp: DataParallel = field(default_factory=DataParallel)
    mp: ModelParallel | None = field(default_factory=ModelParallel)
    pp: PipelineParallel | None = field(default_factory=PipelineParallel)
    cp: ContextParallel | None = field(default_factory=ContextParallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    trainer: Trainer = field(default_factory=Trainer)
    callbacks: dict[str, Any] = option("What runs beside the training: {name: {_target_: ...}}.", {})
    logger: dict[str, Any] = option("Loggers beside metrics.csv: {name: {_target_: ...}}.", {})
    launch: Any = field(default_factory=LocalLaunch)
    cluster: Cluster | None = option("Machines that `plan` and `-m search=auto` choose a mesh for.", None)
    search: Search | None = option("How `-m search=auto` looks for the fastest run.", None)


MODELS: dict[str, type] = {"llama": LlamaModel, "hf": HFModel, "custom": CustomModel}
DATA: dict[str, type] = {
    "text": TextData,
    "tokens": TokenData,
    "synthetic": SyntheticData,
    "documents": DocumentData,
    "chat": ChatData,
    "classification": ClassificationData,
    "custom": CustomData,
}

LAUNCHERS: dict[str, type] = {"local": LocalLaunch, "slurm": SlurmLaunch}

FAMILIES: dict[str, dict[str, type]] = {"model": MODELS, "data": DATA, "launch": LAUNCHERS}
"""Groups whose options have schemas of their own, by the `name` in them; `custom` is that of any `_target_`."""

MADE = {"data": ("of_model",)}
"""Keys of a resolved job that are in no schema: made of other keys each time a job is resolved, and never typed."""

MISSING = "???"
"""The value of a key that has to be set, as OmegaConf writes it."""


def without_made(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config as it can be typed again: without the keys `MADE`."""
    return {
        group: {key: value for key, value in node.items() if key not in MADE[group]}
        if group in MADE and isinstance(node, Mapping)
        else node
        for group, node in config.items()
    }


def default_of(item: dataclasses.Field[Any]) -> Any:
    """The default of a key as plain data: a mapping if the key is a group of keys, `???` if there is no default."""
    if item.default is not dataclasses.MISSING:
        return item.default
    if item.default_factory is dataclasses.MISSING:
        return MISSING
    value = item.default_factory()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def defaults_of(schema: type) -> dict[str, Any]:
    """Every key of a schema with its default, in the order in which they are declared."""
    return {item.name: default_of(item) for item in dataclasses.fields(schema)}
