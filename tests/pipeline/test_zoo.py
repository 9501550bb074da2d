"""Many families of models in stages: the loss and every gradient equal those of one process, or they are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tests.pipeline.zoo_cases import MESHES
from tests.support.ranks import Group, GroupOf
from tests.support.tiers import of_the_day, tiered
from tests.support.zoo import MORE, NAMES

SCRIPT = Path(__file__).with_name("zoo_cases.py")
REFUSED = {
    "albert": [
        "pp.split_spec=null: the model shows no repeated blocks to cut between",
        "  allowed: a prefix of numbered blocks, a list of names and prefixes, {name or pattern: BEGINNING | END}, or "
        "null",
    ],
}
"""Families that can't be cut, and what they are told. Albert is one block that is called many times."""

EVERYDAY = {
    *(f"{family}:exact" for family in of_the_day((*NAMES, *MORE), "pp")), "gpt2_4:zbv_zero_bubble",
    "qwen3_moe_router_logits:exact",
}  # fmt: skip

CASES = tiered(
    [(name, case) for name, (*_, cases) in MESHES.items() for case in cases if case.split(":")[0] not in REFUSED],
    lambda item: item[0] == "pp2" and item[1] in EVERYDAY,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def on(group_of: GroupOf) -> Callable[[str], Group]:
    return functools.cache(lambda name: group_of(SCRIPT, name, MESHES[name][1]))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_loss_and_gradients_are_those_of_one_process(on: Callable[[str], Group], name: str, case: str) -> None:
    ranks = on(name).read_all(case)
    assert all("found" in rank for rank in ranks), ranks
    loss, gradients = ranks[0]["expected"]
    largest = max(gradient.abs().max() for gradient in gradients.values())
    held: set[str] = set()
    for rank in ranks:
        own_loss, own = rank["found"]
        torch.testing.assert_close(own_loss.float(), loss, rtol=1e-5, atol=0)
        held |= set(own)
        for key, gradient in own.items():
            # What is rounding error beside the others (biases in front of a softmax) has no digits to compare.
            atol = 1e-5 * float(gradients[key].abs().max()) + 1e-7 * float(largest)
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-5, atol=atol, msg=f"{key}: {{}}".format)
    assert held == set(gradients)
    assert all(stage["units"] for stage in ranks[0]["stages"])


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_cut_is_told_so(on: Callable[[str], Group], case: str) -> None:
    for rank in on("pp2").read_all(f"{case}:exact"):
        assert rank["refused"].splitlines() == REFUSED[case]
