"""Every wrong command line that we could think of: one message, exit code 2, nothing written, nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autolaunch import cli
from autolaunch.config import across_keys, arithmetic
from autolaunch.config.command_line import CommandLine
from autolaunch.config.compose import compose, resolved
from autolaunch.config.saving import saving_without_effect
from tests.support.messages import Told, assert_only_told
from tests.support.tiers import one_in

FILES = {
    "mine/plan.yml": "name: x\n",
    "mine/experiment/wrong_type.yaml": "# @package _global_\ntrainer:\n  max_steps: soon\n",
    "mine/experiment/unknown_key.yaml": "# @package _global_\noptimizer:\n  learning_rate: 0.1\n",
    "mine/experiment/no_package.yaml": "seed: 3\n",
    "mine/experiment/broken.yaml": "# @package _global_\nseed: [1\nname: x\n",
    "mine/experiment/override.yaml": "# @package _global_\ndefaults:\n  - override /modle: llama\n",
    "mine/experiment/a_list.yaml": "# @package _global_\n- a\n",
    "mine/experiment/twice.yaml": "# @package _global_\nseed: 1\nseed: 2\n",
    "mine/experiment/directory.yaml/a.txt": "",
    "mine/experiment/unknown_option.yaml": "# @package _global_\ndefaults:\n  - override /dp: zero9\n",
    "mine/experiment/bad_mesh.yaml": "# @package _global_\ndefaults:\n  - override /mesh: 2x0\n",
    "mine/hydra/launcher/fake.yaml": "_target_: nowhere.Launcher\n",
    "texts.jsonl": '{"text": "a"}\n',
    "mine/pretrained/config.json": "{}",
    "mine/model/nameless.yaml": "hidden_size: 64\n",
    "mine/model/unknown.yaml": "name: lama\nhidden_size: 64\n",
    "mine/model/short.yaml": "name: llama\nhidden_size: 64\nnum_heads: 4\n",
}
"""What lies in the working directory: the mistakes of a user's own YAML files."""

TASKS = "fit, validate, test, predict, lr_find, compare, generate, plan, dryrun, calibrate, export, eval"
GROUPS = (
    "adapter, callbacks, cluster, cp, data, dp, experiment, launch, logger, mesh, model, mp, optimizer, pp, scheduler, "
    "search, trainer"
)
DP_OPTIONS = "ddp, fsdp, hsdp, zero1, zero2"
STYLES = (
    "ColWiseParallel, RowWiseParallel, GatherWhenUsed, DivideExperts, SequenceParallelBegin, SequenceParallelEnd, "
    "SequenceParallelEnable, SequenceParallelDisable, PrepareContextParallel, ContextParallel, "
    "PrepareLayerInput, PrepareLayerOutput"
)

WRONG = [
    pytest.param(
        ["generate", "ckpt_path=x", "generate.prompts=Hello"],
        Told("generate.prompts=Hello", "must be a list", write="'generate.prompts=[Hello]'"),
        id="text-for-list-of-anything",
    ),
    pytest.param(
        ["trainer.val_check_interval=0"],
        Told("trainer.val_check_interval=0", "out of range", allowed=("more than 0",)),
        id="no-interval",
    ),
    pytest.param(
        ["trainer.limit_train_batches=1.5"],
        Told("trainer.limit_train_batches=1.5", "out of range", allowed=("1 or less",)),
        id="share-above-1",
    ),
    pytest.param(
        ["trainer.limit_val_batches=2.0"],
        Told("trainer.limit_val_batches=2.0", "out of range", write="trainer.limit_val_batches=2"),
        id="count-with-a-point",
    ),
    pytest.param(
        ["optimizer.groups=[{match: [x], betas: 0.5}]"],
        Told("optimizer.groups[0].betas=0.5", "must be a list", write="optimizer.groups[0].betas: [0.5,0.95]"),
        id="one-beta-of-a-group",
    ),
    pytest.param(
        ["seed=" + "9" * 400],
        Told("seed=" + "9" * 400, "out of range", allowed=("4294967295",)),
        id="endless-seed",
    ),
    pytest.param(
        ["optimizer.betas=[0.9]"],
        Told("optimizer.betas=[0.9]", "takes two", write="'optimizer.betas=[0.9,0.95]'"),
        id="one-beta",
    ),
    pytest.param(
        ["optimizer.betas=[0.9,1.5]"],
        Told("optimizer.betas=[0.9,1.5]", "out of range", allowed="0 or more, less than 1"),
        id="beta-above-1",
    ),
    pytest.param(
        ["launch.start_timeout=inf"],
        Told("launch.start_timeout=inf", "not a finite number", allowed=("31536000",)),
        id="infinite-timeout",
    ),
    pytest.param(
        ["launch.collective_timeout=1e30"],
        Told("launch.collective_timeout=1e30", "out of range", allowed=("31536000",)),
        id="endless-timeout",
    ),
    pytest.param(
        ["optimizer.lr=inf"], Told("optimizer.lr=inf", "not a finite number", allowed="0 or more"), id="infinite-rate"
    ),
    pytest.param(["mesh=[2,2]"], Told("mesh=[2,2]", "one option", write="mesh=2x2"), id="list-of-sizes"),
    pytest.param(
        ["optimizer=[adamw,sgd]"],
        Told("optimizer=[adamw,sgd]", "one option", allowed="adam, adamw, custom, sgd", write="optimizer=adamw"),
        id="list-of-options",
    ),
    pytest.param(["model=null"], Told("model=null", "no option", allowed="custom, hf, llama"), id="null-for-option"),
    pytest.param(
        ["name=../../x"],
        Told("name=../../x", "not the name of a directory", write="name=x"),
        id="name-of-another-place",
    ),
    pytest.param(["name="], Told("name=", "not the name of a directory", write="name=my_run"), id="empty-name"),
    pytest.param(
        ["callbacks.early_stopping.patience=2"],
        Told("callbacks.early_stopping={patience:2}", "does not say what", write="callbacks=early_stopping"),
        id="key-of-a-callback-not-chosen",
    ),
    pytest.param(["ckpt_path="], Told("ckpt_path=", "empty", write="ckpt_path=null"), id="empty-checkpoint"),
    pytest.param(
        ["trainer.max_steps=2", "+trainer.max_steps=4"],
        Told("+trainer.max_steps=4", "there already", write="trainer.max_steps=4"),
        id="added-beside-the-same",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=override"],
        Told("override /modle (mine/experiment/override.yaml)", "model", allowed=("adapter",)),
        id="own-yaml-overrides-no-group",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=a_list"],
        Told("mine/experiment/a_list.yaml", "a list", allowed=("keys of a config",)),
        id="own-yaml-list",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=twice"],
        Told("mine/experiment/twice.yaml, line 3", "duplicate key seed"),
        id="own-yaml-duplicate",
    ),
    pytest.param(
        ["model.packed_attention=sdpa"],
        Told("model.packed_attention=sdpa", "no packed documents", write="model.packed_attention=auto"),
        id="a-kernel-for-documents-that-are-not-packed",
    ),
    pytest.param(
        ["data=documents", "data.path=texts.jsonl", "data.packing=documents", "model.packed_attention=varlen"],
        Told(
            "model.packed_attention=varlen", "in bf16 and fp16", allowed=("sdpa",), write="model.packed_attention=auto"
        ),
        id="a-kernel-for-documents-in-fp32",
    ),
    pytest.param(
        ["mesh=2", "ep=2"],
        Told("ep=2 with model=llama", "no mixture of experts", allowed=("ep=1",), write="ep=1"),
        id="experts-of-a-dense-model",
    ),
    pytest.param(
        ["mesh=2", "mp.plan={layers.*.mlp.experts: ExpertParallel}"],
        Told("mp.plan: layers.*.mlp.experts", "experts are found by their structure", allowed=("ep=N",), write="ep=2"),
        id="a-rule-for-experts",
    ),
    pytest.param(
        ["model=hf", "model.config.model_type=qwen3", "mesh=2", "ep=2"],
        Told("ep=2 with model=hf", "no mixture of experts", allowed=("ep=1",), write="ep=1"),
        id="experts-of-a-dense-model-of-transformers",
    ),
    pytest.param(
        ["model=hf", "model.config.model_type=qwen3_moe", "mesh=6", "ep=3", "data.batch_size=6"],
        Told("ep=3 with model=hf", "128 experts can't be shared out evenly", allowed=("1, 2",), write="ep=2"),
        id="more-ranks-than-experts-by-default-divide-by",
    ),
    pytest.param(
        ["model=hf", "model.config.model_type=mixtral", "+model.config.num_local_experts=6", "mesh=4", "ep=4"],
        Told("ep=4 with model=hf", "6 experts can't be shared out evenly", allowed=("1, 2",), write="ep=2"),
        id="more-ranks-than-experts-divide-by",
    ),
    pytest.param(
        [
            "data=documents",
            "data.streaming=true",
            "data.path=[{path: texts.jsonl, weight: 1}]",
            "trainer.max_epochs=2",
            "trainer.val_check_interval=0.5",
            "trainer.overfit_batches=3",
            "scheduler=constant",
        ],
        [
            Told("trainer.val_check_interval=0.5", "not known", write="trainer.val_check_interval=1000"),
            Told("trainer.overfit_batches=3", "again and again", write="data.streaming=false"),
            Told("trainer.max_epochs=2", "never ends", write="trainer.max_steps=1000"),
        ],
        id="epochs-of-streams",
    ),
    pytest.param(
        ["checkpoint.keep_last=0"],
        Told("checkpoint.keep_last=0", write="checkpoint.keep_last=1", allowed=("enabled=false",)),
        id="keep-no-checkpoint",
    ),
    pytest.param(
        ["launch.min_devices=1", "mesh=2"],
        Told(
            "launch.min_devices=1",
            "only a restart",
            allowed=("launch.max_restarts",),
            write="launch.max_restarts=3 launch.min_devices=1",
        ),
        id="fewer-ranks-without-restarts",
    ),
    pytest.param(
        ["launch.min_devices=4", "mesh=2", "launch.max_restarts=1"],
        Told("launch.min_devices=4", "mesh=2", "2 ranks", allowed="1 to 2", write="launch.min_devices=2"),
        id="more-ranks-left-than-there-were",
    ),
    pytest.param(
        ["mesh=1024", "data.batch_size=1024", "data=synthetic", "data.num_validation_sequences=0"],
        Told(
            "mesh=1024",
            "1,024 processes",
            "no GPU",
            allowed=("64 ranks", "launch.devices"),
            write="mesh=1024 launch.devices=1024",
        ),
        id="mesh-of-gpus-on-a-cpu",
    ),
    pytest.param(
        ["cluster=h100"],
        Told(
            "cluster=h100",
            "fit",
            allowed=("`plan`", "mesh=auto", "-m search=auto"),
            write="autolaunch plan cluster=h100",
        ),
        id="cluster-of-a-run",
    ),
    pytest.param(
        ["mesh=2", "--why", "mp=2"],
        Told('why="mp=2"', "no choice", allowed=("plan",), write="autolaunch plan ... cluster=local --why mp=2"),
        id="why-without-a-choice",
    ),
    pytest.param(
        ["plan", "mesh=2", "--why", "mp=2"],
        Told('why="mp=2"', "no choice", allowed=("plan",), write="cluster=local --why mp=2"),
        id="why-without-a-cluster",
    ),
    pytest.param(
        ["plan", "rank=[3]"],
        Told("rank=[3]", "no effect with plan", allowed=("dryrun",), write="autolaunch dryrun ... 'rank=[3]'"),
        id="ranks-of-another-task",
    ),
    pytest.param(
        ["dryrun", "mesh=2", "rank=0,1"],
        Told("rank=0,1", "several values", allowed=("'rank=[0,1]'",), write="autolaunch dryrun mesh=2 'rank=[0,1]'"),
        id="ranks-without-brackets",
    ),
    pytest.param(["dryrun", "rank=1"], Told("rank=1", "must be a list", write="'rank=[1]'"), id="one-rank"),
    pytest.param(["dryrun", "rank=x"], Told("rank=x", "must be a list"), id="no-rank"),
    pytest.param(
        ["search=auto", "mesh=2"],
        Told("search=auto", "single run", write="autolaunch -m search=auto mesh=2"),
        id="search-without-m",
    ),
    pytest.param(
        ["-m", "mesh=auto"],
        Told("mesh=auto", "sweep", allowed=("-m search=auto",), write="autolaunch -m search=auto"),
        id="auto-in-a-sweep",
    ),
    pytest.param(
        ["-m", "plan", "cluster=h100,a100_80"],
        Told(
            "-m with cluster=h100", "chooses no mesh", allowed=("-m search=auto",), write="autolaunch plan cluster=..."
        ),
        id="cluster-of-a-sweep",
    ),
    pytest.param(
        ["plan", "cluster=nowhere.yaml"],
        Told("cluster=nowhere.yaml", "no such file", allowed=("conf/cluster", "--config-dir", ".yaml")),
        id="no-such-cluster-file",
    ),
    pytest.param(
        ["trian", "model=llama"],
        Told("autolaunch trian", "fit", allowed=TASKS, write="autolaunch fit model=llama"),
        id="unknown-task",
    ),
    pytest.param(
        ["evaluate"],
        Told("autolaunch evaluate", "validate", allowed=TASKS, write="autolaunch validate"),
        id="task-of-another-tool",
    ),
    pytest.param(
        ["xyzzy", "mesh=2"],
        Told("autolaunch xyzzy", "no such task", allowed=TASKS, write="autolaunch fit mesh=2"),
        id="task-like-nothing",
    ),
    pytest.param(
        ["model=hf", "model.num_attention_heads=4"],
        Told("model.num_attention_heads=4", "keys of model.config", write="model.config.num_attention_heads=4"),
        id="key-of-the-config-of-transformers",
    ),
    pytest.param(
        ["mesh=2", "plan"],
        Told("plan", "first word", write="autolaunch plan mesh=2"),
        id="task-not-first",
    ),
    pytest.param(
        ["mesh=2", "trainer.max_steps"],
        Told("trainer.max_steps", "key and value are one word", write="trainer.max_steps=..."),
        id="word-without-value",
    ),
    pytest.param(
        ["dp2xmp2"],
        Told("dp2xmp2", "key", write="mesh=dp2xmp2"),
        id="mesh-without-key",
    ),
    pytest.param(
        ["--verison"],
        Told("--verison", "--version", write="autolaunch --version"),
        id="unknown-flag",
    ),
    pytest.param(
        ["--max-steps=10"],
        Told("--max-steps=10", "without dashes", write="autolaunch max_steps=10"),
        id="key-with-dashes",
    ),
    pytest.param(
        ["--config-name"],
        Told("--config-name", "expected one argument", write="autolaunch --help"),
        id="flag-without-value",
    ),
    pytest.param(
        ["--cfg", "everything"],
        Told("--cfg everything", "no such part", allowed="job, hydra, all"),
        id="cfg-of-nothing",
    ),
    pytest.param(
        ["-m", "--cfg", "job"],
        Told("--multirun", "together", "--cfg"),
        id="cfg-and-sweep",
    ),
    pytest.param(
        ["--resolve"],
        Told("--resolve", "needs --cfg", write="autolaunch --cfg job --resolve"),
        id="resolve-without-cfg",
    ),
    pytest.param(
        ["--config-dir", "nowhere"],
        Told("--config-dir nowhere", "no such directory"),
        id="config-dir-absent",
    ),
    pytest.param(
        ["--config-name", "confg"],
        Told("--config-name confg", "did you mean config", allowed="config"),
        id="config-name-absent",
    ),
    pytest.param(
        ["help", "plam"],
        Told("--info plam", "no such group or key; did you mean plan?", write="autolaunch help plan"),
        id="task-misspelt",
    ),
    pytest.param(
        ["--info", "trainer.max_step"],
        Told(
            "--info trainer.max_step",
            "trainer.max_steps",
            allowed=("model", "experiment", "any key", "defaults-tree", "searchpath"),
            write="autolaunch --info trainer.max_steps",
        ),
        id="info-unknown",
    ),
    pytest.param(
        ["--info", "lr"],
        Told(
            "--info lr",
            "optimizer.lr",
            allowed=("model", "experiment", "any key", "defaults-tree", "searchpath"),
            write="autolaunch --info optimizer.lr",
        ),
        id="info-by-last-name",
    ),
    pytest.param(
        ["trainer.max_step=10"],
        Told("trainer.max_step=10", "trainer.max_steps", write="trainer.max_steps=10"),
        id="unknown-key-near",
    ),
    pytest.param(
        ["lr=1e-3"],
        Told("lr=1e-3", "optimizer.lr", write="optimizer.lr=1e-3"),
        id="unknown-key-of-another-group",
    ),
    pytest.param(
        ["trainer.batch_size=8"],
        Told("trainer.batch_size=8", "data.batch_size", write="data.batch_size=8"),
        id="unknown-key-in-wrong-group",
    ),
    pytest.param(
        ["model.frobnicate=1"],
        Told("model.frobnicate=1", "no such key", write="autolaunch --info model"),
        id="unknown-key-like-nothing",
    ),
    pytest.param(
        ["checkpoint.xyz=1"],
        Told(
            "checkpoint.xyz=1",
            "no such key",
            write="autolaunch --info checkpoint",
        ),
        id="unknown-key-in-small-group",
    ),
    pytest.param(
        ["qwertz=1"],
        Told("qwertz=1", "no such key", write="autolaunch --help"),
        id="unknown-key-top-level",
    ),
    pytest.param(
        ["presicion=bf16-mixed"],
        Told("presicion=bf16-mixed", "precision", write="precision=bf16-mixed"),
        id="unknown-key-top-level-near",
    ),
    pytest.param(
        ["plan", "clutser=h100x8"],
        Told("clutser=h100x8", "did you mean cluster", write="cluster=h100x8"),
        id="unknown-key-near-a-group-of-which-nothing-is-chosen",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp.schedule=zbv"],
        Told("pp.schedule=zbv", "no such schedule", write="pp.schedule=zbv_zero_bubble"),
        id="schedule-by-its-beginning",
    ),
    pytest.param(
        ["recompute=ful"],
        Told("recompute=ful", "did you mean full", write="recompute=full"),
        id="recompute-near",
    ),
    pytest.param(
        ["seed.value=1"],
        Told("seed.value=1", "no keys", write="seed=..."),
        id="key-below-a-value",
    ),
    pytest.param(
        ["+trainer.max_stepz=3"],
        Told("+trainer.max_stepz=3", "trainer.max_steps", write="trainer.max_steps=3"),
        id="added-unknown-key",
    ),
    pytest.param(
        ["+trainer.log_every_n_steps=3"],
        Told("+trainer.log_every_n_steps=3", "already", write="trainer.log_every_n_steps=3"),
        id="added-known-key",
    ),
    pytest.param(
        ["~trainer.foo"],
        Told("~trainer.foo", "delete", write="autolaunch --info trainer"),
        id="deleted-unknown-key",
    ),
    pytest.param(
        ["db/engine=fast"],
        Told("db/engine=fast", "no such config group", allowed=GROUPS),
        id="unknown-group",
    ),
    pytest.param(
        ["model@x=llama"],
        Told("model@x=llama", "model", allowed=GROUPS, write="model=llama"),
        id="group-of-package",
    ),
    pytest.param(
        ["callbacks.lr.logging=step"],
        Told(
            "callbacks.lr={logging:step}",
            "what it is",
            allowed=("_target_",),
            write="callbacks.lr._target_=package.Class",
        ),
        id="key-of-open-node",
    ),
    pytest.param(
        ["model=custom", "model._target_=collections.OrderedDict", "model.in_features=4"],
        Told("model.in_features=4", "no such key yet", write="+model.in_features=4"),
        id="argument-of-own-model",
    ),
    pytest.param(
        ["model=lama", "trainer.max_step=3", "data.seq_len=0", "mesh=0"],
        [
            Told("mesh=0", "size 0", write="mesh=1", allowed=("1 or more", "-1")),
            Told("model=lama", "llama", allowed="custom, hf, llama", write="model=llama"),
            Told("trainer.max_step=3", "trainer.max_steps", write="trainer.max_steps=3"),
            Told("data.seq_len=0", "out of range", allowed="1 or more"),
        ],
        id="several-at-once",
    ),
    pytest.param(
        ["model=lama"],
        Told("model=lama", "llama", allowed="custom, hf, llama", write="model=llama"),
        id="unknown-model",
    ),
    pytest.param(
        ["dp=zero4"],
        Told("dp=zero4", "zero2", allowed=DP_OPTIONS, write="dp=zero2"),
        id="unknown-dp",
    ),
    pytest.param(
        ["dp=zero3"],
        Told("dp=zero3", "fsdp", allowed=DP_OPTIONS, write="dp=fsdp"),
        id="option-of-another-tool",
    ),
    pytest.param(
        ["trainer=3"],
        Told("trainer=3", "no option", allowed="default"),
        id="option-that-is-a-number",
    ),
    pytest.param(
        ["mp=seq_paralel"],
        Told(
            "mp=seq_paralel",
            "seq_parallel",
            allowed="auto, none, seq_parallel, tensor_parallel",
            write="mp=seq_parallel",
        ),
        id="unknown-mp",
    ),
    pytest.param(
        ["experiment=smke"],
        Told("experiment=smke", "smoke", allowed="pretrain_small, smoke", write="experiment=smoke"),
        id="unknown-experiment",
    ),
    pytest.param(
        ["plan", "cluster=h100x64", "mesh.mp=3", "model.size=8b", "data=synthetic"],
        Told(
            "mesh=1x3 with model=llama", "32 attention heads", "3 ranks of mp", allowed=("mp of size 1, 2, 4, 8, or",)
        ),
        id="mp-of-a-plan-shares-heads-of-keys",
    ),
    pytest.param(
        ["experiment=outputs/run/plan.yaml"],
        Told("experiment=outputs/run/plan.yaml", "no such file", allowed=("conf/experiment", "--config-dir", ".yaml")),
        id="experiment-file-absent",
    ),
    pytest.param(
        ["experiment=mine/plan.yml"],
        Told("experiment=mine/plan.yml", ".yaml", allowed=("conf/experiment", "--config-dir", ".yaml")),
        id="experiment-file-yml",
    ),
    pytest.param(
        ["hydra/launcher=slurm"],
        Told("hydra/launcher=slurm", "no option", write="launch=slurm", allowed="basic"),
        id="hydra-option",
    ),
    pytest.param(
        ["logger=[tensorboard,wanddb]"],
        Told(
            "logger=[tensorboard,wanddb]",
            "wandb",
            allowed="csv, mlflow, tensorboard, wandb",
            write="logger=[tensorboard,wandb]",
        ),
        id="one-of-several-loggers",
    ),
    pytest.param(
        ["name=a=b"],
        Told("name=a=b", "cannot read", write="'name=\"a=b\"'"),
        id="value-with-equals",
    ),
    pytest.param(
        ["data.path=a(b"],
        Told("data.path=a(b", "cannot read", write="'data.path=\"a(b\"'"),
        id="value-with-bracket",
    ),
    pytest.param(
        ["2mesh=3"],
        Told("2mesh=3", "2mesh", "name of a key", write="key=value"),
        id="key-that-is-no-name",
    ),
    pytest.param(
        ["dp=fsdp,zero1"],
        Told("dp=fsdp,zero1", "several values", "-m", write="autolaunch -m dp=fsdp,zero1"),
        id="sweep-without-m",
    ),
    pytest.param(
        ["data.path=a.txt,b.txt"],
        Told(
            "data.path=a.txt,b.txt",
            "several values",
            "-m",
            allowed="one value, or a list: 'data.path=[a.txt,b.txt]'",
            write="autolaunch -m data.path=a.txt,b.txt",
        ),
        id="list-without-brackets",
    ),
    pytest.param(["=3"], Told("=3", "no key", allowed="key=value"), id="no-key"),
    pytest.param(
        ["mesh=auto", "seed=1", "mesh=2"],
        Told("mesh=auto mesh=2", "mesh is chosen twice", allowed="one of the two"),
        id="group-chosen-twice",
    ),
    pytest.param(
        ["search.trials=3"],
        Told(
            "search.trials=3",
            "there is no search",
            allowed=("search=auto",),
            write="autolaunch -m search=auto search.trials=3",
        ),
        id="key-of-no-search",
    ),
    pytest.param(
        ["adapter.r=4"],
        Told("adapter.r=4", "there is no adapter", allowed=("adapter=lora",), write="adapter=lora adapter.r=4"),
        id="key-of-no-adapter",
    ),
    pytest.param(
        ["seed=range(3)"],
        Told("seed=range(3)", "several values", "-m", write="autolaunch -m 'seed=range(3)'"),
        id="range-without-m",
    ),
    pytest.param(
        ["-m", "data.path=glob(zz*)"],
        Told("data.path=glob(zz*)", "no value"),
        id="empty-sweep",
    ),
    pytest.param(
        ["-m", "trainer.max_step=1,2"],
        Told("trainer.max_step=1", "trainer.max_steps", write="trainer.max_steps=1"),
        id="sweep-with-unknown-key",
    ),
    pytest.param(
        ["-m", "dp=fsdp,zero9"],
        Told("dp=zero9", "zero2", allowed=DP_OPTIONS, write="dp=zero2"),
        id="sweep-with-unknown-option",
    ),
    pytest.param(
        ["-m", "mesh=1,2x0"],
        Told("mesh=2x0", "size 0", write="mesh=2x1", allowed=("1 or more", "-1")),
        id="sweep-with-bad-mesh",
    ),
    pytest.param(
        ["-m", "output_dir=a,b"],
        Told("output_dir=a,b", "one directory", write="output_dir=outputs/sweep"),
        id="sweep-of-directories",
    ),
    pytest.param(
        ["--config-dir", "mine", "hydra/launcher=fake", "mesh=2"],
        Told("hydra/launcher=fake", "single run", write="autolaunch -m hydra/launcher=fake mesh=2"),
        id="launcher-without-m",
    ),
    pytest.param(
        ["trainer.max_steps=${steps}"],
        Told("trainer.max_steps=${steps}", "steps", "not found"),
        id="interpolation-of-nothing",
    ),
    pytest.param(
        ["name=${name}"],
        Told("name=${name}", "Recursive interpolation"),
        id="interpolation-of-itself",
    ),
    pytest.param(
        ["name=${oc.env:AUTOLAUNCH_NOT_SET}"],
        Told("name=${oc.env:AUTOLAUNCH_NOT_SET}", "AUTOLAUNCH_NOT_SET", "not found"),
        id="interpolation-of-unset-variable",
    ),
    pytest.param(
        ["model=custom"],
        Told("model._target_", "must be given", allowed=("torch.nn.Module",), write="model._target_=..."),
        id="missing-target",
    ),
    pytest.param(
        ["optimizer=custom"],
        Told("optimizer._target_", "must be given", allowed=("torch.optim.Optimizer",), write="optimizer._target_=..."),
        id="missing-optimizer-target",
    ),
    pytest.param(
        ["trainer.max_steps=abc"],
        Told("trainer.max_steps=abc", "whole number"),
        id="text-for-int",
    ),
    pytest.param(
        ["trainer.max_steps=1e3"],
        Told("trainer.max_steps=1e3", "whole number", write="trainer.max_steps=1000"),
        id="float-for-int",
    ),
    pytest.param(
        ["data.batch_size=2.5"],
        Told("data.batch_size=2.5", "whole number"),
        id="fraction-for-int",
    ),
    pytest.param(
        ["seed=true"],
        Told("seed=true", "whole number"),
        id="bool-for-int",
    ),
    pytest.param(
        ["data.seq_len=null"],
        Told("data.seq_len=null", "whole number"),
        id="null-for-int",
    ),
    pytest.param(
        ["optimizer.lr=fast"],
        Told("optimizer.lr=fast", "number"),
        id="text-for-float",
    ),
    pytest.param(
        ["checkpoint.data_position=start_over"],
        Told(
            "checkpoint.data_position=start_over",
            "no effect",
            allowed=("data=custom",),
            write="checkpoint.data_position=required",
        ),
        id="data-position-of-own-data",
    ),
    pytest.param(
        ["data=custom", "data._target_=collections.OrderedDict", "data.labels=shifted"],
        Told("data.labels=shifted", allowed=("next", "same")),
        id="no-such-labels",
    ),
    pytest.param(
        [
            *("data=custom", "data._target_=collections.OrderedDict", "data.labels=next"),
            *("model=custom", "model._target_=torch.nn.Linear"),
        ],
        Told("data.labels=next", "no effect", allowed=("model=hf",), write="data.labels=null"),
        id="labels-of-own-model",
    ),
    pytest.param(
        ["experiment=smoke", "checkpoint.every_n_steps=5", "checkpoint.trust=true"],
        Told(
            "checkpoint.every_n_steps=5",
            "no effect: checkpoint.enabled=false (conf/experiment/smoke.yaml)",
            write="checkpoint.enabled=true checkpoint.every_n_steps=5",
        ),
        id="checkpoints-that-a-file-switches-off",
    ),
    pytest.param(
        ["checkpoint.mode=max"],
        Told("checkpoint.mode=max", "checkpoint.monitor", write="checkpoint.monitor=val_loss checkpoint.mode=max"),
        id="mode-of-no-value",
    ),
    pytest.param(
        ["export_path=exported"],
        Told("export_path=exported", "fit", write="autolaunch export ckpt_path=last export_path=exported"),
        id="export-path-of-a-training",
    ),
    pytest.param(
        ["hydra.job.chdir=true", "model.size=debug"],
        Told("hydra.job.chdir=true", "relative paths", write="hydra.job.chdir=false"),
        id="another-working-directory",
    ),
    pytest.param(
        ["-m", "hydra.job.chdir=true", "mesh=1,2"],
        Told("hydra.job.chdir=true", "relative paths", write="hydra.job.chdir=false"),
        id="another-working-directory-of-a-sweep",
    ),
    pytest.param(
        ["data", "show", "data=chat", "--cfg", "job"],
        Told("autolaunch data show --cfg job", "nothing else", write="autolaunch data show data=chat"),
        id="a-page-beside-data-show",
    ),
    pytest.param(
        ["checkpoint.enabled=2"],
        Told("checkpoint.enabled=2", "true or false"),
        id="int-for-bool",
    ),
    pytest.param(
        ["dp.cpu_offload=maybe"],
        Told("dp.cpu_offload=maybe", "true or false"),
        id="text-for-bool",
    ),
    pytest.param(
        ["name=[a,b]"],
        Told("name=[a,b]", "text"),
        id="list-for-text",
    ),
    pytest.param(
        ["optimizer.betas=0.9"],
        Told("optimizer.betas=0.9", "list of numbers", write="'optimizer.betas=[0.9,0.95]'"),
        id="number-for-list",
    ),
    pytest.param(
        ["optimizer.betas=[0.9,x]"],
        Told("optimizer.betas=[0.9,x]", "list of numbers"),
        id="wrong-item-in-list",
    ),
    pytest.param(
        ["checkpoint=best"],
        Told("checkpoint=best", "group of keys", write="autolaunch --info checkpoint"),
        id="text-for-mapping",
    ),
    pytest.param(
        ["checkpoint=off"],
        Told("checkpoint=off", "group of keys", write="autolaunch --info checkpoint"),
        id="value-for-node",
    ),
    pytest.param(
        ["precision=bf16"],
        Told("precision=bf16", "choices", allowed=("32-true", "bf16-true, float8"), write="precision=bf16-mixed"),
        id="choice-by-prefix",
    ),
    pytest.param(
        ["precision=fp8"],
        Told("precision=fp8", "choices", write="precision=float8"),
        id="choice-by-foreign-name",
    ),
    pytest.param(
        ["model.size=7b"],
        Told("model.size=7b", "choices", allowed="debug, 1b, 8b, 70b, 405b"),
        id="choice-wrong",
    ),
    pytest.param(
        ["dp.sharding_level=4"],
        Told("dp.sharding_level=4", "choices", allowed="0, 1, 2, 3"),
        id="choice-of-numbers",
    ),
    pytest.param(
        ["dp.sharding_level=true"],
        Told("dp.sharding_level=true", "whole number", allowed="0, 1, 2, 3"),
        id="choice-bool-for-number",
    ),
    pytest.param(
        ["optimizer.lr=-1"],
        Told("optimizer.lr=-1", "out of range", allowed="0 or more"),
        id="below-zero",
    ),
    pytest.param(
        ["data.batch_size=0"],
        Told("data.batch_size=0", "out of range", allowed="1 or more"),
        id="zero-size",
    ),
    pytest.param(
        ["test"],
        Told(
            "autolaunch test with data=text",
            "no data",
            allowed=("data.test_path", "validate"),
            write="data.test_path=test.txt",
        ),
        id="test-without-test-data",
    ),
    pytest.param(
        ["test", "data=synthetic", "data.num_test_sequences=0"],
        Told("autolaunch test with data=synthetic", "no data", write="data.num_test_sequences=256"),
        id="test-without-test-sequences",
    ),
    pytest.param(
        ["trainer.accumulate_grad_batches=4"],
        Told(
            "trainer.accumulate_grad_batches=4",
            "another data.batch_size",
            allowed=("data.microbatches",),
            write="data.microbatches=4",
        ),
        id="accumulation-of-own-data",
    ),
    pytest.param(
        ["data.validation_fraction=1"],
        Told("data.validation_fraction=1", "out of range", allowed="0 or more, less than 1"),
        id="share-of-one",
    ),
    pytest.param(
        ["seed=-1"],
        Told("seed=-1", "out of range", allowed="0 or more, 4294967295 or less"),
        id="seed-negative",
    ),
    pytest.param(
        ["recompute=half"],
        Told("recompute=half", "no such way", allowed=("none, full, selective",)),
        id="recompute-wrong",
    ),
    pytest.param(
        ["task=train"],
        Told("task=train", "choices", allowed=TASKS),
        id="task-by-key",
    ),
    pytest.param(
        ["mesh=2x0"],
        Told("mesh=2x0", "size 0", write="mesh=2x1", allowed=("1 or more", "-1")),
        id="mesh-zero",
    ),
    pytest.param(
        ["mesh=2x1x1x1x2"],
        Told("mesh=2x1x1x1x2", "5 sizes", "four axes", allowed=("dp, mp, pp, cp", "4x2", "dp4xmp2")),
        id="mesh-five-axes",
    ),
    pytest.param(
        ["mesh=dp2xep2"],
        Told("mesh=dp2xep2", "ep is no axis", allowed=("dp, mp, pp, cp", "4x2", "dp4xmp2"), write="mesh=dp2 ep=2"),
        id="mesh-degree-as-axis",
    ),
    pytest.param(
        ["mesh=dp2xzp2"],
        Told("mesh=dp2xzp2", "no axis", "zp", allowed=("dp, mp, pp, cp", "4x2", "dp4xmp2")),
        id="mesh-unknown-axis",
    ),
    pytest.param(
        ["mesh=dp2xdp2"],
        Told("mesh=dp2xdp2", "axis dp", "twice", allowed=("dp, mp, pp, cp", "4x2", "dp4xmp2")),
        id="mesh-axis-twice",
    ),
    pytest.param(
        ["mesh=-1x-1"],
        Told("mesh=-1x-1", "more than one", "-1", allowed=("1 or more", "-1")),
        id="mesh-two-open",
    ),
    pytest.param(
        ["mesh=large"],
        Told("mesh=large", "no option", allowed=("2x2, 2x2x2, 4x2, all, dp-1xmp2, dp4xmp2",)),
        id="mesh-word",
    ),
    pytest.param(
        ["mesh=1e3"],
        Told("mesh=1e3", "no option", allowed=("2x2, 2x2x2, 4x2, all, dp-1xmp2, dp4xmp2",)),
        id="mesh-number-format",
    ),
    pytest.param(
        ["mesh.order=[dp,mp]"],
        Told("mesh.order=dp,mp", "four axes", allowed=("pp,dp,cp,mp",), write="mesh.order=[pp,dp,cp,mp]"),
        id="mesh-order",
    ),
    pytest.param(
        ["mesh.dp=0"],
        Told("mesh=0", "size 0", write="mesh=1", allowed=("1 or more", "-1")),
        id="mesh-key-zero",
    ),
    pytest.param(
        ["mesh=-1"],
        Told("mesh=-1", "-1", "CPU", allowed=("launch.devices",), write="mesh=-1 launch.devices=2"),
        id="mesh-open-on-cpu",
    ),
    pytest.param(
        ["mesh=4", "launch.devices=3"],
        Told("mesh=4", "4 ranks", "launch.devices=3", allowed=("up to 3 ranks",), write="mesh=3"),
        id="mesh-above-devices",
    ),
    pytest.param(
        ["mesh=dp-1xmp2", "launch.devices=3"],
        Told("mesh=-1x2", "dp=-1", "3 devices", "multiples of 2", allowed="other axes whose product divides 3"),
        id="mesh-open-does-not-divide",
    ),
    pytest.param(
        ["mesh=2x2", "mp=none"],
        Told(
            "mesh=2x2 with mp=none",
            "2 ranks along mp",
            allowed=("mp=auto, tensor_parallel, seq_parallel",),
            write="mp=auto",
        ),
        id="mesh-without-axis",
    ),
    pytest.param(
        ["compile=max-autotune", "mesh=4", "dp=fsdp"],
        Told(
            "compile=max-autotune with dp.sharding_level=3",
            "addresses of parameters",
            allowed=("dp.sharding_level=0",),
            write="compile=max-autotune-no-cudagraphs",
        ),
        id="compile-to-cuda-graphs-of-what-moves",
    ),
    pytest.param(
        ["plan", "cluster=h100x16", "mesh.mp=4", "mp=seq_parallel", "compile=true", "mp.overlap=true"],
        Told("mp.overlap with cluster=", "predicts no overlap", write="mesh=1x4 mp.overlap=true"),
        id="overlap-is-not-predicted",
    ),
    pytest.param(
        ["compile=max-autotun"],
        Told(
            "compile=max-autotun", "did you mean max-autotune?", allowed=("true, false",), write="compile=max-autotune"
        ),
        id="compile-no-such-mode",
    ),
    pytest.param(
        ["compile=true", "random_numbers=by_position"],
        Told(
            "compile=true with random_numbers=by_position",
            "compiled code",
            allowed=("compile=false", "random_numbers=by_rank"),
            write="random_numbers=by_rank",
        ),
        id="compile-with-numbers-by-position",
    ),
    pytest.param(
        [
            "+mp.plan={fc1: ColumnParallel, layers.*.\\(: RowWiseParallel, fc2: [RowWiseParallel, {ColWiseParallel: "
            "{gather: true}}], fc3: {_target_: absent_package.Style}, fc4: null}"
        ],
        [
            Told("mp.plan: fc1", "ColumnParallel", "ColWiseParallel", allowed=STYLES),
            Told(
                "mp.plan: 'layers.*.('",
                "not a pattern",
                "missing ), unterminated subpattern at position 15",
                allowed=("*", "regular expression"),
            ),
            Told("mp.plan: fc2", "ColWiseParallel", "'gather'", allowed="gather_output, shard_dim"),
            Told("mp.plan: fc3._target_=absent_package.Style", "absent_package", allowed=("absent_package.py",)),
        ],
        id="plan-with-mistakes",
    ),
    pytest.param(
        ["+mp.plan.model.lm_head=ColWiseParallel"],
        Told("mp.plan.model.lm_head", "dots", "name of a module", write="'+mp.plan={model.lm_head: ...}'"),
        id="rule-with-dots",
    ),
    pytest.param(
        ["+model.mp_plans.column.lm_head=ColWiseParallel"],
        Told("model.mp_plans.column", "no such plan", allowed="tensor_parallel, seq_parallel"),
        id="plan-of-an-unknown-way",
    ),
    pytest.param(
        ["mesh=2x2x1x2", "cp=none"],
        Told(
            "mesh=2x2x1x2 with cp=none", "2 ranks along cp", allowed="cp=gather, ring, ulysses, usp", write="cp=gather"
        ),
        id="mesh-with-an-axis-that-is-none",
    ),
    pytest.param(
        ["mesh=4", "dp=hsdp", "dp.replicate=3"],
        Told("dp.replicate=3 dp.shard=null", "product", "4", allowed="replicate x shard = 1 x 4, 2 x 2, 4 x 1"),
        id="hybrid-does-not-multiply",
    ),
    pytest.param(
        ["mesh=3", "dp=hsdp", "data.batch_size=3"],
        Told("dp.replicate=2 dp.shard=null", "product", "3", allowed="replicate x shard = 1 x 3, 3 x 1"),
        id="hybrid-default",
    ),
    pytest.param(
        ["dp=ddp", "dp.cpu_offload=true"],
        Told(
            "dp.cpu_offload=true with dp.sharding_level=0",
            "only sharded state",
            allowed="dp.sharding_level 1, 2 or 3",
            write="dp.sharding_level=3 dp.cpu_offload=true",
        ),
        id="offload-of-nothing",
    ),
    pytest.param(
        ["recompute=budget"],
        Told(
            "recompute=budget with compile=false",
            "when blocks are compiled",
            allowed="compile=true, or recompute=selective, full",
            write="recompute=budget compile=true",
        ),
        id="budget-without-compile",
    ),
    pytest.param(
        ["recompute=budget", "compile=true", "recompute_budget=1.5"],
        Told("recompute_budget=1.5", "share", allowed=("from 0",), write="recompute_budget=0.5"),
        id="budget-is-no-share",
    ),
    pytest.param(
        ["recompute=selective", "recompute_budget=0.3"],
        Told(
            "recompute_budget=0.3 with recompute=selective",
            "recompute=budget alone",
            allowed="recompute=budget, or no recompute_budget",
            write="recompute=budget recompute_budget=0.3 compile=true",
        ),
        id="budget-that-nothing-reads",
    ),
    pytest.param(
        ["mesh=2", "data.batch_size=7"],
        Told(
            "data.batch_size=7",
            "7 sequences",
            "2 data parallel ranks",
            allowed="multiples of 2",
            write="data.batch_size=6 or data.batch_size=8",
        ),
        id="batch-not-divisible",
    ),
    pytest.param(
        ["mesh=2", "data.microbatches=3"],
        Told(
            "data.batch_size=16",
            "16 sequences",
            "2 data parallel ranks",
            "3 microbatches",
            allowed="multiples of 2 x 3 = 6",
            write="data.batch_size=12 or data.batch_size=18",
        ),
        id="batch-not-divisible-by-microbatches",
    ),
    pytest.param(
        ["model.hidden_size=100", "model.num_heads=3"],
        [
            Told(
                "model.num_heads=3",
                "divide",
                "model.hidden_size=100",
                "model.head_dim",
                allowed="a divisor of 100",
                write="model.num_heads=2",
            ),
            Told(
                "model.num_kv_heads=2",
                "key/value head",
                "size debug",
                "divide",
                "model.num_heads=3",
                allowed="a divisor of 3",
                write="model.num_kv_heads=1",
            ),
        ],
        id="heads-of-llama",
    ),
    pytest.param(
        ["data.seq_len=4096", "data=synthetic", "model=hf", "model.config.model_type=gpt2"],
        Told(
            "data.seq_len=4096", "sequences of at most 1024 tokens", allowed=("1 to 1024",), write="data.seq_len=1024"
        ),
        id="sequences-longer-than-a-table-of-positions-by-default",
    ),
    pytest.param(
        ["data.seq_len=4096", "data=synthetic", "model.max_seq_len=128"],
        Told("data.seq_len=4096", "at most 128 tokens", allowed="1 to 128", write="data.seq_len=128"),
        id="sequence-too-long",
    ),
    pytest.param(
        ["mesh=1x3x5", "data.batch_size=8"],
        [
            Told(
                "mesh=1x3x5 with model=llama", "4 attention heads", "3 ranks of mp", allowed=("1, 2, 4", "mp.base=none")
            ),
            Told("mesh=1x3x5 with model=llama", "4 layers", "5 pipeline stages", allowed=("pp of size 4 or less",)),
        ],
        id="heads-and-layers-of-a-mesh",
    ),
    pytest.param(
        ["mesh=cp4", "data.seq_len=60", "cp.pad=false"],
        Told(
            "data.seq_len=60",
            "4 ranks of cp",
            "2 x 4 parts",
            allowed="multiples of 8, or cp.pad=true",
            write="data.seq_len=56 or cp.pad=true",
        ),
        id="context-parallel-sequence",
    ),
    pytest.param(
        ["model.vocab_size=100"],
        Told("data.tokenizer=bytes", "up to 256", "only 100", allowed=("257",), write="model.vocab_size=257"),
        id="vocabulary-too-small",
    ),
    pytest.param(
        ["trainer.max_steps=-1", "scheduler=constant"],
        Told(
            "trainer.max_steps=-1",
            "never end",
            allowed=("trainer.max_steps", "trainer.max_epochs", "trainer.max_time"),
            write="trainer.max_epochs=1",
        ),
        id="no-end",
    ),
    pytest.param(
        ["trainer.max_time=1h", "scheduler=constant"],
        Told(
            "trainer.max_time=1h",
            "is no time",
            allowed="days:hours:minutes:seconds",
            write="trainer.max_time=00:01:30:00",
        ),
        id="no-time",
    ),
    *(
        pytest.param(
            ["module._target_=json.JSONDecoder", typed],
            Told(typed, "has no effect", "LightningModule of your own", allowed=("configure_optimizers",)),
            id=f"beside-a-module-{typed.partition('=')[0]}",
        )
        for typed in ("optimizer.lr=0.1", "optimizer=sgd", "scheduler=linear", "model.size=1b")
    ),
    pytest.param(
        ["trainer.max_steps=-1", "trainer.max_time=00:01:00:00"],
        Told(
            "trainer.max_time=00:01:00:00 with scheduler=cosine",
            "last step",
            "decay",
            allowed="a scheduler.total_steps, a trainer.max_steps, or scheduler=constant",
            write="scheduler.total_steps=10000",
        ),
        id="decay-without-end",
    ),
    pytest.param(
        ["scheduler.warmup_steps=200"],
        Told(
            "scheduler.warmup_steps=200",
            "longer than the 100 steps",
            allowed="0 to 100",
            write="scheduler.warmup_steps=10",
        ),
        id="warm-up-too-long",
    ),
    pytest.param(
        ["data.path=corpus.txt"],
        Told("data.path=corpus.txt", "no such file"),
        id="text-absent",
    ),
    pytest.param(
        ["data=tokens"],
        Told("data=tokens", "no file is given", allowed=("data.path", ".bin", ".npy"), write="data.path=tokens.bin"),
        id="tokens-without-path",
    ),
    pytest.param(
        ["model=hf", "model.path=./mine/pretraned", "data=chat", "data.path=chats.jsonl", "data.seq_len=8"],
        [
            Told("model.path=./mine/pretraned", "no such directory", write="model.path=mine/pretrained"),
            Told("data.path=chats.jsonl", "no such file"),
        ],
        id="no-such-model-nor-its-tokenizer",
    ),
    pytest.param(
        ["ckpt_path=outputs/none"],
        Told("ckpt_path=outputs/none", "{cwd}/outputs/none", "does not exist", allowed=("{cwd}/outputs",)),
        id="checkpoint-absent",
    ),
    pytest.param(
        ["ckpt_path=last", "resume.allow=[sed]"],
        Told(
            "resume.allow=[sed]",
            "sed",
            allowed="optimizer, seed, batch_size, seq_len, data, model, adapter, base",
            write="resume.allow=[seed]",
        ),
        id="allowed-that-is-not-compared",
    ),
    pytest.param(
        ["resume.allow=[seed]"],
        Told("resume.allow=[seed]", "no checkpoint", allowed=("ckpt_path",), write="ckpt_path=last"),
        id="allowed-without-a-checkpoint",
    ),
    pytest.param(
        ["ckpt_path=last", "resume.allow=seed"],
        Told("resume.allow=seed", "a list of texts", write="'resume.allow=[seed]'"),
        id="allowed-that-is-no-list",
    ),
    pytest.param(
        ["validate", "ckpt_path=last", "resume.allow=[seed]"],
        Told("resume.allow=[seed]", "nothing is compared", allowed=("fit",), write="resume.allow=[]"),
        id="allowed-where-nothing-is-compared",
    ),
    pytest.param(
        ["export"],
        Told(
            "autolaunch export",
            "which checkpoint",
            allowed=("`last`", "output_dir"),
            write="autolaunch export ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
        ),
        id="export-without-checkpoint",
    ),
    pytest.param(
        ["validate", "ckpt_path=last", "output_dir=here"],
        Told(
            "ckpt_path=last",
            "no checkpoint",
            "{cwd}/here/checkpoints",
            allowed=("output_dir",),
            write="autolaunch validate ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
        ),
        id="validate-without-checkpoint",
    ),
    pytest.param(
        ["output_dir=mine/plan.yml"],
        Told("output_dir=mine/plan.yml", "is a file"),
        id="output-is-a-file",
    ),
    pytest.param(
        ["output_dir=mine/plan.yml/run"],
        Told("output_dir=mine/plan.yml/run", "Not a directory"),
        id="output-below-a-file",
    ),
    pytest.param(
        ["--info", "defaults", "modell=llama"],
        Told("modell=llama", "model", write="model=llama"),
        id="page-of-hydra",
    ),
    pytest.param(
        ["model=custom", "model._target_=my_modul.Net"],
        Told("model._target_=my_modul.Net", "my_modul", allowed=("my_modul.py",)),
        id="module-absent",
    ),
    pytest.param(
        ["optimizer=custom", "optimizer._target_=RMSprop"],
        Told("optimizer._target_=RMSprop", "not an import path", allowed=("module.Name",)),
        id="target-that-is-no-path",
    ),
    pytest.param(
        ["+callbacks.early.patience=3"],
        Told(
            "callbacks.early={patience:3}",
            "what it is",
            allowed=("_target_",),
            write="callbacks.early._target_=package.Class",
        ),
        id="callback-without-target",
    ),
    pytest.param(
        ["+module.lr=0.1"],
        Told("module={lr:0.1}", "what it is", allowed=("_target_",), write="module._target_=package.Class"),
        id="module-without-target",
    ),
    pytest.param(
        ["optimizer._target_=collections.OrderedDict"],
        Told(
            "optimizer._target_=collections.OrderedDict",
            "optimizer=adamw",
            allowed="optimizer=custom with optimizer._target_",
            write="optimizer=custom optimizer._target_=collections.OrderedDict",
        ),
        id="target-beside-known-optimizer",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=wrong_type"],
        Told("trainer.max_steps=soon (mine/experiment/wrong_type.yaml)", "whole number"),
        id="own-yaml-wrong-type",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=unknown_key"],
        Told(
            "optimizer.learning_rate=0.1 (mine/experiment/unknown_key.yaml)",
            "no such key",
            allowed="name, _target_, lr, weight_decay, betas, eps, momentum, groups",
        ),
        id="own-yaml-unknown-key",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=no_package"],
        Told("experiment=no_package", "under `experiment`", allowed=("# @package _global_",)),
        id="own-yaml-no-package",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=broken"],
        Told("mine/experiment/broken.yaml, line 3", "not YAML"),
        id="own-yaml-broken",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=unknown_option"],
        Told("dp: zero9 (mine/experiment/unknown_option.yaml)", "zero2", allowed=DP_OPTIONS),
        id="own-yaml-unknown-option",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=bad_mesh"],
        Told("mesh=2x0 (mine/experiment/bad_mesh.yaml)", "size 0", write="mesh=2x1", allowed=("1 or more", "-1")),
        id="own-yaml-bad-mesh",
    ),
    pytest.param(
        ["--config-dir", "mine", "model=nameless"],
        Told("model", "model.name", "model._target_", allowed="llama, hf", write="+model.name=llama"),
        id="own-yaml-nameless-model",
    ),
    pytest.param(
        ["--config-dir", "mine", "model=unknown"],
        Told(
            "model.name=lama (mine/model/unknown.yaml)", "llama", allowed=("llama, hf", "_target_"), write="model=llama"
        ),
        id="own-yaml-unknown-model",
    ),
    pytest.param(
        ["--config-dir", "mine", "model=short", "model.num_layers=2"],
        Told("model.num_layers=2", "not in the YAML file", write="+model.num_layers=2"),
        id="own-yaml-key-not-listed",
    ),
]


Outcome = tuple[int, str, str]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `autolaunch ...` in this process: (exit code, stdout, stderr). Its working directory holds `FILES` only."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (across_keys, arithmetic):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("cpu", None))
    for variable in ("AUTOLAUNCH_NOT_SET", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(variable, raising=False)

    def run(*argv: str) -> Outcome:
        code = cli.run(argv)
        return code, *capfd.readouterr()

    return run


@pytest.mark.parametrize(("argv", "told"), one_in(2, WRONG, full=2))
def test_one_message_and_nothing_else(
    argv: list[str], told: Told | list[Told], command: Callable[..., Outcome]
) -> None:
    before = sorted(Path().rglob("*"))
    code, out, err = command(*argv)
    assert_only_told(err.replace(str(Path.cwd()), "{cwd}"), told)
    assert (code, out) == (2, "")
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("directory", [[], ["--config-dir", "mine"]], ids=["path", "name"])
def test_a_file_that_is_not_utf_8_is_named(directory: list[str], command: Callable[..., Outcome]) -> None:
    Path("mine/experiment/latin.yaml").write_bytes("# @package _global_\nname: caf\xe9\n".encode("latin-1"))
    chosen = "latin" if directory else "mine/experiment/latin.yaml"
    code, out, err = command(*directory, f"experiment={chosen}")
    assert_only_told(err, Told("mine/experiment/latin.yaml, line 2", "not UTF-8", allowed=None))
    assert (code, out) == (2, "")


def test_what_is_switched_off_where_it_is_typed_is_no_mistake() -> None:
    """One line, or one file, is used with and without."""
    for line in (
        ["checkpoint.enabled=false", "checkpoint.every_n_steps=5", "checkpoint.monitor=val_loss"],
        ["checkpoint.monitor=null", "checkpoint.mode=max"],
        ["experiment=pretrain_small", "checkpoint.enabled=false"],
        ["task=plan", "experiment=smoke", "checkpoint.every_n_steps=5"],
    ):
        composed = compose(CommandLine(line))
        assert not list(saving_without_effect(resolved(composed.config), line, composed.origin))


@pytest.mark.parametrize(
    ("argv", "devices", "told"),
    [
        pytest.param(
            ["mesh=4"],
            ("gpu", 2),
            Told("mesh=4", "4 ranks", "2 GPUs", allowed=("up to 2 ranks",), write="mesh=2"),
            id="more-ranks-than-gpus",
        ),
        pytest.param(
            ["mesh=2", "trainer.accelerator=gpu"],
            ("gpu", 0),
            Told("mesh=2", "2 ranks", "0 GPUs", allowed=("the CPU",), write="trainer.accelerator=cpu"),
            id="no-gpu",
        ),
        pytest.param(
            ["mesh=2", "launch.devices=8"],
            ("gpu", 4),
            Told("launch.devices=8", "4 GPUs", allowed="1 to 4", write="launch.devices=null"),
            id="more-devices-than-gpus",
        ),
        pytest.param(
            ["mesh=all", "data.batch_size=8"],
            ("gpu", 3),
            Told(
                "data.batch_size=8",
                "8 sequences",
                "3 data parallel ranks",
                allowed="multiples of 3",
                write="data.batch_size=6 or data.batch_size=9",
            ),
            id="open-axis-takes-every-gpu",
        ),
        pytest.param(
            ["mesh=1x2", "mp=seq_parallel", "compile=true", "mp.overlap=true"],
            ("cpu", None),
            Told("mp.overlap=true on a CPU", "only GPUs", allowed=("mp.overlap=false",), write="mp.overlap=false"),
            id="overlap-on-cpu",
        ),
        pytest.param(
            [
                *("launch=slurm", "launch.gpus_per_node=0", "launch.submit=false"),
                *("mesh=1x2", "mp=seq_parallel", "compile=true", "mp.overlap=true"),
            ],
            ("gpu", 2),
            Told("mp.overlap=true on a CPU", "only GPUs", allowed=("mp.overlap=false",), write="mp.overlap=false"),
            id="overlap-on-nodes-of-which-no-gpu-is-asked",
        ),
        pytest.param(
            ["mesh=1x2", "mp=seq_parallel", "mp.overlap=true"],
            ("gpu", 2),
            Told(
                "mp.overlap=true with compile=false",
                "the compiler that joins",
                allowed=("compile=true",),
                write="compile=true mp.overlap=true",
            ),
            id="overlap-without-compile",
        ),
        pytest.param(
            ["mesh=2", "compile=true", "mp.overlap=true"],
            ("gpu", 2),
            Told("mp.overlap=true with mesh=2", "exchanges nothing", allowed=("mp of 2",), write="mp.overlap=false"),
            id="overlap-without-mp",
        ),
        pytest.param(
            ["mesh=1x2", "mp=tensor_parallel", "compile=true", "mp.overlap=true"],
            ("gpu", 2),
            Told(
                "mp.overlap=true with mp=tensor_parallel",
                "only sequence parallelism",
                allowed=("mp=seq_parallel",),
                write="mp=seq_parallel mp.overlap=true",
            ),
            id="overlap-of-whole-sequences",
        ),
    ],
)
def test_devices(
    argv: list[str],
    devices: tuple[str, int | None],
    told: Told,
    command: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (across_keys, arithmetic):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: devices)
    code, out, err = command(*argv)
    assert_only_told(err, told)
    assert (code, out) == (2, "")


def test_a_machine_without_the_memory_for_as_many_processes(
    command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(across_keys, "memory_gib", lambda: 4.0)
    code, _, err = command("mesh=64", "data=synthetic", "data.batch_size=64", "data.num_validation_sequences=0")
    assert code == 2
    assert_only_told(
        err,
        Told("mesh=64", "64 processes", "12.5 GiB", "4.0 GiB", allowed=("20 ranks", "launch.devices"), write="mesh=20"),
    )


def test_float8_without_its_library_or_anything_to_gain(
    command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    code, _, err = command("precision=float8", "adapter=lora", "data=synthetic")
    assert code == 2
    assert_only_told(
        err,
        [
            Told("precision=float8", "torchao is not installed", write="pip install 'autolaunch[float8]'"),
            Told("precision=float8 with adapter=lora", "frozen", allowed=("bf16-mixed",), write="precision=bf16-mixed"),
        ],
    )
    code, _, err = command("plan", "cluster=a100_80x8", "precision=float8", "data=synthetic")  # nothing multiplies here
    assert code == 2
    told = Told("precision=float8", "no fp8 for a100_80", allowed=("8.9 or more",), write="precision=bf16-mixed")
    assert_only_told(err, told)


def test_a_person_who_asks_for_tracebacks_gets_them(
    command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match=r"Could not override 'trainer.max_step'"):
        command("trainer.max_step=3")


SUBPROCESS = """
import sys
from autolaunch.cli import run
code = run(sys.argv[1:])
heavy = {"torch", "lightning", "numpy", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        pytest.param(
            ["trainer.max_step=10"],
            Told("trainer.max_step=10", "trainer.max_steps", write="trainer.max_steps=10"),
            id="refused-by-hydra",
        ),
        pytest.param(
            ["optimizer.lr=-1"], Told("optimizer.lr=-1", "out of range", allowed="0 or more"), id="by-the-schema"
        ),
        pytest.param(
            ["mesh=2", "data.batch_size=7", "trainer.accelerator=cpu"],
            Told(
                "data.batch_size=7",
                "7 sequences",
                "2 data parallel ranks",
                allowed="multiples of 2",
                write="data.batch_size=6 or data.batch_size=8",
            ),
            id="by-the-sizes",
        ),
        pytest.param(
            ["-m", "dp=fsdp,zero9"],
            Told("dp=zero9", "zero2", allowed=DP_OPTIONS, write="dp=zero2"),
            id="of-a-sweep",
        ),
        pytest.param(["--cfg", "job", "seeed=3"], Told("seeed=3", "seed", write="seed=3"), id="of-a-page"),
    ],
)
def test_in_a_process_of_its_own(argv: list[str], told: Told, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", SUBPROCESS, *argv],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert_only_told(result.stderr, told)
    assert (result.returncode, result.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []
