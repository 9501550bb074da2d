"""Every wrong command line that we could think of: one message, exit code 2, nothing written, nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autolaunch import check, cli

FILES = {
    "mine/plan.yml": "name: x\n",
    "mine/experiment/wrong_type.yaml": "# @package _global_\ntrainer:\n  max_steps: soon\n",
    "mine/experiment/unknown_key.yaml": "# @package _global_\noptimizer:\n  learning_rate: 0.1\n",
    "mine/experiment/no_package.yaml": "seed: 3\n",
    "mine/experiment/broken.yaml": "# @package _global_\nseed: [1\nname: x\n",
    "mine/experiment/unknown_option.yaml": "# @package _global_\ndefaults:\n  - override /dp: zero9\n",
    "mine/experiment/bad_mesh.yaml": "# @package _global_\ndefaults:\n  - override /mesh: 2x0\n",
    "mine/hydra/launcher/fake.yaml": "_target_: nowhere.Launcher\n",
    "mine/model/nameless.yaml": "hidden_size: 64\n",
    "mine/model/unknown.yaml": "name: lama\nhidden_size: 64\n",
    "mine/model/short.yaml": "name: llama\nhidden_size: 64\nnum_heads: 4\n",
}
"""What lies in the working directory: the mistakes of a user's own YAML files."""

WRONG = [
    pytest.param(
        ["mesh=1024", "data.batch_size=1024", "data=synthetic", "data.num_validation_sequences=0"],
        "mesh=1024: 1,024 processes, and this machine has no GPU to give each of them\n"
        "  allowed: up to 64 ranks; more of them if launch.devices says so\n"
        "  write:   mesh=1024 launch.devices=1024",
        id="mesh-of-gpus-on-a-cpu",
    ),
    pytest.param(
        ["cluster=h100"],
        "cluster=h100: fit runs on the devices that there are\n"
        "  allowed: `plan`, which chooses for any cluster; mesh=auto; -m search=auto, which also measures\n"
        "  write:   autolaunch plan cluster=h100",
        id="cluster-of-a-run",
    ),
    pytest.param(
        ["mesh=2", "--why", "mp=2"],
        "why='mp=2': there is no choice to ask about\n"
        "  allowed: `plan` with a cluster\n"
        "  write:   autolaunch plan cluster=local --why ...",
        id="why-without-a-choice",
    ),
    pytest.param(
        ["search=auto", "mesh=2"],
        "search=auto: a search runs several jobs, and this is a single run\n"
        "  write:   autolaunch -m search=auto mesh=2",
        id="search-without-m",
    ),
    pytest.param(
        ["-m", "mesh=auto"],
        "mesh=auto: every job of a sweep would choose for itself\n"
        "  allowed: -m search=auto, which measures what the planner proposes\n"
        "  write:   autolaunch -m search=auto",
        id="auto-in-a-sweep",
    ),
    pytest.param(
        ["-m", "plan", "cluster=h100,a100_80"],
        "-m with cluster=h100: a sweep chooses no mesh: it runs what is typed\n"
        "  allowed: one plan after the other, without -m; -m search=auto, which measures\n"
        "  write:   autolaunch plan cluster=...",
        id="cluster-of-a-sweep",
    ),
    pytest.param(
        ["plan", "cluster=nowhere.yaml"],
        "cluster=nowhere.yaml: no such file\n"
        "  allowed: a name of conf/cluster or of --config-dir, or the path of a .yaml file",
        id="no-such-cluster-file",
    ),
    pytest.param(
        ["trian", "model=llama"],
        "autolaunch trian: no such task; did you mean fit?\n"
        "  allowed: fit, validate, test, predict, plan, calibrate, export\n"
        "  write:   autolaunch fit model=llama",
        id="unknown-task",
    ),
    pytest.param(
        ["eval"],
        "autolaunch eval: no such task; did you mean validate?\n"
        "  allowed: fit, validate, test, predict, plan, calibrate, export\n"
        "  write:   autolaunch validate",
        id="task-of-another-tool",
    ),
    pytest.param(
        ["xyzzy", "mesh=2"],
        "autolaunch xyzzy: no such task\n"
        "  allowed: fit, validate, test, predict, plan, calibrate, export\n"
        "  write:   autolaunch fit mesh=2",
        id="task-like-nothing",
    ),
    pytest.param(
        ["mesh=2", "plan"],
        "plan: the task is the first word\n  write:   autolaunch plan mesh=2",
        id="task-not-first",
    ),
    pytest.param(
        ["mesh=2", "trainer.max_steps"],
        "trainer.max_steps: neither a task nor key=value\n  write:   trainer.max_steps=...",
        id="word-without-value",
    ),
    pytest.param(
        ["dp2xmp2"],
        "dp2xmp2: a mesh is given by its key\n  write:   mesh=dp2xmp2",
        id="mesh-without-key",
    ),
    pytest.param(
        ["--verison"],
        "--verison: no such flag; did you mean --version?\n  write:   autolaunch --help",
        id="unknown-flag",
    ),
    pytest.param(
        ["--max-steps=10"],
        "--max-steps=10: keys are written without dashes\n  write:   autolaunch max_steps=10",
        id="key-with-dashes",
    ),
    pytest.param(
        ["--config-name"],
        "--config-name: expected one argument\n  write:   autolaunch --help",
        id="flag-without-value",
    ),
    pytest.param(
        ["--cfg", "everything"],
        "--cfg everything: there is no such part of the config\n  allowed: job, hydra, all",
        id="cfg-of-nothing",
    ),
    pytest.param(
        ["-m", "--cfg", "job"],
        "--multirun: cannot go together with --cfg",
        id="cfg-and-sweep",
    ),
    pytest.param(
        ["--resolve"],
        "--resolve: needs --cfg\n  write:   autolaunch --cfg job --resolve",
        id="resolve-without-cfg",
    ),
    pytest.param(
        ["--config-dir", "nowhere"],
        "--config-dir nowhere: no such directory",
        id="config-dir-absent",
    ),
    pytest.param(
        ["--config-name", "confg"],
        "--config-name confg: no such primary config; did you mean config?\n  allowed: config",
        id="config-name-absent",
    ),
    pytest.param(
        ["--info", "trainer.max_step"],
        "--info trainer.max_step: no such group or key; did you mean trainer.max_steps?\n"
        "  allowed: a group (model, data, mesh, dp, mp, pp, cp, optimizer, scheduler, trainer, logger, "
        "launch, cluster, search, experiment), any key, or all, config, defaults, defaults-tree, plugins, searchpath\n"
        "  write:   autolaunch --info trainer.max_steps",
        id="info-unknown",
    ),
    pytest.param(
        ["--info", "lr"],
        "--info lr: no such group or key; did you mean optimizer.lr?\n"
        "  allowed: a group (model, data, mesh, dp, mp, pp, cp, optimizer, scheduler, trainer, logger, "
        "launch, cluster, search, experiment), any key, or all, config, defaults, defaults-tree, plugins, searchpath\n"
        "  write:   autolaunch --info optimizer.lr",
        id="info-by-last-name",
    ),
    pytest.param(
        ["trainer.max_step=10"],
        "trainer.max_step=10: no such key; did you mean trainer.max_steps?\n  write:   trainer.max_steps=10",
        id="unknown-key-near",
    ),
    pytest.param(
        ["lr=1e-3"],
        "lr=1e-3: no such key; did you mean optimizer.lr?\n  write:   optimizer.lr=1e-3",
        id="unknown-key-of-another-group",
    ),
    pytest.param(
        ["trainer.batch_size=8"],
        "trainer.batch_size=8: no such key; did you mean data.batch_size?\n  write:   data.batch_size=8",
        id="unknown-key-in-wrong-group",
    ),
    pytest.param(
        ["model.frobnicate=1"],
        "model.frobnicate=1: no such key\n  write:   autolaunch --info model",
        id="unknown-key-like-nothing",
    ),
    pytest.param(
        ["checkpoint.xyz=1"],
        "checkpoint.xyz=1: no such key\n  allowed: enabled, every_n_steps, keep_last, monitor, mode, asynchronous",
        id="unknown-key-in-small-group",
    ),
    pytest.param(
        ["qwertz=1"],
        "qwertz=1: no such key\n  write:   autolaunch --help",
        id="unknown-key-top-level",
    ),
    pytest.param(
        ["presicion=bf16-mixed"],
        "presicion=bf16-mixed: no such key; did you mean precision?\n  write:   precision=bf16-mixed",
        id="unknown-key-top-level-near",
    ),
    pytest.param(
        ["seed.value=1"],
        "seed.value=1: seed is a value, it has no keys of its own\n  write:   seed=...",
        id="key-below-a-value",
    ),
    pytest.param(
        ["+trainer.max_stepz=3"],
        "+trainer.max_stepz=3: no such key; did you mean trainer.max_steps?\n  write:   trainer.max_steps=3",
        id="added-unknown-key",
    ),
    pytest.param(
        ["+trainer.max_steps=3"],
        "+trainer.max_steps=3: the key is there already; + adds new keys\n  write:   trainer.max_steps=3",
        id="added-known-key",
    ),
    pytest.param(
        ["~trainer.foo"],
        "~trainer.foo: there is no such key to delete\n  write:   autolaunch --info trainer",
        id="deleted-unknown-key",
    ),
    pytest.param(
        ["db/engine=fast"],
        "db/engine=fast: no such config group\n"
        "  allowed: cluster, cp, data, dp, experiment, launch, logger, mesh, model, mp, optimizer, pp, scheduler, "
        "search, trainer",
        id="unknown-group",
    ),
    pytest.param(
        ["model@x=llama"],
        "model@x=llama: no such config group; did you mean model?\n"
        "  allowed: cluster, cp, data, dp, experiment, launch, logger, mesh, model, mp, optimizer, pp, scheduler, "
        "search, trainer\n"
        "  write:   model=llama",
        id="group-of-package",
    ),
    pytest.param(
        ["trainer.callbacks.lr.logging=step"],
        "trainer.callbacks.lr={logging:step}: does not say what it is\n"
        "  allowed: a mapping with _target_, the import path of a class\n"
        "  write:   trainer.callbacks.lr._target_=package.Class",
        id="key-of-open-node",
    ),
    pytest.param(
        ["model=custom", "model._target_=collections.OrderedDict", "model.in_features=4"],
        "model.in_features=4: model has no such key yet\n"
        "  allowed: a + in front of a new key\n"
        "  write:   +model.in_features=4",
        id="argument-of-own-model",
    ),
    pytest.param(
        ["model=lama", "trainer.max_step=3", "data.seq_len=0", "mesh=0"],
        "mesh=0: an axis of size 0\n"
        "  allowed: every size is 1 or more; one may be -1 (what is left)\n"
        "model=lama: model has no option 'lama'; did you mean llama?\n"
        "  allowed: custom, hf, llama\n"
        "  write:   model=llama\n"
        "trainer.max_step=3: no such key; did you mean trainer.max_steps?\n"
        "  write:   trainer.max_steps=3\n"
        "data.seq_len=0: out of range\n"
        "  allowed: 1 or more",
        id="several-at-once",
    ),
    pytest.param(
        ["model=lama"],
        "model=lama: model has no option 'lama'; did you mean llama?\n"
        "  allowed: custom, hf, llama\n"
        "  write:   model=llama",
        id="unknown-model",
    ),
    pytest.param(
        ["dp=zero4"],
        "dp=zero4: dp has no option 'zero4'; did you mean zero2?\n"
        "  allowed: ddp, fsdp, hsdp, zero1, zero2\n"
        "  write:   dp=zero2",
        id="unknown-dp",
    ),
    pytest.param(
        ["dp=zero3"],
        "dp=zero3: dp has no option 'zero3'; did you mean fsdp?\n"
        "  allowed: ddp, fsdp, hsdp, zero1, zero2\n"
        "  write:   dp=fsdp",
        id="option-of-another-tool",
    ),
    pytest.param(
        ["trainer=3"],
        "trainer=3: trainer has no option '3'\n  allowed: default",
        id="option-that-is-a-number",
    ),
    pytest.param(
        ["mp=seq_paralel"],
        "mp=seq_paralel: mp has no option 'seq_paralel'; did you mean seq_parallel?\n"
        "  allowed: auto, none, seq_parallel, tensor_parallel\n"
        "  write:   mp=seq_parallel",
        id="unknown-mp",
    ),
    pytest.param(
        ["experiment=smke"],
        "experiment=smke: experiment has no option 'smke'; did you mean smoke?\n"
        "  allowed: pretrain_small, smoke\n"
        "  write:   experiment=smoke",
        id="unknown-experiment",
    ),
    pytest.param(
        ["experiment=outputs/run/plan.yaml"],
        "experiment=outputs/run/plan.yaml: no such file\n"
        "  allowed: a name of conf/experiment or of --config-dir, or the path of a .yaml file",
        id="experiment-file-absent",
    ),
    pytest.param(
        ["experiment=mine/plan.yml"],
        "experiment=mine/plan.yml: config files end in .yaml\n"
        "  allowed: a name of conf/experiment or of --config-dir, or the path of a .yaml file",
        id="experiment-file-yml",
    ),
    pytest.param(
        ["hydra/launcher=slurm"],
        "hydra/launcher=slurm: hydra/launcher has no option 'slurm'\n  allowed: basic",
        id="hydra-option",
    ),
    pytest.param(
        ["logger=[tensorboard,wanddb]"],
        "logger=[tensorboard,wanddb]: logger has no option 'wanddb'; did you mean wandb?\n"
        "  allowed: csv, mlflow, tensorboard, wandb\n"
        "  write:   logger=[tensorboard,wandb]",
        id="one-of-several-loggers",
    ),
    pytest.param(
        ["name=a=b"],
        "name=a=b: Hydra cannot read this value\n  allowed: a text in quotes\n  write:   'name=\"a=b\"'",
        id="value-with-equals",
    ),
    pytest.param(
        ["data.path=a(b"],
        "data.path=a(b: Hydra cannot read this value\n  allowed: a text in quotes\n  write:   'data.path=\"a(b\"'",
        id="value-with-bracket",
    ),
    pytest.param(
        ["2mesh=3"],
        "2mesh=3: '2mesh' cannot be the name of a key\n  allowed: names of keys joined by dots\n  write:   key=value",
        id="key-that-is-no-name",
    ),
    pytest.param(
        ["dp=fsdp,zero1"],
        "dp=fsdp,zero1: several values, but no -m to run them one after the other\n"
        "  allowed: one value\n"
        "  write:   autolaunch -m dp=fsdp,zero1",
        id="sweep-without-m",
    ),
    pytest.param(
        ["data.path=a.txt,b.txt"],
        "data.path=a.txt,b.txt: several values, but no -m to run them one after the other\n"
        "  allowed: one value, or a list: 'data.path=[a.txt,b.txt]'\n"
        "  write:   autolaunch -m data.path=a.txt,b.txt",
        id="list-without-brackets",
    ),
    pytest.param(
        ["seed=range(3)"],
        "seed=range(3): several values, but no -m to run them one after the other\n"
        "  allowed: one value\n"
        "  write:   autolaunch -m seed=range(3)",
        id="range-without-m",
    ),
    pytest.param(
        ["-m", "data.path=glob(zz*)"],
        "data.path=glob(zz*): stands for no value at all",
        id="empty-sweep",
    ),
    pytest.param(
        ["-m", "trainer.max_step=1,2"],
        "trainer.max_step=1: no such key; did you mean trainer.max_steps?\n  write:   trainer.max_steps=1",
        id="sweep-with-unknown-key",
    ),
    pytest.param(
        ["-m", "dp=fsdp,zero9"],
        "dp=zero9: dp has no option 'zero9'; did you mean zero2?\n"
        "  allowed: ddp, fsdp, hsdp, zero1, zero2\n"
        "  write:   dp=zero2",
        id="sweep-with-unknown-option",
    ),
    pytest.param(
        ["-m", "mesh=1,2x0"],
        "mesh=2x0: an axis of size 0\n  allowed: every size is 1 or more; one may be -1 (what is left)",
        id="sweep-with-bad-mesh",
    ),
    pytest.param(
        ["-m", "output_dir=a,b"],
        "output_dir=a,b: a sweep has one directory, and in it one for each job\n"
        "  allowed: one directory\n"
        "  write:   output_dir=outputs/sweep",
        id="sweep-of-directories",
    ),
    pytest.param(
        ["--config-dir", "mine", "hydra/launcher=fake", "mesh=2"],
        "hydra/launcher=fake: starts the jobs of a sweep, and this is a single run\n"
        "  write:   autolaunch -m hydra/launcher=fake mesh=2",
        id="launcher-without-m",
    ),
    pytest.param(
        ["trainer.max_steps=${steps}"],
        "trainer.max_steps=${steps}: Interpolation key 'steps' not found",
        id="interpolation-of-nothing",
    ),
    pytest.param(
        ["name=${name}"],
        "name=${name}: Recursive interpolation detected",
        id="interpolation-of-itself",
    ),
    pytest.param(
        ["name=${oc.env:AUTOLAUNCH_NOT_SET}"],
        "name=${oc.env:AUTOLAUNCH_NOT_SET}: Environment variable 'AUTOLAUNCH_NOT_SET' not found",
        id="interpolation-of-unset-variable",
    ),
    pytest.param(
        ["model=custom"],
        "model._target_: must be given\n"
        "  allowed: Import path of a torch.nn.Module class, or of a function that returns a module.\n"
        "  write:   model._target_=...",
        id="missing-target",
    ),
    pytest.param(
        ["optimizer=custom"],
        "optimizer._target_: must be given\n"
        "  allowed: Import path of a torch.optim.Optimizer class (optimizer=custom).\n"
        "  write:   optimizer._target_=...",
        id="missing-optimizer-target",
    ),
    pytest.param(
        ["trainer.max_steps=abc"],
        "trainer.max_steps=abc: must be a whole number",
        id="text-for-int",
    ),
    pytest.param(
        ["trainer.max_steps=1e3"],
        "trainer.max_steps=1e3: must be a whole number\n  write:   trainer.max_steps=1000",
        id="float-for-int",
    ),
    pytest.param(
        ["data.batch_size=2.5"],
        "data.batch_size=2.5: must be a whole number",
        id="fraction-for-int",
    ),
    pytest.param(
        ["seed=true"],
        "seed=true: must be a whole number",
        id="bool-for-int",
    ),
    pytest.param(
        ["data.seq_len=null"],
        "data.seq_len=null: must be a whole number",
        id="null-for-int",
    ),
    pytest.param(
        ["optimizer.lr=fast"],
        "optimizer.lr=fast: must be a number",
        id="text-for-float",
    ),
    pytest.param(
        ["checkpoint.enabled=2"],
        "checkpoint.enabled=2: must be true or false",
        id="int-for-bool",
    ),
    pytest.param(
        ["dp.cpu_offload=maybe"],
        "dp.cpu_offload=maybe: must be true or false",
        id="text-for-bool",
    ),
    pytest.param(
        ["name=[a,b]"],
        "name=[a,b]: must be a text",
        id="list-for-text",
    ),
    pytest.param(
        ["optimizer.betas=0.9"],
        "optimizer.betas=0.9: must be a list of numbers\n  write:   optimizer.betas=[0.9]",
        id="number-for-list",
    ),
    pytest.param(
        ["optimizer.betas=[0.9,x]"],
        "optimizer.betas=[0.9,x]: must be a list of numbers",
        id="wrong-item-in-list",
    ),
    pytest.param(
        ["trainer.callbacks=early_stopping"],
        "trainer.callbacks=early_stopping: must be a mapping",
        id="text-for-mapping",
    ),
    pytest.param(
        ["checkpoint=off"],
        "checkpoint=off: is a group of keys, not a single value\n  write:   autolaunch --info checkpoint",
        id="value-for-node",
    ),
    pytest.param(
        ["precision=bf16"],
        "precision=bf16: not one of the choices\n"
        "  allowed: 32-true, bf16-mixed, bf16-true\n"
        "  write:   precision=bf16-mixed",
        id="choice-by-prefix",
    ),
    pytest.param(
        ["model.size=7b"],
        "model.size=7b: not one of the choices\n  allowed: debug, 1b, 8b, 70b, 405b",
        id="choice-wrong",
    ),
    pytest.param(
        ["dp.sharding_level=4"],
        "dp.sharding_level=4: not one of the choices\n  allowed: 0, 1, 2, 3",
        id="choice-of-numbers",
    ),
    pytest.param(
        ["dp.sharding_level=true"],
        "dp.sharding_level=true: must be a whole number\n  allowed: 0, 1, 2, 3",
        id="choice-bool-for-number",
    ),
    pytest.param(
        ["optimizer.lr=-1"],
        "optimizer.lr=-1: out of range\n  allowed: 0 or more",
        id="below-zero",
    ),
    pytest.param(
        ["data.batch_size=0"],
        "data.batch_size=0: out of range\n  allowed: 1 or more",
        id="zero-size",
    ),
    pytest.param(
        ["data.validation_fraction=1"],
        "data.validation_fraction=1: out of range\n  allowed: 0 or more, less than 1",
        id="share-of-one",
    ),
    pytest.param(
        ["seed=-1"],
        "seed=-1: out of range\n  allowed: 0 or more",
        id="seed-negative",
    ),
    pytest.param(
        ["recompute=half"],
        "recompute=half: no such way of activation checkpointing\n"
        "  allowed: none, full, selective, or a number n for every n-th block",
        id="recompute-wrong",
    ),
    pytest.param(
        ["task=train"],
        "task=train: not one of the choices\n  allowed: fit, validate, test, predict, plan, calibrate, export",
        id="task-by-key",
    ),
    pytest.param(
        ["mesh=2x0"],
        "mesh=2x0: an axis of size 0\n  allowed: every size is 1 or more; one may be -1 (what is left)",
        id="mesh-zero",
    ),
    pytest.param(
        ["mesh=2x1x1x1x2"],
        "mesh=2x1x1x1x2: 5 sizes, but there are four axes\n"
        "  allowed: dp, mp, pp, cp sizes in this order (8, 4x2, 2x2x2) or by name (dp4xmp2, dp-1xmp2)",
        id="mesh-five-axes",
    ),
    pytest.param(
        ["mesh=dp2xep2"],
        "mesh=dp2xep2: no axis is called 'ep'\n"
        "  allowed: dp, mp, pp, cp sizes in this order (8, 4x2, 2x2x2) or by name (dp4xmp2, dp-1xmp2)",
        id="mesh-unknown-axis",
    ),
    pytest.param(
        ["mesh=dp2xdp2"],
        "mesh=dp2xdp2: the axis dp is given twice\n"
        "  allowed: dp, mp, pp, cp sizes in this order (8, 4x2, 2x2x2) or by name (dp4xmp2, dp-1xmp2)",
        id="mesh-axis-twice",
    ),
    pytest.param(
        ["mesh=-1x-1"],
        "mesh=-1x-1: more than one size is -1\n  allowed: every size is 1 or more; one may be -1 (what is left)",
        id="mesh-two-open",
    ),
    pytest.param(
        ["mesh=large"],
        "mesh=large: mesh has no option 'large'\n"
        "  allowed: 2x2, 2x2x2, 4x2, all, dp-1xmp2, dp4xmp2, or any other shape",
        id="mesh-word",
    ),
    pytest.param(
        ["mesh=1e3"],
        "mesh=1e3: mesh has no option '1e3'\n  allowed: 2x2, 2x2x2, 4x2, all, dp-1xmp2, dp4xmp2, or any other shape",
        id="mesh-number-format",
    ),
    pytest.param(
        ["mesh.order=[dp,mp]"],
        "mesh.order=dp,mp: it must name each of the four axes once\n"
        "  allowed: outermost to innermost, e.g. pp,dp,cp,mp\n"
        "  write:   mesh.order=[pp,dp,cp,mp]",
        id="mesh-order",
    ),
    pytest.param(
        ["mesh.dp=0"],
        "mesh=0: an axis of size 0\n  allowed: every size is 1 or more; one may be -1 (what is left)",
        id="mesh-key-zero",
    ),
    pytest.param(
        ["mesh=-1"],
        "mesh=-1: -1 takes what is left of the devices, but any number of ranks can share a CPU\n"
        "  allowed: a size, or launch.devices beside it\n"
        "  write:   mesh=-1 launch.devices=2",
        id="mesh-open-on-cpu",
    ),
    pytest.param(
        ["mesh=4", "launch.devices=3"],
        "mesh=4: 4 ranks, but launch.devices=3\n  allowed: a mesh of up to 3 ranks\n  write:   mesh=3",
        id="mesh-above-devices",
    ),
    pytest.param(
        ["mesh=dp-1xmp2", "launch.devices=3"],
        "mesh=-1x2: dp=-1 takes what is left of 3 devices, but the other axes need multiples of 2\n"
        "  allowed: other axes whose product divides 3",
        id="mesh-open-does-not-divide",
    ),
    pytest.param(
        ["mesh=2x2", "mp=none"],
        "mesh=2x2 with mp=none: the mesh has 2 ranks along mp, but mp=none uses only one\n"
        "  allowed: mp=auto, tensor_parallel, seq_parallel, or a plan of your own\n"
        "  write:   mp=auto",
        id="mesh-without-axis",
    ),
    pytest.param(
        ["mesh=2x2", "compile=true"],
        "compile=true with mesh=2x2: torch.compile does not follow tensors that are divided along mp through a block\n"
        "  allowed: compile=false, or a mesh with mp of size 1\n"
        "  write:   compile=false",
        id="compile-with-mp",
    ),
    pytest.param(
        [
            "+mp.plan={fc1: ColumnParallel, layers.*.\\(: RowWiseParallel, fc2: [RowWiseParallel, {ColWiseParallel: "
            "{gather: true}}], fc3: {_target_: absent_package.Style}, fc4: null}"
        ],
        "mp.plan: fc1: no style is called 'ColumnParallel'; did you mean ColWiseParallel?\n"
        "  allowed: ColWiseParallel, RowWiseParallel, SequenceParallelBegin, SequenceParallelEnd, "
        "SequenceParallelEnable, SequenceParallelDisable, PrepareContextParallel, ContextParallel, PrepareLayerInput, "
        "PrepareLayerOutput\n"
        "mp.plan: 'layers.*.(': not a pattern: missing ), unterminated subpattern at position 15\n"
        "  allowed: names, *, or a regular expression\n"
        "mp.plan: fc2: ColWiseParallel has no argument 'gather'\n"
        "  allowed: gather_output, shard_dim\n"
        "mp.plan: fc3._target_=absent_package.Style: no module absent_package can be imported from here\n"
        "  allowed: an installed package, or absent_package.py in the working directory",
        id="plan-with-mistakes",
    ),
    pytest.param(
        ["+mp.plan.model.lm_head=ColWiseParallel"],
        "mp.plan.model.lm_head: dots in a key of the command line make groups of keys, not a name of a module\n"
        "  allowed: rules in braces\n"
        "  write:   '+mp.plan={model.lm_head: ...}'",
        id="rule-with-dots",
    ),
    pytest.param(
        ["+model.mp_plans.column.lm_head=ColWiseParallel"],
        "model.mp_plans.column: no such plan\n  allowed: tensor_parallel, seq_parallel",
        id="plan-of-an-unknown-way",
    ),
    pytest.param(
        ["mesh=2x2x1x2", "cp=none"],
        "mesh=2x2x1x2 with cp=none: the mesh has 2 ranks along cp, but cp=none uses only one\n"
        "  allowed: cp=gather, ring, ulysses, usp\n"
        "  write:   cp=gather",
        id="mesh-with-an-axis-that-is-none",
    ),
    pytest.param(
        ["mesh=4", "dp=hsdp", "dp.replicate=3"],
        "dp.replicate=3 dp.shard=null: their product must be the size of the dp axis, 4\n"
        "  allowed: replicate x shard = 1 x 4, 2 x 2, 4 x 1",
        id="hybrid-does-not-multiply",
    ),
    pytest.param(
        ["mesh=3", "dp=hsdp", "data.batch_size=3"],
        "dp.replicate=2 dp.shard=null: their product must be the size of the dp axis, 3\n"
        "  allowed: replicate x shard = 1 x 3, 3 x 1",
        id="hybrid-default",
    ),
    pytest.param(
        ["dp=ddp", "dp.cpu_offload=true"],
        "dp.cpu_offload=true with dp.sharding_level=0: only sharded state can be kept in host memory\n"
        "  allowed: dp.sharding_level 1, 2 or 3\n"
        "  write:   dp.sharding_level=3 dp.cpu_offload=true",
        id="offload-of-nothing",
    ),
    pytest.param(
        ["mesh=2", "data.batch_size=7"],
        "data.batch_size=7: 7 sequences cannot be shared evenly by 2 data parallel ranks in 1 microbatches\n"
        "  allowed: multiples of 2 x 1 = 2\n"
        "  write:   data.batch_size=6 or data.batch_size=8",
        id="batch-not-divisible",
    ),
    pytest.param(
        ["mesh=2", "data.microbatches=3"],
        "data.batch_size=16: 16 sequences cannot be shared evenly by 2 data parallel ranks in 3 microbatches\n"
        "  allowed: multiples of 2 x 3 = 6\n"
        "  write:   data.batch_size=12 or data.batch_size=18",
        id="batch-not-divisible-by-microbatches",
    ),
    pytest.param(
        ["model.hidden_size=100", "model.num_heads=3"],
        "model.num_heads=3: it must divide model.hidden_size=100, or model.head_dim must be set\n"
        "  allowed: a divisor of 100\n"
        "  write:   model.num_heads=2\n"
        "model.num_kv_heads=2: every key/value head serves equally many query heads, so it, which is size "
        "debug's own, must divide model.num_heads=3\n"
        "  allowed: a divisor of 3\n"
        "  write:   model.num_kv_heads=1",
        id="heads-of-llama",
    ),
    pytest.param(
        ["data.seq_len=4096", "data=synthetic", "model.max_seq_len=128"],
        "data.seq_len=4096: the model takes sequences of at most 128 tokens\n"
        "  allowed: 1 to 128\n"
        "  write:   data.seq_len=128",
        id="sequence-too-long",
    ),
    pytest.param(
        ["mesh=1x3x5", "data.batch_size=8"],
        "mesh=1x3x5 with model=llama: 4 attention heads cannot be shared evenly by 3 ranks of mp\n"
        "  allowed: mp of size 1, 2, 4, or a plan of your own that leaves attention whole, with mp.base=none\n"
        "mesh=1x3x5 with model=llama: 4 layers cannot fill 5 pipeline stages\n"
        "  allowed: pp of size 4 or less, or more layers",
        id="heads-and-layers-of-a-mesh",
    ),
    pytest.param(
        ["mesh=cp4", "data.seq_len=60"],
        "data.seq_len=60: 4 ranks of cp cut a sequence into 2 x 4 parts of equal length\n"
        "  allowed: multiples of 8, or cp.pad=true\n"
        "  write:   data.seq_len=56 or cp.pad=true",
        id="context-parallel-sequence",
    ),
    pytest.param(
        ["model.vocab_size=100"],
        "data.tokenizer=bytes: token ids up to 256, but the model knows only 100\n"
        "  allowed: a model with a vocabulary of 257 or more\n"
        "  write:   model.vocab_size=257",
        id="vocabulary-too-small",
    ),
    pytest.param(
        ["trainer.max_steps=-1", "scheduler=constant"],
        "trainer.max_steps=-1: the training would never end\n"
        "  allowed: a limit in trainer.max_steps, trainer.max_epochs or trainer.max_time\n"
        "  write:   trainer.max_epochs=1",
        id="no-end",
    ),
    pytest.param(
        ["trainer.max_steps=-1", "trainer.max_epochs=1"],
        "trainer.max_steps=-1 with scheduler=cosine: without a last step the rate has no step at which its "
        "decay ends\n"
        "  allowed: a scheduler.total_steps, a trainer.max_steps, or scheduler=constant\n"
        "  write:   scheduler.total_steps=10000",
        id="decay-without-end",
    ),
    pytest.param(
        ["scheduler.warmup_steps=200"],
        "scheduler.warmup_steps=200: the warm-up is longer than the 100 steps of the schedule\n"
        "  allowed: 0 to 100\n"
        "  write:   scheduler.warmup_steps=10",
        id="warm-up-too-long",
    ),
    pytest.param(
        ["data.path=corpus.txt"],
        "data.path=corpus.txt: no such file or directory",
        id="text-absent",
    ),
    pytest.param(
        ["data=tokens"],
        "data=tokens: no file is given\n"
        "  allowed: data.path: a .bin or .npy file, a directory, a glob, or a list of them\n"
        "  write:   data.path=tokens.bin",
        id="tokens-without-path",
    ),
    pytest.param(
        ["ckpt_path=outputs/none"],
        "ckpt_path=outputs/none: {cwd}/outputs/none does not exist\n"
        "  allowed: a complete checkpoint; there is none in {cwd}/outputs",
        id="checkpoint-absent",
    ),
    pytest.param(
        ["export"],
        "autolaunch export: which checkpoint is to be exported is not said\n"
        "  allowed: the path of a checkpoint, or `last` with the output_dir of the run\n"
        "  write:   autolaunch export ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
        id="export-without-checkpoint",
    ),
    pytest.param(
        ["validate", "ckpt_path=last", "output_dir=here"],
        "ckpt_path=last: there is no checkpoint in {cwd}/here/checkpoints\n"
        "  allowed: the path of a checkpoint, or the output_dir of the run that wrote one\n"
        "  write:   autolaunch validate ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
        id="validate-without-checkpoint",
    ),
    pytest.param(
        ["output_dir=mine/plan.yml"],
        "output_dir=mine/plan.yml: is a file\n  allowed: a directory that can be written",
        id="output-is-a-file",
    ),
    pytest.param(
        ["output_dir=mine/plan.yml/run"],
        "output_dir=mine/plan.yml/run: cannot be created: Not a directory\n  allowed: a directory that can be written",
        id="output-below-a-file",
    ),
    pytest.param(
        ["--info", "defaults", "modell=llama"],
        "modell=llama: no such key; did you mean model?\n  write:   model=llama",
        id="page-of-hydra",
    ),
    pytest.param(
        ["model=custom", "model._target_=my_modul.Net"],
        "model._target_=my_modul.Net: no module my_modul can be imported from here\n"
        "  allowed: an installed package, or my_modul.py in the working directory",
        id="module-absent",
    ),
    pytest.param(
        ["optimizer=custom", "optimizer._target_=RMSprop"],
        "optimizer._target_=RMSprop: not an import path\n  allowed: module.Name, e.g. my_models.Net",
        id="target-that-is-no-path",
    ),
    pytest.param(
        ["+trainer.callbacks.early.patience=3"],
        "trainer.callbacks.early={patience:3}: does not say what it is\n"
        "  allowed: a mapping with _target_, the import path of a class\n"
        "  write:   trainer.callbacks.early._target_=package.Class",
        id="callback-without-target",
    ),
    pytest.param(
        ["+module.lr=0.1"],
        "module={lr:0.1}: does not say what it is\n"
        "  allowed: a mapping with _target_, the import path of a class\n"
        "  write:   module._target_=package.Class",
        id="module-without-target",
    ),
    pytest.param(
        ["optimizer._target_=collections.OrderedDict"],
        "optimizer._target_=collections.OrderedDict: optimizer=adamw is a class of its own\n"
        "  allowed: optimizer=custom with optimizer._target_\n"
        "  write:   optimizer=custom optimizer._target_=collections.OrderedDict",
        id="target-beside-known-optimizer",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=wrong_type"],
        "trainer.max_steps=soon (mine/experiment/wrong_type.yaml): must be a whole number",
        id="own-yaml-wrong-type",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=unknown_key"],
        "optimizer.learning_rate=0.1 (mine/experiment/unknown_key.yaml): no such key\n"
        "  allowed: name, _target_, lr, weight_decay, betas, eps, momentum",
        id="own-yaml-unknown-key",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=no_package"],
        "experiment=no_package: the keys of the experiment file ended up under `experiment`\n"
        "  allowed: a file that begins with the line `# @package _global_`",
        id="own-yaml-no-package",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=broken"],
        "mine/experiment/broken.yaml, line 3: not YAML; the mistake is here or just above",
        id="own-yaml-broken",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=unknown_option"],
        "dp: zero9 (mine/experiment/unknown_option.yaml): dp has no option 'zero9'; did you mean zero2?\n"
        "  allowed: ddp, fsdp, hsdp, zero1, zero2",
        id="own-yaml-unknown-option",
    ),
    pytest.param(
        ["--config-dir", "mine", "experiment=bad_mesh"],
        "mesh=2x0 (mine/experiment/bad_mesh.yaml): an axis of size 0\n"
        "  allowed: every size is 1 or more; one may be -1 (what is left)",
        id="own-yaml-bad-mesh",
    ),
    pytest.param(
        ["--config-dir", "mine", "model=nameless"],
        "model: has neither model.name nor model._target_\n  allowed: llama, hf\n  write:   +model.name=llama",
        id="own-yaml-nameless-model",
    ),
    pytest.param(
        ["--config-dir", "mine", "model=unknown"],
        "model.name=lama (mine/model/unknown.yaml): no such model; did you mean llama?\n"
        "  allowed: llama, hf, or a model of your own with _target_\n"
        "  write:   model=llama",
        id="own-yaml-unknown-model",
    ),
    pytest.param(
        ["--config-dir", "mine", "model=short", "model.num_layers=2"],
        "model.num_layers=2: the key is not in the YAML file of this group\n"
        "  allowed: a + in front of a new key\n"
        "  write:   +model.num_layers=2",
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
    monkeypatch.setattr(check, "visible_devices", lambda accelerator: ("cpu", None))
    for variable in ("AUTOLAUNCH_NOT_SET", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(variable, raising=False)

    def run(*argv: str) -> Outcome:
        code = cli.run(argv)
        return code, *capfd.readouterr()

    return run


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_one_message_and_nothing_else(argv: list[str], message: str, command: Callable[..., Outcome]) -> None:
    before = sorted(Path().rglob("*"))
    code, out, err = command(*argv)
    assert err == message.replace("{cwd}", str(Path.cwd())) + "\n"
    assert (code, out) == (2, "")
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("argv", "devices", "message"),
    [
        pytest.param(
            ["mesh=4"],
            ("gpu", 2),
            "mesh=4: 4 ranks, but this machine shows 2 GPUs\n  allowed: a mesh of up to 2 ranks\n  write:   mesh=2",
            id="more-ranks-than-gpus",
        ),
        pytest.param(
            ["mesh=2", "trainer.accelerator=gpu"],
            ("gpu", 0),
            "mesh=2: 2 ranks, but this machine shows 0 GPUs\n"
            "  allowed: a mesh of up to 0 ranks\n"
            "  write:   trainer.accelerator=cpu",
            id="no-gpu",
        ),
        pytest.param(
            ["mesh=2", "launch.devices=8"],
            ("gpu", 4),
            "launch.devices=8: this machine shows 4 GPUs\n  allowed: 1 to 4\n  write:   launch.devices=null",
            id="more-devices-than-gpus",
        ),
        pytest.param(
            ["mesh=all", "data.batch_size=8"],
            ("gpu", 3),
            "data.batch_size=8: 8 sequences cannot be shared evenly by 3 data parallel ranks in 1 microbatches\n"
            "  allowed: multiples of 3 x 1 = 3\n"
            "  write:   data.batch_size=6 or data.batch_size=9",
            id="open-axis-takes-every-gpu",
        ),
    ],
)
def test_devices(
    argv: list[str],
    devices: tuple[str, int],
    message: str,
    command: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "visible_devices", lambda accelerator: devices)
    assert command(*argv) == (2, "", message + "\n")


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
    ("argv", "message"),
    [
        pytest.param(
            ["trainer.max_step=10"],
            "trainer.max_step=10: no such key; did you mean trainer.max_steps?\n  write:   trainer.max_steps=10\n",
            id="refused-by-hydra",
        ),
        pytest.param(["optimizer.lr=-1"], "optimizer.lr=-1: out of range\n  allowed: 0 or more\n", id="by-the-schema"),
        pytest.param(
            ["mesh=2", "data.batch_size=7", "trainer.accelerator=cpu"],
            "data.batch_size=7: 7 sequences cannot be shared evenly by 2 data parallel ranks in 1 microbatches\n"
            "  allowed: multiples of 2 x 1 = 2\n"
            "  write:   data.batch_size=6 or data.batch_size=8\n",
            id="by-the-sizes",
        ),
        pytest.param(
            ["-m", "dp=fsdp,zero9"],
            "dp=zero9: dp has no option 'zero9'; did you mean zero2?\n"
            "  allowed: ddp, fsdp, hsdp, zero1, zero2\n"
            "  write:   dp=zero2\n",
            id="of-a-sweep",
        ),
        pytest.param(
            ["--cfg", "job", "seeed=3"], "seeed=3: no such key; did you mean seed?\n  write:   seed=3\n", id="of-a-page"
        ),
    ],
)
def test_in_a_process_of_its_own(argv: list[str], message: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", SUBPROCESS, *argv],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stderr == message
    assert (result.returncode, result.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []
