"""Many families of models on two ranks along cp: the loss and every gradient equal those of one process, or they are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tests.context.zoo_cases import MESHES
from tests.support.ranks import Group, GroupOf
from tests.support.tiers import of_the_day, tiered
from tests.support.zoo import MORE, NAMES

SCRIPT = Path(__file__).with_name("zoo_cases.py")
EVERYDAY = {
    *(f"{family}:gather" for family in of_the_day((*NAMES, *MORE), "cp")), "mixtral:ulysses", "bart:ring",
    "vision_transformer:ring",
}  # fmt: skip

CASES = tiered(
    [(name, case) for name, (_, cases) in MESHES.items() for case in cases],
    lambda item: item[1] in EVERYDAY,
)

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def on(group_of: GroupOf) -> Callable[[str], Group]:
    return functools.cache(lambda name: group_of(SCRIPT, name, MESHES[name][0]))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_loss_and_gradients_are_those_of_one_process(on: Callable[[str], Group], name: str, case: str) -> None:
    for rank in on(name).read_all(case):
        assert "found" in rank, rank
        loss, gradients = rank["expected"]
        largest = max(gradient.abs().max() for gradient in gradients.values())
        own_loss, own = rank["found"]
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
        assert set(own) == set(gradients)
        for key, gradient in own.items():
            # What is rounding error beside the others (biases in front of a softmax) has no digits to compare.
            atol = 1e-5 * float(gradients[key].abs().max()) + 1e-7 * float(largest)
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-5, atol=atol, msg=f"{key}: {{}}".format)
