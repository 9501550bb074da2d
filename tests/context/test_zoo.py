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
_ALONE = (
    "Positions of a sharded sequence may meet only in attention that is computed by torch.nn.functional.scaled_dot_"
)
REFUSED: dict[str, tuple[str, str]] = {
    "gemma2": ("model.model.layers.0 (Gemma2DecoderLayer)", "attention as `eager`"),  # caps scores
    "gptj": ("model.transformer.h.0 (GPTJBlock)", "attention as `eager`"),
    "gpt_neo": ("model.transformer.h.0 (GPTNeoBlock)", "attention as `eager`"),
    "deberta_v2": ("model.deberta.encoder.layer.0 (DebertaV2Layer)", "attention as `eager`"),
    "bloom": ("model.transformer.h.0 (BloomBlock)", _ALONE),
    "codegen": ("model.transformer.h.0 (CodeGenBlock)", _ALONE),
    "mpt": ("model.transformer.blocks.0 (MptBlock)", _ALONE),
    "t5": ("model.encoder.block.0 (T5Block)", _ALONE),
    "mamba": ("model.backbone.layers.0 (MambaBlock)", _ALONE),
    "swin": ("model.swin.encoder.layers.0 (SwinStage)", _ALONE),
    "convnext": ("model.convnext.encoder.stages.0 (ConvNextStage)", _ALONE),
}
"""Families whose sequences can't be divided: which block is named, and what is said of it."""

EVERYDAY = {
    *(f"{family}:gather" for family in of_the_day((*NAMES, *MORE), "cp")), "mixtral:ulysses", "bart:ring",
    "vision_transformer:ring+pad",
}  # fmt: skip

CASES = tiered(
    [(name, case) for name, (_, cases) in MESHES.items() for case in cases if case.split(":")[0] not in REFUSED],
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


@pytest.mark.parametrize("family", tiered(REFUSED, ["gemma2", "bloom", "mamba"]))
def test_what_can_not_be_divided_is_told_so(on: Callable[[str], Group], family: str) -> None:
    for rank in on("cp2").read_all(f"{family}:gather"):
        told = rank["refused"]
        assert told.startswith("cp=2 with ") and all(phrase in told for phrase in REFUSED[family])
