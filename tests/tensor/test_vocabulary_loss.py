"""Cross entropy of logits divided over the vocabulary equals torch's own of the whole logits."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import start, torchrun

SHAPES = {"rows": (6, None), "sequences": (2, None, 5)}
"""Shapes of the logits; None stands for the classes."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smooth": {"label_smoothing": 0.1},
    "ignored-class": {"ignore_index": 1},
    "ignored": {"ignore_index": -100, "ignored": 2},
    "smooth-ignored": {"label_smoothing": 0.2, "ignored": 2, "reduction": "none"},
    "all-ignored": {"ignored": 1000},
    "weights": {"weights": True},
    "weights-smooth": {"weights": True, "label_smoothing": 0.1, "ignored": 2},
    "soft-targets": {"soft": True},
    "parts": {"at_once": 8},
}
CLASSES = (8, 7, 5, 3, 1)  # on 4 ranks: even; the last is smaller; one empty; one empty; three empty
DTYPES = ("float32", "bfloat16", "float64")
CASES = [
    f"{shape}-{variant}-{classes}-{dtype}"
    for shape, variant, classes, dtype in itertools.product(SHAPES, VARIANTS, CLASSES, DTYPES)
]


def compare(case: str, mesh: Any) -> dict[str, Any]:
    """(loss, gradient) of the divided and of the whole logits, as lists, and whether the logits were gathered."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn import functional as F

    from autolaunch_strategies.tensor import losses, vocabulary_loss
    from autolaunch_strategies.tensor.views import MixedTensors

    *_, classes, dtype = case.split("-")
    shape_name = case.split("-")[0]
    options = dict(VARIANTS[case.removeprefix(f"{shape_name}-").removesuffix(f"-{classes}-{dtype}")])
    torch.manual_seed(0)
    shape = [size or int(classes) for size in SHAPES[shape_name]]
    logits = torch.randn(shape, dtype=torch.float64).to(getattr(torch, dtype)) * 5
    target = torch.randint(0, int(classes), [shape[0], *shape[2:]])
    target.view(-1)[: options.pop("ignored", 0)] = -100
    if options.pop("weights", False):
        options["weight"] = torch.rand(int(classes), dtype=logits.dtype)
    if options.pop("soft", False):
        target = torch.rand(shape, dtype=logits.dtype).softmax(1)
    vocabulary_loss.AT_ONCE = options.pop("at_once", 2**24)
    results = []
    divided = distribute_tensor(logits, mesh, [Shard(1)], src_data_rank=None)
    gathered = []
    whole = losses.plain

    def plain(tensor: Any) -> Any:
        gathered.append(tensor is divided_logits)
        return whole(tensor)

    divided_logits = divided.detach().requires_grad_()
    losses.plain = plain
    for tensor in (logits.clone().requires_grad_(), divided_logits):
        with MixedTensors(mesh):
            loss = F.cross_entropy(tensor, target, **options)
        assert type(loss) is torch.Tensor and loss.dtype == logits.dtype
        (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).sum().backward()
        gradient = tensor.grad.full_tensor() if hasattr(tensor.grad, "full_tensor") else tensor.grad
        assert gradient.dtype == logits.dtype
        results.append([loss.double().flatten().tolist(), gradient.double().flatten().tolist()])
    losses.plain = whole
    return {"expected": results[0], "found": results[1], "gathered": any(gathered)}


def run_rank(output: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn import functional as F

    from autolaunch_strategies.tensor.views import MixedTensors

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {case: compare(case, mesh) for case in CASES}
    logits = distribute_tensor(torch.zeros(2, 6), mesh, [Shard(1)])
    try:
        with MixedTensors(mesh):
            F.cross_entropy(logits, torch.tensor([0, 6]))
    except IndexError as error:
        results["error"] = {"message": str(error)}
    with MixedTensors(mesh), torch.autocast("cpu", torch.bfloat16):
        results["autocast"] = {"dtype": str(F.cross_entropy(logits.bfloat16(), torch.tensor([0, 1])).dtype)}
    if dist.get_rank() == dist.get_world_size() - 1:
        output.write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2-ranks"), pytest.param(4, id="4-ranks", marks=pytest.mark.every)]
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("loss") / "results.json"
    done = start(torchrun(request.param, __file__, str(output)), timeout=120)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch(results: dict[str, Any], shape: str, variant: str, dtype: str) -> None:
    tolerance = {"float32": 1e-5, "bfloat16": 1.6e-2, "float64": 1e-12}[dtype]
    for classes in CLASSES:
        result = results[f"{shape}-{variant}-{classes}-{dtype}"]
        for expected, found in zip(result["expected"], result["found"], strict=True):
            assert found == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True), classes
        needs_all = variant.startswith(("weights", "soft"))
        assert result["gathered"] == needs_all


def test_a_target_that_is_no_class(results: dict[str, Any]) -> None:
    assert results["error"]["message"] == "Target 6 is out of bounds."


def test_autocast_gives_fp32(results: dict[str, Any]) -> None:
    assert results["autocast"]["dtype"] == "torch.float32"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
