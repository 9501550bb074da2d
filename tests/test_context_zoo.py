"""Many families of models on two ranks along cp: the loss and every gradient equal those of one process, or they are
refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from pipeline_zoo_run import MORE
from strategy_runs import start, torchrun
from zoo_models import NAMES

SCRIPT = str(Path(__file__).parent / "context_zoo_run.py")
_ALONE = (
    "Positions of a divided sequence may meet only in attention that is computed by torch.nn.functional.scaled_dot_"
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

ODD = ("vision_transformer", "clip", "whisper")
"""Families whose sequences have lengths that two ranks can't share evenly: tokens of a class, and few labels."""

STARTS: dict[str, tuple[str, int, list[str]]] = {
    "cp2": (
        "cp2",
        2,
        [f"{name}:gather+pad" if name in ODD else f"{name}:gather" for name in (*NAMES, *MORE)]
        + [f"{name}:{backend}" for name in ("llama", "gpt2", "mixtral", "bart") for backend in ("ring", "ulysses")]
        + ["deepseek_v3:ring", "qwen3_moe_router_logits:ring", "mixtral_router_logits:gather", "falcon:ulysses"]
        + ["vision_transformer:ring+pad", "clip:ulysses+pad"],
    ),
    "cp4": ("cp4", 4, ["gpt2_4:usp+pad", "qwen3:ring+pad", "bert:gather+pad", "opt:ulysses+pad"]),
}
"""Name of a start -> mesh, processes, cases."""

CASES = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, (_, _, cases) in STARTS.items()
    for case in cases
    if case.split(":")[0] not in REFUSED
]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a start: what every rank wrote."""
    results: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in results:
            mesh, ranks, cases = STARTS[name]
            directory = tmp_path_factory.mktemp(name)
            done = start(torchrun(ranks, SCRIPT, mesh, str(directory), *cases), timeout=300)
            assert done.returncode == 0, done.stdout[-4000:]
            results[name] = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
        return results[name]

    return of


@pytest.mark.parametrize(("name", "case"), CASES)
def test_loss_and_gradients_are_those_of_one_process(found: Any, name: str, case: str) -> None:
    ranks = found(name)
    for rank in ranks:
        assert case in rank, "an earlier case failed"
        assert "found" in rank[case], rank[case]
        loss, gradients = rank[case]["expected"]
        largest = max(gradient.abs().max() for gradient in gradients.values())
        own_loss, own = rank[case]["found"]
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
        assert set(own) == set(gradients)
        for key, gradient in own.items():
            # What is rounding error beside the others (biases in front of a softmax) has no digits to compare.
            atol = 1e-5 * float(gradients[key].abs().max()) + 1e-7 * float(largest)
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-5, atol=atol, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize("family", REFUSED)
def test_what_can_not_be_divided_is_told_so(found: Any, family: str) -> None:
    for rank in found("cp2"):
        told = rank[f"{family}:gather"]["refused"]
        assert told.startswith("cp=2 with ") and all(phrase in told for phrase in REFUSED[family])
