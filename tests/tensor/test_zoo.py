"""`mp=auto` on many families of models: loss, gradient norm and weights equal those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tests.support.ranks import Group, GroupOf
from tests.support.tiers import in_turn, of_the_day, tiered
from tests.support.zoo import NAMES

SCRIPT = Path(__file__).with_name("zoo_cases.py")
NO_SEQUENCE_PARALLEL = {
    "opt": "what goes into its first block is not the output of a module",
    "vision_transformer": "what goes into its first block is not the output of a module",
}
"""Models whose structure has no place for it, and what they are told."""

pytestmark = pytest.mark.timeout(300)

ON_TWO = in_turn(NAMES, ("tp", "tp", "tp", "sp", "sp", "sp"))
EVERYDAY = {(name, way) for name, way in ON_TWO if name in of_the_day(NAMES, "mp")}

CASES = tiered(
    [
        (mesh, name, way)
        for mesh in ("1x2", "2x2")
        for name in NAMES
        for way in ("tp", "sp")
        if ((name, way) in ON_TWO) == (mesh == "1x2")
    ],
    lambda case: case[0] == "1x2" and case[1:] in EVERYDAY,
    lambda case: case[0] == "2x2" and case[1] not in ("gpt2", "qwen3"),
)
"""(mesh, model, whether its sequences are sharded, too): each model meets both, one of them beside dp."""


@pytest.fixture(scope="module")
def one_process(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "none", 1)


@pytest.fixture(scope="module")
def on(group_of: GroupOf) -> Callable[[str], Group]:
    return functools.cache(lambda mesh: group_of(SCRIPT, mesh, {"1x2": 2, "2x2": 4}[mesh]))


@pytest.mark.parametrize(("mesh", "name", "way"), CASES)
def test_equals_one_process(one_process: Group, on: Callable[[str], Group], mesh: str, name: str, way: str) -> None:
    expected, found = one_process.read(name), on(mesh).read_all(f"{name}-{way}")[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["weights"].keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        where = f"{key}: {{}}".format  # zero-initialised biases whose gradient is rounding error need the atol
        torch.testing.assert_close(found["weights"][key], weight, rtol=1e-4, atol=1e-6, msg=where)


COMPILED = {
    **dict.fromkeys(("llama", "gemma2", "phi3", "gptj", "olmo2"), "sp-compiled"),
    **dict.fromkeys(("qwen3", "gpt2", "opt", "falcon", "encoder", "mpt"), "tp-compiled"),
    "mistral": "tp-compiled-selective",
    "qwen2": "sp-compiled-full",
}


@pytest.mark.parametrize("name", tiered(COMPILED, ("llama", "gpt2"), lambda name: name not in ("llama", "gpt2")))
def test_compiled_equals_one_process(one_process: Group, on: Callable[[str], Group], name: str) -> None:
    test_equals_one_process(one_process, on, "1x2", name, COMPILED[name])
    said = on("1x2").read(f"{name}-{COMPILED[name]}")["warnings"]
    assert [text for text in said if text.startswith("compile")] == []


@pytest.mark.full
def test_a_mixture_is_not_compiled_and_right(one_process: Group, on: Callable[[str], Group]) -> None:
    """Where an operator can't be followed on shapes, every block runs as it is, and one line says so."""
    test_equals_one_process(one_process, on, "1x2", "mixtral", "tp-compiled")
    (said,) = on("1x2").read("mixtral-tp-compiled")["warnings"]
    reason = said.removeprefix("compile: model.layers.0 (and others for the same reason) ")
    assert reason.startswith("runs as it is: ")
    assert on("1x2").read("mixtral-tp-compiled")["compile"]["reasons"]["model.layers.0"] == reason


@pytest.mark.parametrize(("mesh", "name", "way"), CASES)
def test_is_divided_as_far_as_it_can_be(on: Callable[[str], Group], mesh: str, name: str, way: str) -> None:
    found = on(mesh).read(f"{name}-{way}")
    assert found["held"] < 0.55
    styles = repr(found["rules"]["plan"])
    refused = [text for text in found["warnings"] if "no sequence parallelism" in text]
    if way == "sp" and name in NO_SEQUENCE_PARALLEL:
        assert [NO_SEQUENCE_PARALLEL[name] in text for text in refused] == [True]
    assert ("SequenceParallelBegin" in styles) == (way == "sp" and name not in NO_SEQUENCE_PARALLEL)
    assert [text for text in found["warnings"] if text not in refused] == []
    assert all(found["rules"]["reasons"].values())
