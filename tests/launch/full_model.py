"""A language model that finds no memory on the rank and in the pass that OUT_OF_MEMORY names, such as 1:backward.

It asks for too much once: whoever goes on after that has swallowed the error.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import is_fake

from autolaunch.models.llama import MLP, Llama
from autolaunch.models.llama_config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_seq_len=64,
)


class Full(MLP):
    """A feed-forward that asks for too much, once."""

    asked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank, where = os.environ["OUT_OF_MEMORY"].split(":")
        if is_fake(x) or x.is_meta or dist.get_rank() != int(rank) or self.asked:
            return super().forward(x)
        self.asked = True
        if where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return _Backward.apply(super().forward(x))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def model() -> Llama:
    """A small Llama with such a feed-forward in its last layer."""
    made = Llama(CONFIG)
    made.model.layers[-1].mlp = Full(CONFIG)
    return made
