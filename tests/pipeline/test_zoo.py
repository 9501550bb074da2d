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
from tests.support.tiers import but_one_in, of_the_day, spread, tiered
from tests.support.zoo import MORE, NAMES

SCRIPT = Path(__file__).with_name("zoo_cases.py")
EVERYDAY = {
    *(f"{family}:exact" for family in of_the_day((*NAMES, *MORE), "pp")), "gpt2_4:zbv_zero_bubble",
    "qwen3_moe_router_logits:exact", "albert:exact",
}  # fmt: skip

PAIRS = [(name, case) for name, (*_, cases) in MESHES.items() for case in cases]


def everyday(pair: tuple[str, str]) -> bool:
    return pair[0] == "pp2" and pair[1] in EVERYDAY


_CHOICE = spread(PAIRS, lambda pair: pair[1].split(":"), everyday)
_HALF = but_one_in(2, [pair for pair in PAIRS if not everyday(pair) and not _CHOICE(pair)])
CASES = tiered(PAIRS, everyday, lambda pair: _CHOICE(pair) or _HALF(pair))  # test_meshes.py has stages beside mp

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
