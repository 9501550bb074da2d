"""Time of context-parallel attention, forward and backward, beside one process and beside torch's own ring.

    python tests/benchmarks/cp_attention.py [--ranks 2] [--rounds 15] [--size 2048] [--heads 8] [--key-heads 8]

In one set of processes all take turns in every round, so that the machine's drift hits all of them:

- alone: rank 0 runs torch's attention over the whole sequence while the others wait; one thread.
- ring, gather, ulysses, usp: every rank runs its part; the time is that of the slowest rank.
- torch: `_templated_ring_attention` of torch on the same parts (private, and not usable on CPUs as torch ships it).

Printed per way: the median time, and the median over rounds of ratios within the same round:
`cost` = ranks x time / alone (1.00: every rank has exactly its share of the work, and sending costs nothing; only
meaningful with a core per rank that nobody else uses), `work` = CPU seconds of all ranks / those of alone, sending
included (meaningful on a busy machine, too), and `of torch's ring`: time / time, and CPU seconds / CPU seconds.
To hold, on 2 ranks: ring <= 1.1 of torch's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=2048, help="positions of the sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    paths = [str(TESTS.parent / "strategies"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command = [sys.executable, *start, __file__, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, timeout=1800).returncode)


def measure(options: argparse.Namespace) -> None:
    from autolaunch_strategies.context.attention.backends import context_attention
    from autolaunch_strategies.mesh.layout import Peers
    from tests.context.torch_ring import TorchRing, torch_ring_options

    dist.init_process_group("gloo")
    world, rank, ranks, causal = dist.group.WORLD, dist.get_rank(), dist.get_world_size(), not options.full
    assert world is not None
    peers = {
        "ring": Peers(world, world, None),
        "gather": Peers(world, world, None),
        "ulysses": Peers(world, None, world),
    }
    if ranks == 4:
        places, rings = ([dist.new_group(list(g)) for g in gs] for gs in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
        peers["usp"] = Peers(world, rings[rank % 2], places[rank // 2])

    def tensors(size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        counts = [options.heads, options.key_heads, options.key_heads, options.heads]
        q, k, v, grad = (torch.randn(1, count, size, options.width) for count in counts)
        return [x.requires_grad_() for x in (q, k, v)], grad

    (q, k, v), grad = tensors(options.size)
    layout = peers["ring"].layout(options.size)
    parts, part_grad = tensors(layout.local)

    def alone() -> None:
        if rank == 0:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=options.key_heads != options.heads
            )  # fmt: skip
            out.backward(grad)

    def way(backend: str) -> Callable[[], None]:
        def run() -> None:
            own = peers[backend]
            out = context_attention(
                *parts, backend=backend, peers=own, layout=own.layout(options.size), is_causal=causal
            )  # fmt: skip
            out.backward(part_grad)

        return run

    def torch_ring() -> None:
        with torch_ring_options(balanced=causal):
            TorchRing.apply(*parts, world, causal).backward(part_grad)

    ways = {"alone": alone, "torch": torch_ring, **{backend: way(backend) for backend in peers}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(options.rounds + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            begin, begin_work = time.perf_counter(), time.process_time()
            ways[name]()
            slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            total = torch.tensor(time.process_time() - begin_work, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if turn >= 2:
                times[name].append(float(slowest))
                work[name].append(float(total))
    if rank == 0:
        print(
            f"{ranks} ranks, {options.size} positions, {options.heads} heads ({options.key_heads} of keys) of "
            f"{options.width}, {'causal' if causal else 'full'}, fp32, {options.rounds} rounds"
        )
        print(f"{'way':<10} {'median':>10} {'cost':>8} {'work':>8}   of torch's ring: {'time':>6} {'work':>6}")
        for name in names:
            line = f"{name:<10} {statistics.median(times[name]) * 1e3:>7.1f} ms"
            if name != "alone":
                line += f" {ratio(times[name], times['alone']) * ranks:>8.2f} {ratio(work[name], work['alone']):>8.2f}"
                line += f" {ratio(times[name], times['torch']):>26.2f} {ratio(work[name], work['torch']):>6.2f}"
            print(line)
    dist.barrier()
    os._exit(0)  # gloo aborts if groups outlive the process group


def ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


if __name__ == "__main__":
    main()
