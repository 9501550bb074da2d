"""Exact layouts of parameters and activations under every style, on two ranks; values are compared in the cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Group, GroupOf

SCRIPT = Path(__file__).parent / "styles_cases.py"


@pytest.fixture(scope="module")
def results(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "all", 2)


# S1 [2, 3]: this rank holds [2, 3] of a tensor divided along dim 1; R, P: replicated, to be added up.
LINEAR = {"weight": "S0 [3, 4]", "bias": "S0 [3]"}
ROW = {"weight": "S1 [6, 2]", "bias": "plain [6]"}
LORA = {"weight": "plain [6, 4]", "bias": "plain [6]"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("column linear", {"out": "S2 [2, 3, 3]", **LINEAR}),
        ("column linear 2-D", {"out": "S1 [3, 3]", **LINEAR}),
        ("column embedding", {"out": "S2 [2, 3, 2]", "weight": "S1 [6, 2]"}),
        ("column conv1d", {"out": "S2 [2, 3, 3]", "weight": "S1 [4, 3]", "bias": "S0 [3]"}),
        ("row linear", {"out": "plain [2, 3, 6]", **ROW}),
        ("row linear of a whole input", {"out": "plain [2, 3, 6]", **ROW}),
        ("row embedding", {"out": "plain [2, 3, 4]", "weight": "S0 [3, 4]"}),
        ("row conv1d", {"out": "plain [2, 3, 6]", "weight": "S0 [2, 6]", "bias": "plain [6]"}),
        ("gathered 2-D", {"out": "plain [3, 6]", **LINEAR}),
        ("gathered 3-D", {"out": "plain [2, 3, 6]", **LINEAR}),
        ("gathered 4-D", {"out": "plain [1, 2, 3, 6]", **LINEAR}),
        ("uneven", {"out": "plain [2, 3, 5]", **LINEAR}),
        (
            "column then row",
            {
                "out": "plain [2, 3, 4]",
                **{"0.weight": "S0 [3, 4]", "0.bias": "S0 [3]", "1.weight": "S1 [4, 3]", "1.bias": "plain [4]"},
            },
        ),
        (
            "column, norm, row",
            {
                "out": "plain [3, 4]",
                **{"0.weight": "S0 [3, 4]", "0.bias": "S0 [3]", "1.weight": "plain [6]", "1.bias": "plain [6]"},
                **{"2.weight": "S1 [4, 3]", "2.bias": "plain [4]"},
            },
        ),
        ("column norm", {"out": "plain [3, 4]", "weight": "S0 [2]", "bias": "S0 [2]"}),
        ("raw weight", {"out": "S2 [2, 3, 3]", "weight": "S1 [4, 3]", "shift": "plain [6]"}),
        ("raw both", {"out": "S2 [2, 3, 3]", "weight": "S1 [4, 3]", "shift": "S0 [3]"}),
        ("raw weight of rows", {"out": "P [2, 3, 6]", "weight": "S0 [2, 6]", "shift": "plain [6]"}),
        ("lora B", {"out": "S2 [2, 3, 3]", **LORA, "lora_A": "plain [4, 2]", "lora_B": "S1 [2, 3]"}),
        ("lora A", {"out": "plain [2, 3, 6]", **LORA, "lora_A": "S0 [2, 2]", "lora_B": "plain [2, 6]"}),
        ("first writer wins", {"out": "plain [2, 3, 6]", **LINEAR}),
        ("first key wins", {"out": "plain [2, 3, 6]", **ROW}),
        ("only the named parameter", {"out": "S2 [2, 3, 3]", "weight": "S0 [3, 4]", "bias": "plain [6]"}),
    ],
)
def test_placements(results: Group, case: str, expected: dict[str, str]) -> None:
    assert results.read("placements")[case] == expected


@pytest.mark.parametrize("length", [6, 5])
@pytest.mark.parametrize("turned", [True, False])
def test_sequence_styles(results: Group, length: int, turned: bool) -> None:
    for rank, own in enumerate((3, length - 3)):
        part = f"S0 [{own}, 2, 4]" if turned else f"S1 [2, {own}, 4]"
        assert results.read("sequence", rank)[f"{length} {turned}"] == {
            "begin": part,
            "global": [length, 2, 4] if turned else [2, length, 4],
            "end": f"plain [2, {length}, 4]",
            "inside disable": f"plain [2, {length}, 4]",
            "after disable": part,
        }


def test_sequence_within_one_module_and_other_ways_to_call(results: Group) -> None:
    found = results.read("sequence")
    assert found["enable"] == ["S0 [3, 2, 4]", [6, 2, 4], "plain [2, 6, 4]"]
    assert found["keyword"] == "plain [2, 6, 4]"
    assert found["tuple"] == ["S1 [2, 3, 4]", "plain [2, 6]"]


def test_a_rank_makes_the_gradient_of_its_own_rows_alone(results: Group) -> None:
    for rank in range(2):
        found = results.read("look_up", rank)
        assert [found[what] for what in ("even", "uneven", "padded", "padded elsewhere")] == [3, *[3 - rank] * 3]


def test_norms_update_their_running_statistics(results: Group) -> None:
    for rank in range(2):
        results.read("running_statistics", rank)


def test_norms_maxima_and_picked_values_have_the_gradients_of_one_process(results: Group) -> None:
    for rank in range(2):
        results.read("combined_parts", rank)


def test_gradients_can_be_differentiated_again(results: Group) -> None:
    for rank in range(2):
        results.read("second_derivatives", rank)


def test_hooks_stack_in_order(results: Group) -> None:
    assert results.read("hooks") == {"sizes": [2], "out": [6.0, 6.0]}  # (1 * 2 + 1) * 2


def test_tied_weights_follow_whichever_rule_comes_first(results: Group) -> None:
    assert results.read("head_with_tied_weight") == {"both": "S0 [3, 4]", "embed": "S1 [6, 2]", "head": "S0 [3, 4]"}
