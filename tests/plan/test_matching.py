"""Which rule of a plan applies to which module; how plans are read and merged. No process is started."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from autolaunch_strategies import ColWiseParallel, ConfigError, RowWiseParallel, SequenceParallelDisable
from autolaunch_strategies.plan.rules import match_rules, merge_plans, read_plan
from autolaunch_strategies.tensor.styles.build import build_style
from tests.support.messages import Told, assert_only_told

NAMES = [f"layers.{layer}.{part}" for layer in (0, 1, 2, 10) for part in ("fc1", "fc2")] + ["head", "embed"]
PARAMETERS = {name: ["weight", "bias"] for name in NAMES} | {f"layers.{layer}": [] for layer in (0, 1, 2, 10)}


def found(*patterns: str, prefix: str = "") -> list[str]:
    matches, _ = match_rules(read_plan(dict.fromkeys(patterns, "ColWiseParallel")), {"": [], **PARAMETERS}, prefix)
    return [match.module + (f":{match.only}" if match.only else "") for match in matches]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*.fc1", ["layers.0.fc1", "layers.1.fc1", "layers.2.fc1", "layers.10.fc1"]),
        ("layers.1.fc1", ["layers.1.fc1"]),
        ("layers.1", ["layers.1"]),
        ("layers.1.*", ["layers.1.fc1", "layers.1.fc2"]),
        ("layers.[0-1].fc(1|2)", ["layers.0.fc1", "layers.0.fc2", "layers.1.fc1", "layers.1.fc2"]),
        (".*fc1", ["layers.0.fc1", "layers.1.fc1", "layers.2.fc1", "layers.10.fc1"]),
        ("head|embed", ["head", "embed"]),
        ("layers.1|layers.10", ["layers.1", "layers.10"]),
        ("fc1", []),
        ("head.weight", ["head:weight"]),
        ("layers.*.fc2.bias", [f"layers.{layer}.fc2:bias" for layer in (0, 1, 2, 10)]),
        ("model.head", []),
    ],
)
def test_patterns(pattern: str, expected: list[str]) -> None:
    assert found(pattern) == expected


def test_names_with_and_without_what_stands_in_front() -> None:
    assert found("model.head", prefix="model.") == ["head"] == found("head", prefix="model.")
    assert found("model", prefix="model.") == [""]


def test_a_name_that_a_module_has_of_its_own_means_that_module_alone() -> None:
    parameters = {"": ["scale"], "decoder": ["weight"], "model": ["scale"], "model.decoder": ["weight"]}
    patterns = ["model", "model.scale", "model.decoder", "model.decoder.weight"]
    matches, _ = match_rules(read_plan(dict.fromkeys(patterns, "GatherWhenUsed")), parameters, "model.")
    assert {(match.rule.pattern, match.module, match.only) for match in matches} == {
        ("model", "model", None),
        ("model.scale", "model", "scale"),
        ("model.decoder", "model.decoder", None),
        ("model.decoder.weight", "model.decoder", "weight"),
    }


def test_all_rules_of_a_module_apply_in_the_order_of_the_plan() -> None:
    plan = {".*fc1": "ColWiseParallel", "layers.0.fc1": ["RowWiseParallel", "SequenceParallelEnd"]}
    matches, warnings = match_rules(read_plan(plan), PARAMETERS)
    of_first = [style.name for match in matches if match.module == "layers.0.fc1" for style in match.rule.styles]
    assert of_first == ["ColWiseParallel", "RowWiseParallel", "SequenceParallelEnd"] and not warnings


def test_a_rule_for_nothing_is_a_warning_with_the_nearest_names() -> None:
    _, warnings = match_rules(read_plan({"layer.*.fc1": "ColWiseParallel"}), PARAMETERS)
    assert warnings == ["mp.plan: layer.*.fc1 matches nothing; the nearest names are layers.*.fc*, layers.*"]


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"layers.(": "ColWiseParallel"}, Told("mp.plan: 'layers.('", "not a pattern")),
        ({3: "ColWiseParallel"}, Told("mp.plan: 3", "text")),
        ({"a": "ColwiseParalel"}, Told("mp.plan: a", "ColwiseParalel", "ColWiseParallel")),
        ({"a": {"ColWiseParallel": {"gather": True}}}, Told("mp.plan: a", "ColWiseParallel", "'gather'")),
        ({"a": {"ColWiseParallel": {"gather_output": 3}}}, Told("mp.plan: a", "ColWiseParallel.gather_output=3")),
        ({"a": 3}, Told("mp.plan: a", "not a style", "3")),
        ([], Told("mp.plan", "mapping", "not list")),
    ],
    ids=lambda value: getattr(value, "key", None),
)
def test_wrong_plans(plan: Any, told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan(plan)
    assert_only_told(caught.value, told)


def test_merging_replaces_removes_and_adds() -> None:
    base = read_plan({"a": "ColWiseParallel", "b": "RowWiseParallel", "c": "ColWiseParallel"})
    merged = merge_plans(base, {"b": None, "c": "RowWiseParallel", "d": "SequenceParallelEnd"})
    assert {rule.pattern: rule.to_yaml() for rule in merged} == {
        "a": "ColWiseParallel",
        "c": "RowWiseParallel",
        "d": "SequenceParallelEnd",
    }


def test_a_null_for_a_rule_that_there_is_not_is_a_warning() -> None:
    base = read_plan({"layers.*.fc1": "ColWiseParallel", "head": "RowWiseParallel"})
    matches, warnings = match_rules(merge_plans(base, {"layers.0.fc1": None, "head": None}), PARAMETERS)
    assert [match.module for match in matches] == [f"layers.{layer}.fc1" for layer in (0, 1, 2, 10)]
    said = "null removes nothing, no rule has this pattern; did you mean layers.*.fc1?"
    assert warnings == [f"mp.plan: layers.0.fc1: {said}"]


def made(style: Any) -> Any:
    return build_style(read_plan({"a": style})[0].styles[0], "a")


def test_styles_as_yaml_writes_them() -> None:
    assert isinstance(made("RowWiseParallel"), RowWiseParallel)
    assert made({"ColWiseParallel": {"gather_output": True}}).gather_output
    assert made({"SequenceParallelDisable": {"need_transpose": False}}).need_transpose is False
    assert isinstance(made({"_target_": "autolaunch_strategies.tensor.styles.tensor.ColWiseParallel"}), ColWiseParallel)
    assert isinstance(made(SequenceParallelDisable()), SequenceParallelDisable)
    theirs = made(
        {
            "_target_": "torch.distributed.tensor.parallel.ColwiseParallel",
            "output_layouts": {"_target_": "torch.distributed.tensor.Shard", "dim": 1},
            "use_local_output": False,
        }
    ).style
    assert isinstance(theirs, ColwiseParallel) and theirs.output_layouts == (Shard(1),) and not theirs.use_local_output


@pytest.mark.parametrize(
    ("style", "told"),
    [
        ({"_target_": "nowhere.Style"}, Told("a: nowhere.Style", "nowhere")),
        (
            {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1},
            Told("a: torch.nn.Linear", "is not a style"),
        ),
        ({"PrepareLayerInput": {"fn": len}}, Told("PrepareLayerInput", "process_mesh")),
    ],
    ids=lambda value: getattr(value, "key", None),
)
def test_styles_that_can_not_be_made(style: Any, told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        made(style)
    assert_only_told(caught.value, told)
