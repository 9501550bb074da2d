"""LightningModules that know nothing of pp give on two stages what plain Lightning gives in one process."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.pipeline.cases import ENDS, GROUPS, RECIPES, REFUSED
from tests.support.commands import Commands
from tests.support.messages import rounded
from tests.support.ranks import Group, GroupOf, differences, problems
from tests.support.tiers import but_one_in, tiered

pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).with_name("cases.py")
TOLERANCE = 1e-5
SAME = [name for name in GROUPS["two"] if name.split("@")[0] in RECIPES and name != "bf16-mixed"]


LONG = {
    "hf-llama", "clip-tied", "prime-batch", "batch-of-one", "diffusion", "causal-odd", "logger", "decisions",
    "hf-all-hidden-states", "micro-classifier-accumulate", "encoder", "distilled", "predictions",
    "llama-4@interleaved_1f1b-pp2",
    "llama-tied", "hf-qwen3-adamw", "hf-gpt-neox", "hf-opt", "hf-bert", "hf-t5", "causal", "causal-last-of-one",
    "resnet", "frozen-first-stage", "accumulate-2", "accumulate-tied", "batch-below-microbatches",
    "two-validation-loaders", "recompute-full", "recompute-selective", "compile", "balanced", "summary", "tasks",
    "llama-4", "llama-8", "llama-4@gpipe-pp2", "llama-4@looped_bfs-pp2", "micro-classifier-odd", "micro-hf-gpt2",
    "micro-recompute", "micro-hooks", "micro-sandwich", "accumulate-3",
    "llama-4@zbv_zero_bubble-pp2", "llama-4@dualpipev-pp2", "hf-gpt2",
    "n-beats", "conditioned@1f1b", "example-of-forward",
    "by-hand-tied", "adversarial-critic", "hf-albert", "hf-albert@1f1b", "own-loader", "grad-norms@2x1x1-1",
    "grad-norms@1x2x1-0", "two-models", "compile-zero-bubble", "unfreezes-first",
    "freezes-between-batches",
    "state-first",
}  # fmt: skip
"""Cases of which each part is in another case, too."""


def everyday(case: str) -> bool:
    return case not in LONG


_SELDOM = but_one_in(2, SAME, everyday)
ALIKE = {
    "grad-norms@1x2x1-0", "llama-tied", "tasks", "hf-gpt2", "hf-bert", "llama-8", "hf-gpt-neox", "hf-all-hidden-states",
    "hf-albert@1f1b", "clip-tied", "causal-last-of-one",
}  # fmt: skip
"""The longest, which have another of their kind, or their family in test_zoo.py."""
assert ALIKE.issubset(SAME)


def seldom(case: str) -> bool:
    if "looped_bfs" in case:  # nowhere else
        return False
    return case == "compile" or case in ALIKE or _SELDOM(case)  # captured every day


@pytest.fixture(scope="module")
def refused(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "refused", 2)


@pytest.mark.parametrize("case", tiered(SAME, everyday, seldom))
def test_two_stages_equal_one_process(one: Group, two: Group, case: str) -> None:
    assert problems(one, two, case.split("@")[0], case, TOLERANCE) == []


@pytest.mark.full
def test_bf16_mixed_is_close(one: Group, two: Group) -> None:
    """Products of microbatches round differently from those of the whole batch: 8 bits of mantissa."""
    expected, found = (result.read("bf16-mixed")["first"]["losses"] for result in (one, two))
    assert differences(expected, found, 1e-2) == []
    assert differences(one.read("llama")["first"]["losses"], found, 1e-5) != []


def test_dropout(two: Group) -> None:
    """Each stage drops out in training, the same again with the same seed, and nothing in evaluation."""
    stages = [two.read("dropout", rank) for rank in (0, 1)]
    last = stages[0]
    for runs in stages:
        assert runs["first"] == runs["again"]
        assert len(runs["first"]["shares"]) == 2
        assert all(0.4 < statistics.mean(shares) < 0.6 for shares in runs["first"]["shares"].values())
        assert not any(share for shares in runs["without"]["shares"].values() for share in shares)
        for name, run in runs.items():
            assert run["evaluated"] == pytest.approx(run["expected"], rel=TOLERANCE), name
    for name in ("without", "other"):
        for what in ("losses", "norms"):
            pairs = zip(last["first"][what], last[name][what], strict=True)
            assert all(abs(one - another) > 1e-3 for one, another in pairs), (name, what)


def test_each_stage_holds_its_own_parameters(two: Group) -> None:
    """The last stage is on rank 0, where what follows the call runs."""
    last, first = (two.read("stages", rank)["llama"] for rank in (0, 1))
    assert {name.rsplit(".", 2)[0] for name in first["names"] if "layers" not in name} == {"model.model"}
    assert "model.model.embed_tokens.weight" in first["names"]
    assert {"model.model.norm.weight", "model.lm_head.weight"} <= set(last["names"])
    for held, blocks in ((first["names"], {"0", "1"}), (last["names"], {"2", "3"})):
        assert {name.split(".")[3] for name in held if ".layers." in name} == blocks
    tied = [two.read("stages", rank)["hf-llama"] for rank in (0, 1)]
    assert [sum("embed" in name or "lm_head" in name for name in part["names"]) for part in tied] == [1, 1]
    for part in (last, first, *tied):
        assert part["strange"] == []
        assert part["counted"] and part["share"] < 0.7


OTHER_LOSS = "microbatches is {}: training would minimise something else than on one device\n  allowed: pp.loss=exact"
MESSAGES = {
    "manual-optimization": "pp=1f1b with ManualOptimization: it optimizes by hand (automatic_optimization=False)",
    "through-itself": "pp: the step calls self.model with what it returned before",
    "twice-by-hand": "pp: what a call of self.model returned is differentiated a second time",
    "penalty-by-hand": "pp: the loss uses model.blocks.0.up.weight outside of the call of the model",
    "own-backward": "pp with OwnBackward: it overrides `backward`",
    "averaging": "StochasticWeightAveraging: it averages whole weights",
    "second-order": "pp with LBFGS: what it does to one parameter depends on the gradients of others",
    "batch-norm-by-schedule": "pp.loss=microbatch with model.",
    "batch-norm-microbatches": "pp.microbatches=4 pp.loss=exact with model.",
    "sequence-first-microbatches": "pp.microbatches: blocks.3 returns something else for a sample when another one",
    "block-keeps-state": "pp.microbatches: self.model returns something else for a sample when it has been called",
    "normalised-by-hand-microbatches": "pp.microbatches: head returns something else for a sample when another one",
    "normalised-beside-dropout": "pp.microbatches: self.model.blocks.0.mean is another one after two samples in turn",
    "too-few-blocks": "pp.split_spec=model.blocks: ",
    "two-calls": "pp: the step calls self.model more than once",
    "parts-by-themselves": "pp with Keyed: training_step with the first batch calls self.model.stem, self.model.blocks",
    "penalty": "pp: the loss uses model.blocks.2.norm.weight outside of the call of the model",
    "kept-by-others": "pp: the loss of the first batch is NaN, and what self.model returns is not: it reads what",
    "kept-by-others-by-schedule": "such as self.model.penalty, which other stages compute for themselves",
    "masked-mean": OTHER_LOSS.format("3.9895"),
    "hf-masked-mean": OTHER_LOSS.format("3.7572"),
    "in-batch-contrastive": OTHER_LOSS.format("1.14298"),
    "calls-forward": "can't run here; call the whole model",
    "never-calls": "pp: the step never calls self.model(...)",
    "another-structure": "pp: blocks.0 returns something else than was concluded from shapes",
}


@pytest.mark.parametrize("case", tiered(REFUSED, lambda case: case != "hf-masked-mean", ["hf-masked-mean"]))
def test_what_cannot_work_is_refused_before_anything_is_trained(refused: Group, case: str) -> None:
    last, first = (refused.read(case, rank) for rank in (0, 1))
    assert (last["type"], last["steps"], first["steps"]) == ("ConfigError", 0, 0)
    assert rounded(MESSAGES[case]) in rounded(last["message"])
    assert first["message"].endswith(last["message"])


@pytest.mark.parametrize("case", ENDS)
def test_what_one_rank_refuses_ends_the_run(refused: Group, case: str) -> None:
    with pytest.raises(AssertionError) as raised:
        refused.read_all(case)
    assert MESSAGES[case] in str(raised.value)


def test_a_batch_that_raises_leaves_accumulated_gradients(group_of: GroupOf) -> None:
    for kept in group_of(SCRIPT, "raising", 2).read_all("while-accumulating"):
        assert kept["kept"] > 0 and kept["equal"]


FAILS = """
import os
import lightning as L
import torch
from torch import nn


class Fails(L.LightningModule):
    def __init__(self, block):
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.model[block].register_forward_pre_hook(self.fail)

    def fail(self, *_):
        if self.trainer.global_step == 2:
            raise ValueError("this block fails on purpose")

    def training_step(self, batch, batch_idx):
        loss = self.model(batch["input_ids"][:, :8].float() / 100).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("block", "rank"),
    [pytest.param(0, 1, id="first-stage"), pytest.param(3, 0, id="last-stage", marks=pytest.mark.every)],
)
def test_a_failure_on_one_stage_ends_the_run_with_its_traceback(tmp_path: Path, block: int, rank: int) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    typed = ["mesh=1x1x2", "pp=exact", "module._target_=fails.Fails", f"module.block={block}", "data=synthetic"]
    typed += ["data.seq_len=8", "data.batch_size=8", "trainer.max_steps=6", "trainer.accelerator=cpu"]
    run = Commands(tmp_path)(*typed, "trainer.enable_progress_bar=false", code=1)
    assert "ValueError: this block fails on purpose" in run.screen
    assert run.summary["status"] == "failed"
    assert f"rank {rank}" in run.screen
