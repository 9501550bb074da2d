"""Attention of packed documents on one GPU: a mask, the kernel for documents, and one document per row beside them.

    python tests/benchmarks/gpu_packed_attention.py [--length 8192] [--document 512] [--rows 1] [--heads 32] [--kv 8]

Printed are milliseconds of a forward and a backward pass in bf16, the median of many, and the memory of their peak.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.nn import functional as F

from autolaunch_strategies.model.document_attention import document_attention, documents_of, mask_of

DEVICE = "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("length", 8192), ("document", 512), ("rows", 1), ("heads", 32), ("kv", 8), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(1)
    heads = (given.heads, given.kv, given.kv)
    q, k, v = (
        torch.randn(given.rows, given.length, count, given.width, device=DEVICE, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for count in heads
    )
    begins = torch.rand(given.rows, given.length, device=DEVICE) < 1 / given.document
    documents = documents_of(begins)
    mask = mask_of(documents)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa with a mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        "varlen": lambda: document_attention(q, k, v, documents),
        "sdpa, one document per row": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {int(begins.sum()) + given.rows} documents")
    for name, run in ways.items():
        milliseconds, peak = measured(run, given.repeats)
        print(f"{name:>28}: {milliseconds:8.3f} ms, peak {peak / 2**20:8.0f} MiB", flush=True)


def measured(run: Callable[[], torch.Tensor], repeats: int) -> tuple[float, int]:
    """(milliseconds of a forward and a backward pass, bytes at their peak)."""
    times = []
    for number in range(repeats + 5):  # the first ones load kernels
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        out = run()
        out.backward(out.detach())
        end.record()
        torch.cuda.synchronize()
        if number >= 5:
            times.append(begin.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    main()
