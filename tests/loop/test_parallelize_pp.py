"""`parallelize` with a pipeline, in a training loop of one's own: equal to one process, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autolaunch_strategies import ConfigError, ProcessMesh, SplitPoint, parallelize
from tests.support.ranks import Group, GroupOf
from tests.support.tiers import tiered

SCRIPT = Path(__file__).with_name("pp_cases.py")


@pytest.fixture(scope="module")
def eight(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "eight", 8)


# The cases compare losses, norms of gradients and weights with one process themselves; a difference is an exception.


@pytest.mark.parametrize(
    "case",
    tiered(
        [
            "N9_pp2_3_layers",
            "N9_pp2_4_layers",
            "N12_tied",
            "accumulation_tied",
            "1f1b",
            "1f1b_accumulation_tied",
            "zbv",
            "split_spec_prefix",
            "split_spec_list",
            "split_spec_points",
            "global_spec",
            "any_loss_is_exact",
            "microbatches_of_one_sample_beside_a_table",
            "freezing_while_it_trains",
            "inference_mode",
            "random_numbers_stay_in_step",
            "autocast",
            "optimizer_keeps_groups_state_and_scheduler",
            "clipping_together_with_a_module_outside",
            "one_loop_for_a_mesh_without_stages",
            "refused_batch_leaves_earlier_gradients",
        ],
        lambda case: (
            case
            not in (
                "N9_pp2_3_layers",
                "N9_pp2_4_layers",
                "split_spec_points",
                "1f1b",
                "split_spec_prefix",
                "accumulation_tied",
                "split_spec_list",
                "autocast",
            )
        ),
    ),
)
def test_on_two_processes(two: Group, case: str) -> None:
    for rank in range(2):
        two.read(case, rank)


@pytest.mark.parametrize(
    "case",
    tiered(
        [
            "dp2_pp2_level0",
            "dp2_pp2_level3",
            "dp2_pp2_level1_1f1b",
            "dp2_pp2_level2_1f1b",
            "mp2_pp2",
            "mp2_pp2_1f1b",
            "mp2_pp2_tied",
            "ranks_laid_out_otherwise",
            "label_means_everywhere",
        ],
        ["dp2_pp2_level2_1f1b"],
        ["dp2_pp2_level0", "dp2_pp2_level1_1f1b", "mp2_pp2", "mp2_pp2_1f1b"],
    ),
)
def test_on_four_processes(four: Group, case: str) -> None:
    for rank in range(4):
        four.read(case, rank)


@pytest.mark.every  # half a minute
def test_on_eight_processes(eight: Group) -> None:
    for rank in range(8):
        eight.read("N10_dp2_mp2_pp2_level3", rank)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "ModelOutput"])
def test_forward_alone_cannot_be_differentiated(two: Group, kind: str) -> None:
    for rank in range(2):
        assert two.read("forward_alone", rank)[kind] == (
            "a call of a model that is cut into pipeline stages runs forward only, so its output can't be "
            "differentiated; write `loss = model.forward_backward(step, *batch)` instead of loss.backward()"
        )


STEP = (
    "  allowed: a function of the batch that calls the model and returns the loss, a tensor with one number\n"
    "  write:   lambda x, y: criterion(model(x), y)"
)
REFUSALS = {
    "no call": "ConfigError: pp: the step never calls model(...), so it can't be run in stages\n"
    "  allowed: a step that calls model(...); a call of its forward, or of a part of it, does not count",
    "two calls": "ConfigError: pp: the step calls model more than once; other stages than the last leave the step at "
    "the first call, so a pipeline can run one call per step\n"
    "  allowed: one call of the model per step, e.g. with both inputs joined along the batch",
    "no loss": f"ConfigError: forward_backward: the step returned a tensor of shape (8, 6, 16), not a loss\n{STEP}",
    "a number": f"ConfigError: forward_backward: the step returned float, not a loss\n{STEP}",
    "no graph": "ConfigError: forward_backward: the loss that the step returned has no gradient: it does not come from "
    "the output of the model\n  allowed: a loss computed from what model(...) returned, without detach() or item()",
    "penalty": "ConfigError: pp: the loss uses blocks.2.layer.weight outside of the call of the model, where a stage "
    "sees its own parameters only (a penalty on all weights, say)\n"
    "  allowed: weight_decay of the optimizer, a penalty computed in the model's forward, or a mesh with pp of size 1",
    "no_grad": "RuntimeError: forward_backward computes gradients, which torch.no_grad() or inference_mode() has "
    "switched off here; model(...) runs forward only",
    "no batch": "ConfigError: forward_backward: it was given no batch that could be cut into microbatches\n"
    "  allowed: the tensors of the batch as arguments: step is called with a part of them\n"
    "  write:   loss = model.forward_backward(step, *batch)",
    "another objective": "ConfigError: pp.loss=microbatch: the loss of the first batch is 0.254712, but the mean over "
    "its 8 microbatches is 0: training would minimise something else than on one device\n"
    "  allowed: pp.loss=exact, which computes the loss of the whole batch; or a loss that is a mean over samples\n"
    "  write:   pp=exact",
    "own name": "ConfigError: model=WithOwnName: it has a `forward_backward` of its own, which is the name of the call "
    "that trains a batch in stages\n  allowed: another name for it",
    "too few": "ConfigError: pp.split_spec=blocks: 1 place to end a stage, blocks.0, but 2 stages\n"
    "  allowed: at most 1 stage (pp x virtual stages), or more names in pp.split_spec",
    "no match": "ConfigError: pp.split_spec=layers: no module is called layers\n"
    "  allowed: the repeated blocks blocks.0, blocks.1, blocks.2, blocks.3; names like blocks.*.layer\n"
    "  write:   pp.split_spec=blocks",
    "no global": "ConfigError: pp.global_spec=position: no module of the model is called so; did you mean positions?\n"
    "  allowed: names of modules, as a string or a list",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_the_same_on_every_stage(two: Group, case: str) -> None:
    for rank in range(2):
        assert two.read("refusals", rank)[case] == REFUSALS[case]


BY_SCHEDULE = {
    "no loss": REFUSALS["no loss"].replace("(8, 6, 16)", "(2, 6, 16)"),
    "two calls": REFUSALS["two calls"],
    "no graph": REFUSALS["no graph"],
}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
@pytest.mark.parametrize("case", [*BY_SCHEDULE, "error behind the call"])
def test_what_fails_for_one_microbatch_is_told_to_every_stage(two: Group, case: str, schedule: str) -> None:
    last, first = (two.read("refusals_by_schedule", rank)[f"{case} {schedule}"] for rank in (0, 1))
    if case in BY_SCHEDULE:
        assert last == first == BY_SCHEDULE[case]
        return
    assert last.startswith("ZeroDivisionError")
    assert first == f"StageFailedError: the step failed on the last pipeline stage: {last}"


def test_errors_that_belong_to_one_stage(two: Group) -> None:
    last, first = two.read("refusals", 0), two.read("refusals", 1)
    assert last["error behind the call"] == "IndexError: list index out of range"
    assert first["error behind the call"] == (
        "StageFailedError: the step failed on the last pipeline stage: IndexError: list index out of range"
    )
    text = "RuntimeError: pp: {} is held by stage {} and can't run here; call the whole model"
    assert (last["part"], first["part"]) == (text.format("blocks.0", 0), text.format("blocks.3", 1))
    assert (last["inner call"], first["inner call"]) == (text.format("embed", 0), text.format("blocks.2", 1))


def test_another_model_of_stages_behind_the_call(two: Group) -> None:
    for rank in range(2):
        assert two.read("another_model_in_the_step", rank) == (
            "ConfigError: forward_backward: the step calls a Chain that is cut into stages behind its call of the "
            "model that it trains, where other stages have left it\n"
            "  allowed: its call in front of that call, or in front of forward_backward"
        )


# --- what is checked before anything is started --------------------------------------------------------------------

STAGES = ProcessMesh([[0, 1]], ["dp", "pp"])
FIELDS = "name, loss, schedule, microbatches, virtual_stages, split, split_spec, allow_batch_statistics, global_spec"


@pytest.mark.parametrize(
    ("mesh", "config", "expected"),
    [
        pytest.param(ProcessMesh([0], ["dp"]), {"pp_config": {"split_spec": "layers"}}, "pp_config: ProcessMesh(dp=1, "
                     "ranks=[0]) has no axis pp\n  allowed: a mesh with 'pp' among its dim_names", id="no axis"),
        pytest.param(STAGES, {"pp_config": "layers"}, "pp_config: a mapping is needed, not str", id="type"),
        pytest.param(STAGES, {"pp_config": {"split_specs": "layers"}}, "pp.split_specs: no such key; did you mean "
                     f"pp.split_spec?\n  allowed: {FIELDS}", id="key"),
        pytest.param(STAGES, {"pp_config": {"loss": "mean"}}, "pp.loss=mean: not one of the choices\n"
                     "  allowed: exact, microbatch", id="loss"),
        pytest.param(STAGES, {"pp_config": {"schedule": "1f1b"}}, "pp.loss=exact with pp.schedule=1f1b: exact works "
                     "with gpipe alone: the loss of the whole batch comes after all forwards and before all backwards\n"
                     "  allowed: pp.schedule=gpipe; or pp.loss=microbatch, if the loss is a mean over samples\n"
                     "  write:   pp.loss=microbatch", id="exact with 1f1b"),
        pytest.param(STAGES, {"pp_config": {"loss": "microbatch", "schedule": "1F1B"}}, "pp.schedule=1F1B: no such "
                     "schedule; did you mean 1f1b?\n  allowed: gpipe, 1f1b, looped_bfs, interleaved_1f1b, "
                     "interleaved_zero_bubble, zbv_zero_bubble, dualpipev, or the path of a CSV file\n"
                     "  write:   pp.schedule=1f1b", id="schedule"),
        pytest.param(STAGES, {"pp_config": {"split_spec": {"layers.1": "MIDDLE"}}}, "pp.split_spec={layers.1: MIDDLE}: "
                     "MIDDLE is no split point\n  allowed: BEGINNING (before it), END (behind it)", id="split point"),
        pytest.param(STAGES, {"pp_config": {"split_spec": {}}}, "pp.split_spec={}: names no module\n"
                     "  allowed: a prefix of numbered blocks, a list of names and prefixes, "
                     "{name or pattern: BEGINNING | END}, or null\n  write:   pp.split_spec=null", id="no cuts"),
    ],
)  # fmt: skip
def test_wrong_configs(mesh: ProcessMesh, config: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parallelize(nn.Linear(2, 2), None, mesh, config)
    assert str(caught.value) == expected


def test_split_points_are_two() -> None:
    assert [point.name for point in SplitPoint] == ["BEGINNING", "END"]
