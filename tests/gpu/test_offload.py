"""`recompute=offload` on a GPU: copies beside the computation change no gradient, and memory is that of two blocks."""

from __future__ import annotations

import torch
from torch import nn

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.training.offload import apply_offload

WIDTH, ROWS, BLOCKS = 1024, 8192, 8
SMALL = 64
"""Rows on a CPU, whose memory torch does not count."""


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    ).to(device)


def train(layers: nn.Sequential, device: str) -> tuple[list[torch.Tensor], int]:
    """Gradients after each of several steps, one right after the other, and the bytes that the last one takes."""
    seen, peak = [], 0
    on_gpu = device == "cuda"
    for step in range(4):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        torch.manual_seed(step)
        layers(torch.randn(ROWS if on_gpu else SMALL, WIDTH, device=device)).square().mean().backward()
        if on_gpu:
            peak = torch.cuda.max_memory_allocated() - before
        seen += [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
    return seen, peak


def test_gradients_are_those_of_none_in_less_memory(device: str) -> None:
    plain, other = model(device), model(device)
    apply_offload(Block(str(number), layer) for number, layer in enumerate(other))
    (expected, all_blocks), (found, two_blocks) = train(plain, device), train(other, device)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    if device == "cuda":
        assert two_blocks < 0.6 * all_blocks  # 2 of 8, and what the backward pass of one takes
