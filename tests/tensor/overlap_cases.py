"""Cases of `mp.overlap`: what inductor's pass makes of the graphs of blocks, and what these compute on CPUs.

The pass asks for NCCL, and kernels of what it puts into graphs exist for CUDA alone. Here torch's own definitions of
these operators, a collective and multiplications one after the other, stand in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch._inductor.fx_passes import post_grad
from torch.distributed import _symmetric_memory as symmetric

from autolaunch_strategies.config import parallel_config
from tests.support.cases import serve
from tests.support.zoo import loss
from tests.tensor.zoo_cases import batches, built, train_plain, trained_on

KERNELS = {
    "fused_all_gather_matmul": symmetric._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric._fused_matmul_reduce_scatter_fallback,
}


@contextlib.contextmanager
def as_on_cuda() -> Iterator[list[dict[str, int]]]:
    """Gives, of each graph, how often collectives of sequences stand in it before the pass, and what does after."""
    graphs: list[dict[str, int]] = []

    def counted(graph: torch.fx.Graph) -> None:
        def count(*names: str) -> int:
            return sum(any(name in str(node.target) for name in names) for node in graph.nodes)

        before = count("all_gather_into_tensor", "reduce_scatter_tensor")
        original(graph)
        left = count("all_gather_into_tensor", "reduce_scatter_tensor")
        graphs.append({"before": before, "left": left, "fused": count(*KERNELS)})

    original = post_grad.micro_pipeline_tp_pass
    library = torch.library.Library("symm_mem", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    with (
        patch.object(dist, "is_nccl_available", return_value=True),
        patch.object(post_grad, "micro_pipeline_tp_pass", counted),
        inductor.patch(force_disable_caches=True),
    ):
        yield graphs


def overlapped(name: str) -> dict[str, Any]:
    config = parallel_config("1x2", mp={"sequence_parallel": True, "overlap": True}, compile=True)
    with as_on_cuda() as graphs:
        return trained_on(config, built(name), batches(name), partial(loss, name), 0.1) | {"graphs": graphs}


GROUPS: dict[str, dict[str, Any]] = {
    "none": {"llama": partial(train_plain, "llama")},
    "1x2": {"llama": partial(overlapped, "llama")},
}

if __name__ == "__main__":
    serve(GROUPS, tensors=True)
