"""Sequences sharded over ranks by `parallelize`, with a training loop of its own.

On two or four processes:  torchrun --nproc-per-node 4 examples/context_parallel.py --backend p2p
On one, unchanged:         python examples/context_parallel.py

p2p: keys and values travel around a ring of ranks. all2all: each rank computes some of the heads over the whole
sequence. The model and the loop see whole sequences, and the losses are the same.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autolaunch_strategies as auto

VOCABULARY, LENGTH = 64, 64


class SDPALayer(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class AttentionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size = 64
        self.num_key_value_heads = 4
        self.head_dim = 8
        self.sdpa = SDPALayer()
        self.q = nn.Linear(self.hidden_size, self.hidden_size, bias=False)
        self.k = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)

    def forward(self, input):
        batch, length, _ = input.shape
        q, k, v = (
            layer(input).view(batch, length, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.sdpa(q, k, v).transpose(1, 2).flatten(2)


class LlamaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.position_embedding = nn.Embedding(LENGTH, 64)
        self.attention = AttentionLayer()

    def forward(self, input, position):
        hidden = self.embedding(input) + self.position_embedding(position)
        return hidden + self.attention(hidden)


class LlamaForCausalLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.llama = LlamaLayer()
        self.weight = nn.Parameter(torch.randn(64, VOCABULARY) * 0.02)
        self.loss_func = nn.CrossEntropyLoss()

    def forward(self, input, label):
        # What the marked layer is called with is sharded; everything here is about the whole sequence.
        position = torch.arange(input.shape[1], device=input.device).expand_as(input)
        out = self.llama(input, position)
        logits = torch.matmul(out, self.weight)
        return self.loss_func(logits.flatten(0, 1), label.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["p2p", "all2all"], default="p2p")
    backend = parser.parse_args().backend
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    cp_config = {
        "parallelize_plan": {
            "llama": auto.PrepareContextParallel(backend),
            "llama.attention.sdpa": auto.ContextParallel(backend),
        }
    }
    torch.manual_seed(0)
    model = LlamaForCausalLayer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mesh = auto.ProcessMesh([list(range(ranks))], dim_names=["dp", "cp"])
    model, optimizer = auto.parallelize(model, optimizer, mesh, {"cp_config": cp_config})

    data = torch.Generator().manual_seed(1)
    for step in range(5):
        # Ranks along cp share one batch: each is given all of it.
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=data).sort(dim=1).values
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        auto.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
