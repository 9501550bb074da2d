"""A small Llama made parallel by `parallelize` over three axes, with a training loop of its own.

On eight processes, 2 x 2 x 2 along dp, mp and pp:  torchrun --nproc-per-node 8 examples/parallelize_llama.py
On one, unchanged:                                  python examples/parallelize_llama.py

The losses are the same. On a mesh that does not name pp the loop may call loss.backward() itself.
"""

import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autolaunch_strategies as auto


class ModelConfig:
    def __init__(self):
        self.vocab_size = 32
        self.hidden_size = 16
        self.intermediate_size = 32
        self.num_layers = 2
        self.num_heads = 4


model_config = ModelConfig()


class LlamaRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model_config.hidden_size))

    def forward(self, input):
        return self.weight * input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + 1e-6)


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(model_config.hidden_size, model_config.hidden_size * 3, bias=False)
        self.o_proj = nn.Linear(model_config.hidden_size, model_config.hidden_size, bias=False)

    def forward(self, input):
        batch, length, hidden = input.shape
        q, k, v = self.qkv_proj(input).chunk(3, dim=-1)
        q, k, v = (x.view(batch, length, model_config.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(output.transpose(1, 2).reshape(batch, length, hidden))


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(model_config.hidden_size, model_config.intermediate_size * 2, bias=False)
        self.down_proj = nn.Linear(model_config.intermediate_size, model_config.hidden_size, bias=False)

    def forward(self, input):
        gate, up = self.gate_up_proj(input).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class LlamaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = LlamaAttention()
        self.mlp = LlamaMLP()
        self.input_layernorm = LlamaRMSNorm()
        self.post_attention_layernorm = LlamaRMSNorm()

    def forward(self, input):
        input = input + self.self_attn(self.input_layernorm(input))
        return input + self.mlp(self.post_attention_layernorm(input))


class LlamaModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(model_config.vocab_size, model_config.hidden_size)
        decoder_layers = []
        for _ in range(model_config.num_layers):
            decoder_layers.append(LlamaDecoderLayer())

        self.layers = nn.ModuleList(decoder_layers)
        self.norm = LlamaRMSNorm()

    def forward(self, input):
        output = self.embedding(input)
        for layer in self.layers:
            output = layer(output)
        return self.norm(output)


class LlamaLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(model_config.hidden_size, model_config.vocab_size) * 0.1)

    def forward(self, input):
        return input @ self.weight


class LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.llama = LlamaModel()
        self.lm_head = LlamaLMHead()

    def forward(self, input):
        return self.lm_head(self.llama(input))


parallel_config = {
    "dp_config": {"sharding_level": 1},
    "mp_config": {
        "parallelize_plan": {
            # The model calls it `embedding`: these two match nothing, which is a warning and no error, so that one plan
            # can list the names of several models.
            "llama.embed_tokens": [
                auto.ColWiseParallel(),
                auto.SequenceParallelBegin(),
            ],
            "llama.position_embedding": [
                auto.ColWiseParallel(),
                auto.SequenceParallelBegin(),
            ],
            "llama.embedding": [
                auto.ColWiseParallel(),
                auto.SequenceParallelBegin(),
            ],
            "llama.layers.*.self_attn.qkv_proj": auto.ColWiseParallel(),
            "llama.layers.*.self_attn.o_proj": auto.RowWiseParallel(),
            "llama.layers.*.self_attn": auto.SequenceParallelDisable(),
            "llama.layers.*.mlp.gate_up_proj": auto.ColWiseParallel(),
            "llama.layers.*.mlp.down_proj": auto.RowWiseParallel(),
            "llama.layers.*.mlp": auto.SequenceParallelDisable(need_transpose=False),
            "lm_head.weight": auto.ColWiseParallel(),
            "lm_head": auto.SequenceParallelEnd(),
        }
    },
    "pp_config": {"split_spec": "llama.layers"},
}


def main():
    logging.basicConfig(format="%(levelname)s %(message)s")
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model = LlamaForCausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    places = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] if ranks == 8 else [[[0]]]
    mesh = auto.ProcessMesh(places, dim_names=["dp", "mp", "pp"])
    auto.set_mesh(mesh)
    model, optimizer = auto.parallelize(model, optimizer, config=parallel_config)
    place, replicas = mesh.coordinate(rank)["dp"], mesh.axis_size("dp")

    def loss_of(batch):
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    data = torch.Generator().manual_seed(1)
    for step in range(5):
        batch = torch.randint(0, model_config.vocab_size, (8, 13), generator=data).sort(dim=1).values
        # Each replica has its share; the ranks along mp and pp, which hold parts of one replica, are given the same.
        loss = model.forward_backward(loss_of, batch.chunk(replicas)[place])
        auto.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss.item() / ranks:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
