"""From what people write in `pp.split_spec` to the cuts between modules."""

from __future__ import annotations

import enum
import itertools
import random

import pytest

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.pipeline.split import (
    Cut,
    balanced_sizes,
    candidate_names,
    choose_cuts,
    even_sizes,
)
from tests.support.messages import Told, assert_only_told, assert_told

BLOCKS = [f"model.layers.{index}" for index in range(12)]
# As it runs: the rotary tables after the embedding, the norm and the head after the blocks; containers never run.
EXECUTED = [
    "",
    "model",
    "model.embed_tokens",
    "model.rotary_emb",
    *itertools.chain.from_iterable([block, f"{block}.attn", f"{block}.mlp"] for block in BLOCKS),
    "model.norm",
    "lm_head",
]
# As it is defined: the head before everything else, and a module that nobody calls.
MODULES = ["", "lm_head", "unused", "model", "model.norm", "model.layers", *EXECUTED[2:-2]]


def cuts(spec, stages, split="even", costs=None, prefix=""):
    found = choose_cuts(spec, EXECUTED, MODULES, BLOCKS, stages, split, costs or {}, prefix=prefix)
    return [str(cut) for cut in found]


@pytest.mark.parametrize(
    ("count", "stages", "sizes"),
    [
        pytest.param(5, 2, [3, 2], id="5 over 2"),
        pytest.param(7, 3, [3, 2, 2], id="7 over 3"),
        pytest.param(10, 4, [3, 3, 2, 2], id="10 over 4"),
        pytest.param(8, 4, [2, 2, 2, 2], id="8 over 4"),
        pytest.param(3, 3, [1, 1, 1], id="3 over 3"),
        pytest.param(4, 1, [4], id="4 over 1"),
    ],
)
def test_even_sizes(count, stages, sizes):
    assert even_sizes(count, stages) == sizes
    blocks = [f"layers.{index}" for index in range(count)]
    lasts = [sum(sizes[: stage + 1]) - 1 for stage in range(stages - 1)]
    assert choose_cuts(None, blocks, blocks, blocks, stages, "even", {}) == [
        Cut(f"layers.{last}", after=True) for last in lasts
    ]


class TorchSplitPoint(enum.Enum):
    """As `torch.distributed.pipelining.SplitPoint` is."""

    BEGINNING = 1
    END = 2


@pytest.mark.parametrize(
    ("spec", "stages", "expected"),
    [
        pytest.param(None, 2, ["behind model.layers.5"], id="the blocks found"),
        pytest.param("model.layers", 3, ["behind model.layers.3", "behind model.layers.7"], id="a prefix"),
        pytest.param(["model.layers"], 3, ["behind model.layers.3", "behind model.layers.7"], id="a prefix in a list"),
        pytest.param(["model.layers.4", "model.layers.2"], 2, ["behind model.layers.2"], id="names in any order"),
        pytest.param(["model.norm", "model.layers"], 13, [f"behind {name}" for name in BLOCKS], id="prefix and name"),
        # Defined first, executed last.
        pytest.param(["lm_head", "model.layers.7"], 2, ["behind model.layers.7"], id="in order of execution"),
        pytest.param(["model.layers.1.attn", "model.layers.3"], 2, ["behind model.layers.1.attn"], id="inside a block"),
        pytest.param(
            ["model.layers.1.mlp", "model.layers.1", "model.layers.3"],
            2,
            ["behind model.layers.1"],
            id="two names that end together",
        ),
        pytest.param({"model.layers.4": "END"}, 2, ["behind model.layers.4"], id="END"),
        pytest.param({"model.layers.4": "beginning"}, 2, ["before model.layers.4"], id="lower case"),
        pytest.param({"model.layers.4": TorchSplitPoint.BEGINNING}, 2, ["before model.layers.4"], id="torch's"),
        pytest.param(
            {"model.layers.9": "END", "model.layers.2": "END"},
            3,
            ["behind model.layers.2", "behind model.layers.9"],
            id="a mapping in any order",
        ),
        pytest.param(
            {"model.layers.[2-3]": "END", "lm_head": "BEGINNING"},
            4,
            ["behind model.layers.2", "behind model.layers.3", "before lm_head"],
            id="a regular expression",
        ),
        pytest.param(
            {"*.layers.1": "BEGINNING", "model.layers.1": "END"},
            3,
            ["before model.layers.1", "behind model.layers.1"],
            id="both sides of one module",
        ),
        pytest.param({"model.layers.0": "END"}, 2, ["behind model.layers.0"], id="the prefix of another number"),
    ],
)
def test_cuts(spec, stages, expected):
    assert cuts(spec, stages) == expected


@pytest.mark.parametrize("spec", ["net.model.layers", ["net.model.layers"], {"net.model.layers.5": "END"}])
def test_names_may_begin_with_the_name_of_the_model(spec):
    assert cuts(spec, 2, prefix="net") == cuts(spec, 2, prefix="net.") == ["behind model.layers.5"]


def test_a_name_counts_as_it_stands_before_its_beginning_is_dropped():
    assert cuts("model.layers", 2, prefix="model") == ["behind model.layers.5"]


def test_blocks_that_are_never_called_are_no_places_by_default():
    executed = ["layers.0", "layers.2", "layers.3"]
    blocks = [f"layers.{index}" for index in range(4)]
    assert choose_cuts(None, executed, blocks, blocks, 2, "even", {}) == [Cut("layers.2", after=True)]


def test_both_ways_to_name_a_place_cut_a_container_that_runs():
    """In `groups` of blocks that run as modules of their own, the end of one is the beginning of the next."""
    executed = ["a", "a.0", "a.1", "b", "b.0", "b.1"]
    with pytest.raises(ConfigError) as raised:
        choose_cuts({"a.1": "END", "b.0": "BEGINNING"}, executed, executed, [], 3, "even", {})
    assert_told(raised.value, "pp.split_spec={a.1: END, b.0: BEGINNING}", "behind a.1", "before b.0", "same place")
    for spec in ({"a": "END"}, {"a.1": "END"}, {"b": "BEGINNING"}, {"b.0": "BEGINNING"}):
        assert len(choose_cuts(spec, executed, executed, [], 2, "even", {})) == 1


REPEATED = ["", "embed", "layer", "layer.up", "layer.down", "layer@1", "layer@2", "between", "layer@3", "head"]
"""One block that is called four times."""
ONCE = [name for name in REPEATED if "@" not in name]


@pytest.mark.parametrize(
    ("spec", "stages", "expected"),
    [
        pytest.param({"layer@1": "END"}, 2, ["behind layer@1"], id="behind a call"),
        pytest.param({"layer@0": "END"}, 2, ["behind layer@0"], id="behind the first"),
        pytest.param({"layer@3": "BEGINNING"}, 2, ["before layer@3"], id="before a call"),
        pytest.param({"layer": "END"}, 2, ["behind layer"], id="behind all calls"),
        pytest.param({"laye[r]@2": "END", "layer@0": "END"}, 3, ["behind layer@0", "behind layer@2"], id="in order"),
        pytest.param("layer", 2, ["behind layer@1"], id="every call is a place"),
        pytest.param(["layer", "head"], 3, ["behind layer@1", "behind layer@3"], id="beside a module called once"),
    ],
)
def test_calls_of_one_module_are_places(spec, stages, expected):
    found = choose_cuts(spec, REPEATED, ONCE, [], stages, "even", {})
    assert [str(cut) for cut in found] == expected


def test_the_cost_of_a_module_is_shared_by_its_calls():
    costs = {"layer": 4, "head": 3}
    assert choose_cuts("layer", REPEATED, ONCE, [], 2, "balanced", costs) == [Cut("layer@2", after=True)]


@pytest.mark.parametrize(("module", "problem"), [("layer@4", "4 times"), ("head@1", "once")])
def test_a_call_that_there_is_not(module, problem):
    with pytest.raises(ConfigError) as raised:
        choose_cuts({module: "END"}, REPEATED, ONCE, [], 2, "even", {})
    assert_told(raised.value, f"pp.split_spec={{{module}: END}}", problem)


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        pytest.param({}, 5, [3, 3, 2, 2, 2], id="as even where nothing costs anything"),
        pytest.param(dict.fromkeys(BLOCKS, 1), 3, [4, 4, 4], id="as even where all cost the same"),
        pytest.param(dict.fromkeys(BLOCKS, 0.1), 5, [3, 3, 2, 2, 2], id="more for the first stages"),
        pytest.param({**dict.fromkeys(BLOCKS, 1), "lm_head": 4}, 4, [4, 4, 3, 1], id="a head"),
        pytest.param({**dict.fromkeys(BLOCKS, 1), "model.embed_tokens": 3}, 3, [2, 5, 5], id="an embedding"),
        pytest.param({**dict.fromkeys(BLOCKS, 1), "unused": 99}, 2, [6, 6], id="what never runs"),
    ],
)
def test_balanced_by_cost_with_what_runs_around_the_blocks(costs, stages, expected):
    lasts = [sum(expected[: stage + 1]) - 1 for stage in range(stages - 1)]
    assert cuts(None, stages, "balanced", costs) == [f"behind {BLOCKS[last]}" for last in lasts]


def test_balanced_counts_what_lies_between_two_candidates_for_the_later_one():
    executed = ["a", "b", "costly", "c", "d"]
    costs = {"a": 1, "b": 1, "costly": 2, "c": 1, "d": 1}
    names = ["a", "b", "c", "d"]
    assert choose_cuts(names, executed, executed, [], 3, "balanced", costs) == [
        Cut("b", after=True),
        Cut("c", after=True),
    ]


def _brute_force(weights, stages):
    def of(ends):
        sums = [sum(weights[begin:end]) for begin, end in zip((0, *ends), (*ends, len(weights)), strict=True)]
        sizes = [end - begin for begin, end in zip((0, *ends), (*ends, len(weights)), strict=True)]
        return max(sums), sum(value**2 for value in sums), sum(size**2 for size in sizes), [-size for size in sizes]

    best = min(of(ends) for ends in itertools.combinations(range(1, len(weights)), stages - 1))
    return [-size for size in best[3]]


@pytest.mark.parametrize("seed", range(60))
def test_balanced_is_the_best_of_all_splits(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    stages = draw.randint(1, count)
    weights = [draw.randint(0, 6) for _ in range(count)]
    assert balanced_sizes(weights, stages) == _brute_force(weights, stages)
    # As floats, too.
    assert balanced_sizes([weight / 8 for weight in weights], stages) == _brute_force(weights, stages)


@pytest.mark.parametrize(
    ("spec", "prefix", "expected"),
    [
        pytest.param(None, "", BLOCKS, id="the blocks found"),
        pytest.param("model.layers", "", BLOCKS, id="by number, not by letter"),
        pytest.param("lm_head", "", ["lm_head"], id="a name"),
        pytest.param("net.lm_head", "net", ["lm_head"], id="with the model's name"),
        pytest.param({"model.layers.[1-2]": "END"}, "", ["model.layers.1", "model.layers.2"], id="a pattern"),
        pytest.param({"*.layers.*": "END"}, "", BLOCKS, id="a glob is one part"),
        pytest.param({"net.lm_head": "BEGINNING"}, "net", ["lm_head"], id="a pattern with the model's name"),
    ],
)
def test_candidate_names(spec, prefix, expected):
    assert sorted(candidate_names(spec, MODULES, BLOCKS, prefix=prefix)) == sorted(expected)


@pytest.mark.parametrize(
    ("spec", "stages", "told"),
    [
        pytest.param(
            "model.layer",
            2,
            Told(
                "pp.split_spec=model.layer",
                "no module",
                "model.layer",
                allowed=("model.layers.0 to model.layers.11", "model.layers, model.layers.*, model.layers.*.mlp"),
                write="pp.split_spec=model.layers",
            ),
            id="no match",
        ),
        pytest.param(
            ["model.layers", "head"],
            2,
            Told(
                "pp.split_spec=[model.layers,head]",
                "no module",
                "head",
                allowed=("model.layers.0 to model.layers.11", "lm_head"),
                write="pp.split_spec=model.layers",
            ),
            id="no match in a list",
        ),
        pytest.param(
            {"layers.*": "END"},
            2,
            Told(
                "pp.split_spec={layers.*: END}",
                "no module",
                "layers.*",
                allowed=("model.layers.0 to model.layers.11", "model.layers.*, model.layers.*.mlp, model.layers"),
            ),
            id="no match in a mapping",
        ),
        pytest.param(
            "model.layers.",
            2,
            Told(
                "pp.split_spec=model.layers.",
                "no module",
                "model.layers.",
                allowed=("model.layers.0 to model.layers.11", "model.layers.*, model.layers, model.layers.*.mlp"),
                write="pp.split_spec=model.layers",
            ),
            id="a prefix is no regular expression",
        ),
        pytest.param(
            "model.layers",
            13,
            Told(
                "pp.split_spec=model.layers",
                "12 places",
                "model.layers.0 to model.layers.11",
                "13 stages",
                allowed=("at most 12 stages",),
            ),
            id="too few blocks",
        ),
        pytest.param(
            "model.norm",
            2,
            Told("pp.split_spec=model.norm", "1 place", "model.norm", "2 stages", allowed=("at most 1 stage",)),
            id="one block",
        ),
        pytest.param(
            {"model.layers.1": "END", "model.layers.2": "END"},
            2,
            Told(
                "pp.split_spec={model.layers.1: END, model.layers.2: END}",
                "2 cuts",
                "behind model.layers.1, behind model.layers.2",
                "2 stages",
                allowed=("1 cut",),
            ),
            id="too many in a mapping",
        ),
        pytest.param(
            {"model.layers.1": "END"},
            4,
            Told(
                "pp.split_spec={model.layers.1: END}", "1 cut", "behind model.layers.1", "4 stages", allowed=("3 cuts",)
            ),
            id="too few in a mapping",
        ),
        pytest.param(
            {"model.layers.1": "MIDDLE"},
            2,
            Told("pp.split_spec={model.layers.1: MIDDLE}", "MIDDLE", allowed=("BEGINNING", "END")),
            id="a word that is none",
        ),
        pytest.param(
            {"model.(": "END"},
            2,
            Told(
                "pp.split_spec={model.(: END}",
                "model.(",
                "missing ), unterminated subpattern at position 7",
                allowed=("*", "regular expression"),
            ),
            id="not a pattern",
        ),
        pytest.param(
            {"lm_head": "END"},
            2,
            Told("pp.split_spec={lm_head: END}", "nothing runs after lm_head"),
            id="END of the last",
        ),
        pytest.param(
            {"model.embed_tokens": "BEGINNING"},
            2,
            Told("pp.split_spec={model.embed_tokens: BEGINNING}", "nothing runs before model.embed_tokens"),
            id="BEGINNING of the first",
        ),
        pytest.param(
            {"model.layers.1": "END", "model.layers.2": "BEGINNING"},
            3,
            Told(
                "pp.split_spec={model.layers.1: END, model.layers.2: BEGINNING}",
                "behind model.layers.1",
                "before model.layers.2",
                "same place",
            ),
            id="one place twice",
        ),
        pytest.param(
            ["unused", "lm_head"],
            2,
            Told(
                "pp.split_spec=[unused,lm_head]",
                "unused",
                "never called",
                allowed=("model.layers.0 to model.layers.11",),
            ),
            id="never called",
        ),
        pytest.param(
            {"model.layers": "END"},
            2,
            Told(
                "pp.split_spec={model.layers: END}",
                "model.layers",
                "never called",
                allowed=(
                    "model.layers.0 to model.layers.11",
                    "model.layers.*, model.layers.*.mlp, model.layers.*.attn",
                ),
            ),
            id="a list of blocks",
        ),
        pytest.param(
            3, 2, Told("pp.split_spec=3", "where to cut", allowed=("BEGINNING", "END", "null")), id="a number"
        ),
        pytest.param(
            ["model.layers", 4],
            2,
            Told("pp.split_spec=[model.layers,4]", "where to cut", allowed=("BEGINNING", "END", "null")),
            id="a number in a list",
        ),
        pytest.param(
            [],
            2,
            Told("pp.split_spec=[]", "no module", allowed=("BEGINNING", "END", "null"), write="pp.split_spec=null"),
            id="an empty list",
        ),
        pytest.param(
            {},
            2,
            Told("pp.split_spec={}", "no module", allowed=("BEGINNING", "END", "null"), write="pp.split_spec=null"),
            id="an empty mapping",
        ),
    ],
)
def test_a_wrong_spec_says_what_may_be_named(spec, stages, told):
    with pytest.raises(ConfigError) as raised:
        cuts(spec, stages)
    assert_only_told(raised.value, told)


def test_without_blocks_the_cuts_must_be_named():
    with pytest.raises(ConfigError) as raised:
        choose_cuts(None, ["a", "b"], ["a", "b"], [], 2, "even", {})
    told = Told("pp.split_spec=null", "no repeated blocks", allowed=("BEGINNING", "END", "null"))
    assert_only_told(raised.value, told)


def test_blocks_that_are_never_called() -> None:
    with pytest.raises(ConfigError) as error:
        choose_cuts(None, ["a"], ["a", "b.0", "b.1"], ["b.0", "b.1"], 2, "even", {})
    assert_only_told(error.value, Told("pp.split_spec=null", "none of the blocks", "b.0, b.1", allowed=("calls",)))
