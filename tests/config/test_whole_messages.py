"""How messages look to a person: whole ones, one of each kind. Every other test asserts facts, not wording."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autolaunch import cli
from autolaunch.config import across_keys, arithmetic
from autolaunch.instantiate import build
from autolaunch.launch.place import place
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.pipeline.split import choose_cuts
from autolaunch_strategies.plan.derive import derive_plan

FILES = {
    "good.txt": "a" * 20_000,
    "bad.csv": "0F0,0X0\n1F0,1B0\n",
    "mine/experiment/wrong_type.yaml": "# @package _global_\ntrainer:\n  max_steps: soon\n",
}
"""What lies in the working directory."""

COMMANDS = [
    pytest.param(
        ["trian", "model=llama"],
        "autolaunch trian: no such task; did you mean fit?\n"
        "  allowed: fit, validate, test, predict, lr_find, compare, generate, plan, dryrun, calibrate, export, eval\n"
        "  write:   autolaunch fit model=llama",
        id="task",
    ),
    pytest.param(
        ["--verison"],
        "--verison: no such flag; did you mean --version?\n  write:   autolaunch --version",
        id="flag",
    ),
    pytest.param(
        ["trainer.max_step=10"],
        "trainer.max_step=10: no such key; did you mean trainer.max_steps?\n  write:   trainer.max_steps=10",
        id="key",
    ),
    pytest.param(
        ["checkpoint.xyz=1"],
        "checkpoint.xyz=1: no such key\n  write:   autolaunch --info checkpoint",
        id="key-like-nothing",
    ),
    pytest.param(
        ["dp=zero4"],
        "dp=zero4: dp has no option 'zero4'; did you mean zero2?\n"
        "  allowed: ddp, fsdp, hsdp, zero1, zero2\n"
        "  write:   dp=zero2",
        id="option",
    ),
    pytest.param(
        ["name=a=b"],
        "name=a=b: Hydra cannot read this value\n  allowed: a text in quotes\n  write:   'name=\"a=b\"'",
        id="grammar",
    ),
    pytest.param(
        ["mesh=mp2", "mp.plan={'blocks.*.(q|k)':ColWiseParallel}"],
        "mp.plan={'blocks.*.(q|k)':ColWiseParallel}: Hydra cannot read this value\n"
        "  allowed: names of keys without quotes, a backslash before each bracket in them\n"
        "  write:   'mp.plan={blocks.*.\\(q|k\\):ColWiseParallel}'",
        id="keys of mappings",
    ),
    pytest.param(
        ["dp=fsdp,zero1"],
        "dp=fsdp,zero1: several values, but no -m to run them one after the other\n"
        "  allowed: one value\n"
        "  write:   autolaunch -m dp=fsdp,zero1",
        id="sweep",
    ),
    pytest.param(
        ["trainer.max_steps=1e3"],
        "trainer.max_steps=1e3: must be a whole number\n  allowed: a whole number or null\n"
        "  write:   trainer.max_steps=1000",
        id="type",
    ),
    pytest.param(
        ["precision=bf16"],
        "precision=bf16: not one of the choices\n"
        "  allowed: 32-true, bf16-mixed, bf16-true, float8, float8-tensorwise, null\n"
        "  write:   precision=bf16-mixed",
        id="choice",
    ),
    pytest.param(
        ["model=custom"],
        "model._target_: must be given\n"
        "  allowed: Import path of a torch.nn.Module class, or of a function that returns a module.\n"
        "  write:   model._target_=...",
        id="missing",
    ),
    pytest.param(
        ["model=lama", "trainer.max_step=3", "data.seq_len=0", "mesh=0"],
        "mesh=0: an axis of size 0\n"
        "  allowed: every size is 1 or more; one may be -1 (what is left)\n"
        "  write:   mesh=1\n"
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
        ["--config-dir", "mine", "experiment=wrong_type"],
        "trainer.max_steps=soon (mine/experiment/wrong_type.yaml): must be a whole number\n"
        "  allowed: a whole number or null",
        id="value-in-a-file",
    ),
    pytest.param(
        ["plan", "cluster=h100x12"],
        "cluster=h100x12: 12 devices are no whole number of nodes of 8\n"
        "  allowed: up to 8, or a multiple of it\n"
        "  write:   cluster=h100x16",
        id="cluster",
    ),
    pytest.param(
        ["mesh=2x2", "mp=none"],
        "mesh=2x2 with mp=none: the mesh has 2 ranks along mp, but mp=none uses only one\n"
        "  allowed: mp=auto, tensor_parallel, seq_parallel, or a plan of your own\n"
        "  write:   mp=auto",
        id="two-keys-together",
    ),
    pytest.param(
        ["mesh=2", "data.batch_size=7"],
        "data.batch_size=7: 7 sequences cannot be shared evenly by 2 data parallel ranks\n"
        "  allowed: multiples of 2\n"
        "  write:   data.batch_size=6 or data.batch_size=8",
        id="sizes",
    ),
    pytest.param(
        ["mesh=1x2x1x4", "cp=ulysses"],
        "mesh=1x2x1x4 with model=llama and cp=ulysses: 2 attention heads per rank of mp (4 over 2) cannot be shared "
        "evenly by 4 ranks of cp, as ulysses does\n"
        "  allowed: cp=gather or cp=ring for any number of heads, or cp=usp with cp.ulysses of 1, 2\n"
        "  write:   cp=usp",
        id="sizes-of-the-model",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.loss=exact"],
        "pp.loss=exact with pp.schedule=1f1b: exact works with gpipe alone: the loss of the whole batch comes after "
        "all forwards and before all backwards\n"
        "  allowed: pp.schedule=gpipe; or pp.loss=microbatch, if the loss is a mean over samples\n"
        "  write:   pp.loss=microbatch",
        id="options-that-exclude-each-other",
    ),
    pytest.param(
        ["mesh=1x1x2", "pp=1f1b", "pp.schedule=bad.csv"],
        "pp.schedule=bad.csv, row 1, column 2: 0X0: not a step of a schedule\n"
        "  allowed: stage, F, B, I or W, and microbatch: 0F0, 1B3; an empty cell is idle time",
        id="cell-of-a-table",
    ),
    pytest.param(
        ["+mp.plan={fc1: ColumnParallel, fc2: {ColWiseParallel: {gather: true}}}"],
        "mp.plan: fc1: no style is called 'ColumnParallel'; did you mean ColWiseParallel?\n"
        "  allowed: ColWiseParallel, RowWiseParallel, GatherWhenUsed, DivideExperts, SequenceParallelBegin, "
        "SequenceParallelEnd, SequenceParallelEnable, SequenceParallelDisable, PrepareContextParallel, "
        "ContextParallel, PrepareLayerInput, PrepareLayerOutput\n"
        "mp.plan: fc2: ColWiseParallel has no argument 'gather'\n"
        "  allowed: gather_output, shard_dim",
        id="plan",
    ),
    pytest.param(
        ["data.path=godo.txt"],
        "data.path=godo.txt: no such file or directory\n  write:   data.path=good.txt",
        id="path",
    ),
    pytest.param(
        ["data.path=good.txt", "data.seq_len=256", "data.validation_fraction=0.005"],
        "data.path=good.txt: not one validation sequence of 256 tokens\n"
        "  allowed: a larger data.validation_fraction, more data, or a smaller data.seq_len\n"
        "  write:   data.validation_fraction=0.02, or data.validation_fraction=0 for no validation",
        id="amount-of-data",
    ),
    pytest.param(
        ["plan", "cluster=h100x8", "data.seq_len=1024", "data.batch_size=1024"],
        "data.path=null: 455 training sequences of 1024 tokens, fewer than one batch of 1024\n"
        "  allowed: more data, or a smaller data.batch_size or data.seq_len\n"
        "  write:   data=synthetic",
        id="planned-with-the-text-that-comes-along",
    ),
    pytest.param(
        ["validate", "ckpt_path=last", "output_dir=here"],
        "ckpt_path=last: there is no checkpoint in {cwd}/here/checkpoints\n"
        "  allowed: the path of a checkpoint, or the output_dir of the run that wrote one\n"
        "  write:   autolaunch validate ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
        id="checkpoint",
    ),
]


@pytest.mark.parametrize(("argv", "message"), COMMANDS)
def test_on_the_command_line(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (across_keys, arithmetic):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert cli.run(argv) == 2
    assert capfd.readouterr().err == message.replace("{cwd}", str(tmp_path)) + "\n"


class Picky(nn.Module):
    """Runs on no inputs that the planner can think of."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, tokens: Any) -> Any:
        raise ValueError("exactly 12 tokens, please")


BLOCKS = ["layers.0", "layers.1", "layers.2"]

CALLS = [
    pytest.param(
        lambda: build({"_target_": "torch.nn.Linear", "in_features": 3}, "model"),
        "model._target_=torch.nn.Linear: torch.nn.Linear also needs out_features\n  write:   model.out_features=...",
        id="class-of-the-user",
    ),
    pytest.param(
        lambda: choose_cuts("layer", BLOCKS, BLOCKS, BLOCKS, 2, "even", {}),
        "pp.split_spec=layer: no module is called layer\n"
        "  allowed: the repeated blocks layers.0, layers.1, layers.2; names like layers.*\n"
        "  write:   pp.split_spec=layers",
        id="names-of-modules",
    ),
    pytest.param(
        lambda: derive_plan(Picky(), False, 2),
        "mp: no plan can be derived for Picky: its forward does not run on any inputs that were tried\n"
        "    features for proj: exactly 12 tokens, please\n"
        "  allowed: a model whose forward runs on `example_input_array` (an attribute of the module), or a plan of "
        "your own\n"
        "  write:   mp.base=none and mp.plan",
        id="several-lines",
    ),
    pytest.param(
        lambda: place({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}),
        "RANK=4: this is not a number that a launcher sets\n  allowed: 0 to 3",
        id="environment",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_of_a_function(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value) == message
