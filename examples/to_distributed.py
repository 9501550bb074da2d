"""A language model and its training loop for one device, made to run on many by `to_distributed`.

On one:             python examples/to_distributed.py --small
On four:            torchrun --nproc-per-node 4 examples/to_distributed.py --small
On two nodes of 8:  torchrun --nnodes 2 --nproc-per-node 8 ... examples/to_distributed.py --nodes 2

The losses are the same. Without --small the model has 134 million parameters.
"""

import argparse
import logging
import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from autolaunch_strategies import InputSpec, ToDistributedConfig, to_distributed

EPOCHS = 1
VOCAB_SIZE = 8000
BATCH_NUM = 2
BATCH_SIZE = 4
HIDDEN_SIZE = 2048
INTERMEDIATE_SIZE = 4096
SEQ_LENGTH = 1024
N_HEAD = 32
NUM_HIDDEN_LAYERS = 4

SMALL = {
    "EPOCHS": 2, "VOCAB_SIZE": 1024, "HIDDEN_SIZE": 64, "INTERMEDIATE_SIZE": 128, "SEQ_LENGTH": 64, "N_HEAD": 8,
    "NUM_HIDDEN_LAYERS": 2,
}  # fmt: skip


class RandomDataset(Dataset):
    def __init__(self, inputs, labels, num_samples):
        self.inputs = inputs
        self.labels = labels
        self.num_samples = num_samples

    def __getitem__(self, idx):
        return self.inputs[idx], self.labels[idx]

    def __len__(self):
        return self.num_samples


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_position_embeddings=2048, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        t = torch.arange(max_position_embeddings, dtype=torch.float32)
        freqs = torch.einsum("i,j->ij", t, inv_freq)
        emb = torch.cat([freqs, freqs], dim=-1)
        self.register_buffer("cos_cached", emb.cos()[None, :, None, :], persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, :, None, :], persistent=False)

    def forward(self, x, seq_len=None):
        cos = self.cos_cached[:, :seq_len, :, :]
        sin = self.sin_cached[:, :seq_len, :, :]
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat([-x2, x1], dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids):
    if position_ids is None:
        cos = cos[:, : q.shape[1], :, :]
        sin = sin[:, : q.shape[1], :, :]
    else:
        cos = cos.squeeze((0, 2))
        sin = sin.squeeze((0, 2))
        cos = cos[position_ids].unsqueeze(2)
        sin = sin[position_ids].unsqueeze(2)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def scaled_dot_product_attention(query_states, key_states, value_states, attention_mask):
    bsz, q_len, num_heads, head_dim = query_states.shape
    _, kv_seq_len, _, _ = value_states.shape
    query_states = query_states.transpose(1, 2)
    key_states = key_states.transpose(1, 2)
    value_states = value_states.transpose(1, 2)
    attn_weights = torch.matmul(query_states / math.sqrt(head_dim), key_states.transpose(2, 3))
    attention_mask = attention_mask.reshape(bsz, 1, q_len, kv_seq_len)
    attn_weights = attn_weights + attention_mask
    attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2)
    return attn_output.reshape(bsz, q_len, head_dim * num_heads)


class Attention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = n_head
        self.head_dim = hidden_size // n_head
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.rotary_emb = RotaryEmbedding(self.head_dim, max_position_embeddings=SEQ_LENGTH, base=10000)

    def forward(self, hidden_states, position_ids=None, attention_mask=None):
        batch, length, _ = hidden_states.shape
        shape = (batch, length, self.num_heads, self.head_dim)
        query_states = self.q_proj(hidden_states).reshape(shape)
        key_states = self.k_proj(hidden_states).reshape(shape)
        value_states = self.v_proj(hidden_states).reshape(shape)
        cos, sin = self.rotary_emb(value_states, seq_len=key_states.shape[-3])
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin, position_ids)
        output = scaled_dot_product_attention(query_states, key_states, value_states, attention_mask)
        return self.o_proj(output)


class Mlp(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = 1.0

    def forward(self, hidden_states):
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = torch.rsqrt(variance + self.variance_epsilon) * hidden_states
        return hidden_states.to(self.weight.dtype) * self.weight


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, intermediate_size, n_head):
        super().__init__()
        self.self_attn = Attention(hidden_size, n_head)
        self.mlp = Mlp(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size)
        self.post_attn_layernorm = RMSNorm(hidden_size)

    def forward(self, hidden_states, position_ids=None, attention_mask=None):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, position_ids, attention_mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attn_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


def _prepare_decoder_attention_mask(attention_mask, input_shape, dtype):
    batch_size, src_length = attention_mask.shape[0], attention_mask.shape[-1]
    batch_size, target_length = input_shape
    attention_mask = attention_mask[:, None, None, :].to(torch.bool)
    expanded_attn_mask = attention_mask.expand(batch_size, 1, target_length, src_length)
    mask = torch.tril(torch.ones((target_length, target_length), dtype=torch.bool, device=attention_mask.device))
    combined_attention_mask = mask[None, None, :, :].expand(batch_size, 1, target_length, target_length)
    expanded_attn_mask = expanded_attn_mask & combined_attention_mask
    return torch.where(expanded_attn_mask, 0.0, torch.finfo(dtype).min).to(dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.layers = nn.ModuleList(
            [DecoderLayer(HIDDEN_SIZE, INTERMEDIATE_SIZE, N_HEAD) for _ in range(NUM_HIDDEN_LAYERS)]
        )
        self.norm = RMSNorm(HIDDEN_SIZE)
        self.weight = nn.Parameter(torch.empty(HIDDEN_SIZE, VOCAB_SIZE))
        nn.init.xavier_normal_(self.weight)
        self.ignore_index = -100
        self.loss_func = nn.CrossEntropyLoss(reduction="none", ignore_index=self.ignore_index)

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, labels=None):
        batch_size, seq_length = input_ids.shape
        inputs_embeds = self.embed_tokens(input_ids)
        attention_mask = torch.ones((batch_size, seq_length), dtype=torch.bool, device=input_ids.device)
        if position_ids is None:
            position_ids = torch.arange(seq_length, device=input_ids.device).expand(batch_size, seq_length)
        attention_mask = _prepare_decoder_attention_mask(attention_mask, (batch_size, seq_length), inputs_embeds.dtype)
        hidden_states = inputs_embeds
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, position_ids, attention_mask)
        hidden_states = self.norm(hidden_states)
        logits = torch.matmul(hidden_states, self.weight)
        loss = None
        if labels is not None:
            masked_lm_loss = self.loss_func(logits.float().flatten(0, 1), labels.flatten())
            binary_sequence = torch.where(masked_lm_loss > 0, 1.0, 0.0)
            count = binary_sequence.sum()
            if count == 0:
                loss = torch.sum(masked_lm_loss * binary_sequence)
            else:
                loss = torch.sum(masked_lm_loss * binary_sequence) / count
        return (loss, logits)


def parts():
    """The model, the optimizer and the loader of a training on one device: nothing here knows of several."""
    torch.manual_seed(0)
    model = Model()
    samples = BATCH_SIZE * BATCH_NUM
    input_seqs = torch.randint(0, min(1024, VOCAB_SIZE), (samples, SEQ_LENGTH))
    labels = torch.randint(0, min(1024, VOCAB_SIZE), (samples, SEQ_LENGTH))
    dataset = RandomDataset(input_seqs, labels, samples)
    sampler = BatchSampler(SequentialSampler(dataset), batch_size=BATCH_SIZE, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, opt, loader


def train(model, opt, loader, told=lambda loss: loss):
    """The loop for one device. `told` makes the loss that is printed: here that of all ranks."""
    losses = []
    for _ in range(EPOCHS):
        model.train()
        for inputs, labels in loader:
            loss, _ = model(inputs, labels=labels)
            losses.append(told(loss).item())
            loss.backward()
            opt.step()
            opt.zero_grad()
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model for a look on a CPU")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--mesh", help="the mesh, e.g. 2x2, instead of the planner's choice")
    parser.add_argument("--no-sequence-parallel", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.small:
        globals().update(SMALL)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    processes = int(os.environ.get("WORLD_SIZE", "1"))

    model, opt, loader = parts()
    dist_config = ToDistributedConfig(
        input_spec=[InputSpec([BATCH_SIZE, SEQ_LENGTH], "int64", "input_ids", True)],
        sequence_parallel=not chosen.no_sequence_parallel,
        mesh=chosen.mesh,
    )
    dist_model, dist_opt, dist_loader = to_distributed(
        model, opt, loader, device_num=processes // chosen.nodes, node_num=chosen.nodes, config=dist_config
    )
    losses = train(dist_model, dist_opt, dist_loader, dist_loader.global_mean)
    if int(os.environ.get("RANK", "0")) == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.7g}", flush=True)
    return losses, dist_model, dist_loader


if __name__ == "__main__":
    main()
