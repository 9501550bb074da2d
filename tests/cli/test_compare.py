"""`autolaunch compare`: equal runs are said to be, and of three planted faults it says where they sit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from autolaunch.cli import run
from autolaunch.jobs.compare import compare_jobs
from autolaunch.jobs.ends import JobEnd
from autolaunch.report.comparison import GRADIENT, INPUT, OUTPUT, Run, likely_cause, parting, read_run
from autolaunch.tasks.compare import SeenByModules, _listen, _moments
from tests.support.commands import Commands
from tests.support.messages import Told, assert_only_told

FAULTS = """
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn


class ByRank(nn.Module):
    def forward(self, x):
        return x * (1.01 if dist.is_initialized() and dist.get_rank() else 1)


class Net(pl.LightningModule):
    def __init__(self, fault=""):
        super().__init__()
        middle = ByRank() if fault == "module" else nn.Tanh()
        self.fault, self.net = fault, nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(4))

    def transfer_batch_to_device(self, batch, device, index):
        shift = self.fault == "data" and dist.is_initialized() and dist.get_rank()
        return {**batch, "input_ids": batch["input_ids"] + 1} if shift else batch

    def training_step(self, batch, batch_idx):
        x = batch["input_ids"].float() / 100
        if self.fault == "buffer":
            seen = x.mean(0)
            x = x - self.seen
            self.seen.lerp_(seen, 0.5)
        if self.fault == "between":
            hidden = self.net[1](self.net[0](x))
            made = self.net[2](hidden - hidden.mean(0))
        else:
            made = self.net(x)
        loss = (made - x.sum(1, keepdim=True)).square()
        if self.fault == "loss" and dist.is_initialized() and dist.get_rank():
            loss = loss + self.net[2].weight.square().sum()
        return loss.sum() / 8 if self.fault == "sum" else loss.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""


def test_what_can_not_be_compared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    one = "there is one run"
    for words, told in (
        (["compare", "mesh=2"], Told("autolaunch compare mesh=2", one, write="autolaunch compare mesh=1,2x2x2")),
        (["compare", empty], Told(f"autolaunch compare {empty}", one, write="autolaunch compare mesh=1,2x2x2")),
        (["compare", empty, empty], Told(empty, "no metrics.csv in it", allowed="the directory of a run")),
        (
            ["compare", empty, empty, "mesh=2"],
            Told(
                "mesh=2",
                "finished runs",
                allowed="compare.tolerance=1e-4, a number",
                write=f"autolaunch compare {empty} {empty}",
            ),
        ),
        (
            ["compare", "--config-dir", empty, "mesh=2"],
            Told("autolaunch compare mesh=2", one, write="autolaunch compare mesh=1,2x2x2"),
        ),
        (["fit", "compare.steps=3"], Told("compare.steps=3", "no effect with fit", allowed=("the line without it",))),
    ):
        assert run([*words, f"output_dir={tmp_path / 'run'}"] if words[0] == "fit" else words) == 2
        assert_only_told(capsys.readouterr().err, told)


def finished(directory: Path, *steps: int) -> str:
    """A directory as a run leaves it that logged these steps."""
    directory.mkdir(parents=True)
    rows = [f"{step},{6 - step / 10},1.0\n" for step in steps]
    (directory / "metrics.csv").write_text("".join(["step,loss,grad_norm\n", *rows]))
    return str(directory)


def test_a_path_that_is_no_run_is_told_with_the_run_that_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path / "a" / "2026-01-01_00-00-00", 1, 2)
    older, run_of_a = tmp_path / "a" / "2026-01-01_00-00-00", finished(tmp_path / "a" / "2026-01-02_00-00-00", 1, 2)
    os.utime(older / "metrics.csv", (1, 1))
    job = finished(tmp_path / "swept" / "2026-01-03_00-00-00_sweep" / "1", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "unlogged").mkdir()
    (tmp_path / "unlogged" / "metrics.csv").write_text("step,loss\n1,\n")
    (older / "config.yaml").touch()
    (tmp_path / "notes.txt").touch()
    runs, one = "the directory of a run", "the directory of one run"
    for name, facts, allowed, write in (
        ("elsewhere", ["no such directory"], runs, ""),
        ("a/2026-01-02_00-00-01", ["no such directory"], runs, run_of_a),
        ("swepd", ["no such directory"], runs, job),
        ("a", ["holds runs", "not one itself"], one, run_of_a),
        ("swept", ["holds runs"], one, job),
        ("swept/2026-01-03_00-00-00_sweep", ["holds runs"], one, job),
        ("a/2026-01-01_00-00-00/config.yaml", ["is a file"], runs, str(older)),
        ("notes.txt", ["is a file"], runs, ""),
        ("empty", ["no metrics.csv in it"], runs, ""),
        ("unlogged", ["no loss in its metrics.csv"], ("a run that trained",), ""),
    ):
        assert run(["compare", run_of_a, str(tmp_path / name)]) == 2
        assert_only_told(capsys.readouterr().err, Told(str(tmp_path / name), *facts, allowed=allowed, write=write))


def test_every_path_that_is_no_run_is_told_as_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "outputs" / "a" / "2026-01-01_00-00-00", 1, 2)
    monkeypatch.chdir(tmp_path)
    assert run(["compare", "nodir1", "outputs/a/"]) == 2
    told = Told("outputs/a/", "holds runs", allowed="the directory of one run", write="outputs/a/2026-01-01_00-00-00")
    assert_only_told(capsys.readouterr().err, [Told("nodir1", "no such directory"), told])


def test_every_job_is_checked_before_the_first_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["compare", "model=llama", "mesh=1,3", "optimizer.lr=0.1,much"]) == 2
    rows = Told(
        "data.batch_size=16",
        "3 data parallel ranks",
        allowed="multiples of 3",
        write="data.batch_size=15 or data.batch_size=18",
    )
    assert_only_told(capsys.readouterr().err, [Told("optimizer.lr=much", "must be a number"), rows])
    assert not list(tmp_path.iterdir())


def test_a_directory_may_be_called_like_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(tmp_path / f"optimizer.lr={rate}", 1, 2) for rate in (0.1, 0.2)]
    assert run(["compare", *runs]) == 0
    assert f"compared with {runs[0]}, 2 steps:" in capsys.readouterr().out


def test_the_metrics_of_a_run_stand_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of_a = finished(tmp_path / "a", 1, 2)
    assert run(["compare", f"{run_of_a}/metrics.csv", run_of_a]) == 0
    assert f"compared with {run_of_a}/metrics.csv, 2 steps:" in capsys.readouterr().out


def test_the_steps_that_both_have_logged_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long, short, shorter = (finished(tmp_path / str(last), *range(1, last + 1)) for last in (4, 3, 2))
    for runs, told in (
        ([long, long], [f"compared with {long}, 4 steps:"]),
        ([short, long], [f"compared with {short}, 3 steps:"]),
        ([long, short], [f"compared with {long}, 3 of its 4 steps:"]),
        (
            [long, short, shorter],
            [f"compared with {long}:", f"{short}, 3 steps  equal", f"{shorter}, 2 steps  equal"],
        ),
    ):
        assert run(["compare", *runs]) == 0
        screen = capsys.readouterr().out
        assert all(part in screen for part in told), screen


def test_a_step_without_a_loss_is_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = finished(tmp_path / "one", 1, 2)
    with (tmp_path / "one" / "metrics.csv").open("a") as metrics:
        metrics.write("3,,\n")
    assert run(["compare", one, one]) == 0
    assert ", 2 steps:" in capsys.readouterr().out


def test_runs_without_a_common_step_are_told_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early, late = finished(tmp_path / "early", 1, 2, 3), finished(tmp_path / "late", *range(10, 101, 10))
    assert run(["compare", early, early, late]) == 2
    printed = capsys.readouterr()
    facts = ("no logged step in common", "the first has 1, 2, 3", "the second 10, 20, ..., 100")
    told = Told(f"{early} and {late}", *facts, allowed="runs that have logged the same steps")
    assert_only_told(printed.err, told)
    assert not printed.out


@pytest.mark.parametrize("value", ["abc", "", "-1", "nan"])
def test_a_tolerance_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    one = finished(tmp_path / "one", 1, 2)
    assert run(["compare", one, one, f"compare.tolerance={value}"]) == 2
    told = Told(
        f"compare.tolerance={value}",
        "not a number that is at least 0",
        allowed=("a number, at least 0",),
        write="compare.tolerance=1e-4",
    )
    assert_only_told(capsys.readouterr().err, told)
    assert run(["compare", one, one, "compare.tolerance=1e-3"]) == 0


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.csv", "loss,grad_norm\n1.0,2.0\n"),
        ("metrics.csv", "step,loss\none,1.0\n"),
        ("metrics.csv", "step,loss\n1,much\n"),
        ("compare.json", "{"),
    ],
    ids=["no-steps", "no-step", "no-number", "half"],
)
def test_a_file_that_no_run_has_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str
) -> None:
    one, bad = finished(tmp_path / "one", 1, 2), finished(tmp_path / "bad", 1, 2)
    (tmp_path / "bad" / file).write_text(text)
    assert run(["compare", one, bad]) == 2
    allowed = "the directory of a run, with its files as they were written"
    assert_only_told(capsys.readouterr().err, Told(f"{bad}/{file}", "can't be read", allowed=allowed))


def test_jobs_that_are_the_same_are_told_apart_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [JobEnd(number, ["mesh=1"], "finished", 0, finished(tmp_path / str(number), 1)) for number in (0, 1)]
    assert compare_jobs(ends, 0.0) == 0
    screen = capsys.readouterr().out
    assert "compared with job 0, 1 step:" in screen and "  job 1  equal" in screen


def test_numbers_that_differ_are_seen_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the tolerance is shown as it was typed."""
    runs = [tmp_path / "one", tmp_path / "other"]
    for directory, loss in zip(runs, ("0.70951748", "0.70951754"), strict=True):
        finished(directory)
        (directory / "metrics.csv").write_text(f"step,loss\n1,{loss}\n")
    assert run(["compare", *map(str, runs), "compare.tolerance=0"]) == 1
    assert "loss 0.70951748 and 0.70951754 (8.46e-08, tolerance 0)" in capsys.readouterr().out
    (runs[1] / "metrics.csv").write_text("step,loss\n1,0.911\n")
    assert run(["compare", *map(str, runs), "compare.tolerance=0.22"]) == 1
    assert "(0.221, tolerance 0.22)" in capsys.readouterr().out


def gradients(loss: float, *sizes: float) -> Run:
    """A run of one step with gradients of these sizes."""
    table = {f"weight {number}": (0.0, size) for number, size in enumerate(sizes)}
    return Run("", {1: {"loss": loss}}, [{OUTPUT: {"net": (0.0, 1.0)}, GRADIENT: table}], {})


@pytest.mark.parametrize(
    ("other", "tolerance", "cause"),
    [
        (gradients(1 + 1e-7, 1 + 1e-7, 2 + 1e-7), 0.0, "rounding"),
        (gradients(2.0, 2.0, 4.0), 0.0, "all gradients are 2 times as large"),
        (gradients(2.0, 2.004, 4.0), 1e-3, "all gradients are 2.004 times as large"),
        (gradients(1.5, 1.2, 2.9), 0.22, "what makes a loss of them"),  # 1.2 and 1.45 times
        (gradients(1.0, 1.0, 2.00001), 0.0, "its backward pass"),
    ],
    ids=["rounding", "sum", "nearly-one-factor", "several-factors", "one-gradient"],
)
def test_gradients_have_a_common_factor_only_if_they_agree_on_one(other: Run, tolerance: float, cause: str) -> None:
    alone = gradients(1.0, 1.0, 2.0)
    where = parting(alone, other, 1, 0.0)
    assert likely_cause(alone, other, 1, where, tolerance).startswith(cause)


@pytest.mark.parametrize(
    ("own", "step", "cause"),
    [
        ("1,2,0.4,8\n2,1,0.3,16\n3,1,0.2,24\n", 3, "another learning rate, from step 2 on: 0.4 and 0.3"),
        ("1,2,0.4,8\n2,1,0.3,16\n3,1,0.2,24\n", 2, "what modules computed was not kept"),  # its rate shows later
        ("1,2,0.4,4\n2,1,0.3,8\n3,1,0.2,12\n", 1, "other tokens, from step 1 on: 8 and 4"),
        ("1,2,0.4,8\n2,1,0.4,16\n3,1,0.4,24\n", 3, "what modules computed was not kept"),
    ],
    ids=["rate", "too-late", "tokens", "none"],
)
def test_what_steps_were_given_is_the_cause_where_it_differs(own: str, step: int, cause: str, tmp_path: Path) -> None:
    runs = []
    for name, rows in (("first", "1,2,0.4,8\n2,1,0.4,16\n3,1,0.4,24\n"), ("second", own)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss,lr,tokens\n" + rows)
        runs.append(read_run(tmp_path / name, name))
    assert likely_cause(runs[0], runs[1], step, None, 0.0).startswith(cause)


def test_an_output_that_is_there_on_one_mesh_alone_is_no_difference() -> None:
    """Weights of attention are not, along cp: a module is told by what it returns on both."""

    def seen(*outputs: torch.Tensor | None) -> Run:
        kept = SeenByModules()
        kept._seen(torch.nn.Identity().train(), "attention", OUTPUT, outputs)
        moments = _moments([{OUTPUT: {name: sums.tolist() for name, sums in kept._sums[OUTPUT].items()}}])
        return Run("", {1: {"loss": 1.0}}, [moments], {"attention": "Attention"})

    attended, weights = torch.ones(4), torch.full((8,), 0.5)
    assert parting(seen(attended, weights), seen(attended, None), 1, 0.0) is None
    assert parting(seen(weights, attended), seen(None, attended), 1, 0.0) is None
    where = parting(seen(attended, weights), seen(attended, weights + 1), 1, 0.0)
    assert where is not None and where.name == "attention, output [1]"
    assert likely_cause(seen(attended, weights), seen(attended, weights + 1), 1, where, 0.0).startswith("Attention")


def test_a_gradient_that_one_run_has_not_is_a_difference() -> None:
    def seen(bias: torch.Tensor | None) -> Run:
        kept, layer = SeenByModules(), torch.nn.Linear(2, 2)
        layer.weight.grad, layer.bias.grad = torch.ones(2, 2), bias
        kept.on_before_optimizer_step(cast(Any, None), cast(Any, layer), cast(Any, None))
        moments = _moments([{GRADIENT: {name: sums.tolist() for name, sums in kept._sums[GRADIENT].items()}}])
        return Run("", {1: {"loss": 1.0}}, [moments], {})

    where = parting(seen(torch.ones(2)), seen(None), 1, 0.0)
    assert where is not None and where.name == "bias"
    assert parting(seen(None), seen(torch.zeros(2)), 1, 0.0) is None


class Draws(torch.nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.draw, self.quiet = draw, torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.draw(x)
        return self.quiet(x)


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, F.dropout, lambda x: random.random(), lambda x: np.random.random(), lambda x: None],
    ids=["torch", "dropout", "python", "numpy", "nothing"],
)
def test_modules_that_draw_random_numbers_are_told(draw: Callable[[torch.Tensor], Any], request: Any) -> None:
    drawing: set[str] = set()
    model = torch.nn.ModuleDict({"outer": Draws(draw), "other": torch.nn.Linear(2, 2)})
    for name, module in model.named_modules():
        _listen(module, lambda kind, values: None, partial(drawing.add, name))
    model["other"](model["outer"](torch.ones(1, 2)))
    assert drawing == (set() if request.node.callspec.id == "nothing" else {"outer"})


@pytest.mark.parametrize("by_position", [False, True])
def test_random_numbers_of_the_module_and_around_it(by_position: bool) -> None:
    def seen(output: float, input: float = 1.0, drawing: str = "net") -> Run:
        table = {OUTPUT: {"net.up": (0.0, output)}, INPUT: {"net.up": (0.0, input)}}
        classes = {"net": "Net", "net.up": "Router"}
        return Run("", {1: {"loss": output}}, [table], classes, frozenset({"net", drawing}), by_position)

    advice = "leaves to the ranks" if by_position else "random_numbers=by_position draws alike"

    def cause(first: Run, second: Run) -> str:
        return likely_cause(first, second, 1, parting(first, second, 1, 0.0), 0.0)

    own = cause(seen(1.0, drawing="net.up"), seen(2.0, drawing="net.up"))
    assert own.startswith("random numbers: Router draws") and advice in own
    before = cause(seen(1.0), seen(2.0, input=2.0))
    assert before.startswith("what is computed between") and "random numbers: Net draws" in before and advice in before
    assert cause(seen(1.0), seen(2.0)).startswith("Router computes something else")
    assert cause(seen(1.0), seen(2.0, drawing="net.up")).startswith("Router computes"), "on one mesh alone: no cause"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_equal_runs_are_equal_in_all_that_is_kept(tmp_path: Path) -> None:
    small = ("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4")
    compare = Commands(
        tmp_path,
        *(*small, "model.num_kv_heads=2", "data=synthetic", "data.seq_len=16", "data.batch_size=8"),
        *("mp=seq_parallel", "pp=1f1b", "cp=ring", "recompute=full", "compare.steps=2", "trainer.accelerator=cpu"),
        timeout=240,
    )
    ended = compare("compare", "mesh=1,1x2x1x2,2x1x2")
    assert (
        "compared with mesh=1, 2 steps" in ended.screen
        and ended.screen.count(" in loss and gradient norm, and in weights") == 2
    )
    alone, *others = (read_run(ended.directory / str(number), str(number)) for number in range(3))
    outputs = set(alone.steps[0]["output"])
    for other in others:
        assert len(other.steps) == 3  # the weights after the last step, too
        for expected, found in zip(alone.steps, other.steps, strict=True):
            for kind, table in expected.items():
                # What holds parts of both stages has no output that one of them sees.
                assert table.keys() - found[kind].keys() <= (
                    {"model", "model.model"} if kind in ("input", "output") else set()
                )
                for name in table.keys() & found[kind].keys():
                    assert found[kind][name] == pytest.approx(table[name], rel=1e-4, abs=1e-6), (kind, name)
    assert {"model.model.embed_tokens", "model.model.layers.1.mlp.down_proj", "model.lm_head"} <= outputs
    runs = [str(ended.directory / number) for number in ("0", "1")]
    assert run(["compare", *runs]) == 0 and run(["compare", *runs, "compare.tolerance=0"]) == 1


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "place", "cause"),
    [
        ("data", "input_ids in the batch", "other data, or another order"),
        ("buffer", "buffer of seen", "what a forward keeps from step to step"),
        # Of these causes there are tests above, of tables.
        *(
            pytest.param(*fault, marks=pytest.mark.every)
            for fault in (
                ("module", "output of net.1 (ByRank)", "ByRank computes something else"),
                ("sum", "gradient of net.2.bias", "all gradients are 0.5 times as large"),
                ("between", "output of net.2 (Linear)", "what is computed between modules before it"),
                ("loss", "gradient of net.2.weight", "what makes a loss of them"),
            )
        ),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str, place: str, cause: str) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    compare = Commands(
        tmp_path,
        *("module._target_=faults.Net", f"module.fault={fault}", "data=synthetic", "data.seq_len=4"),
        *("data.batch_size=8", "trainer.accelerator=cpu"),
    )
    screen = compare("compare", "mesh=1,2", "compare.steps=2", code=1).screen
    assert f"mesh=2  differs at step {1 + (fault == 'buffer')}" in screen
    assert f"first in: {place}" in screen and f"likely: {cause}" in screen
