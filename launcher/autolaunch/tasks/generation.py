"""Text from the weights of a training as they are, on any mesh: every token is a forward pass over whole sequences.

There is no cache of keys and values: the unmodified model runs as it does in validation, sharded as it is, with all
ranks. Sequences have one length from the first token to the last, so that nothing is recorded or compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.lightning.strategy import MeshStrategy


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from what the model says."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """0: the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens are drawn from that have this probability together."""
    seed: int = 0

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One token for each row of `logits` [b, vocab]; int64 [b] on the CPU."""
        logits = logits.double().cpu()
        drawn = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        shares, order = (logits / self.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        before = shares.cumsum(dim=-1) - shares
        shares = shares.masked_fill(before >= self.top_p, 0.0)
        sums = shares.cumsum(dim=-1)
        place = (sums < drawn * sums[:, -1:]).sum(dim=-1, keepdim=True)
        return order.gather(1, place.clamp(max=logits.shape[1] - 1)).squeeze(1)


def generate(
    strategy: MeshStrategy,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    ends: frozenset[int] = frozenset(),
    longest: int | None = None,
    moved: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """What follows each prompt, as token ids, the same on every rank. Collective: all ranks call it with the same.

    Args:
        strategy: of a Trainer whose LightningModule has `next_logits`, in evaluation mode.
        prompts: token ids, at least one in each.
        ends: tokens with which a text ends; they are left out.
        longest: tokens that the model takes; then fewer follow than `sampling` says.
        moved: called after every token.

    Raises:
        ConfigError: a prompt leaves no room for a token.
    """
    shape = strategy.shape
    multiple = 2 * shape.cp * shape.mp
    longest_prompt = max(map(len, prompts))
    if longest is not None and longest_prompt >= longest:
        raise ConfigError(
            "prompts",
            f"one has {longest_prompt} tokens, and the model takes {longest}",
            f"up to {longest - 1} tokens",
        )
    width = -(-(longest_prompt + sampling.max_new_tokens) // multiple) * multiple
    if longest is not None:  # a length that does not divide is padded within blocks: no mesh makes a text shorter
        width = min(width, longest)
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    texts: list[list[int]] = [[] for _ in prompts]
    is_open = [True] * len(prompts)
    generator = torch.Generator().manual_seed(sampling.seed)
    place, device = strategy.rank_mesh.coordinate, strategy.root_device
    speaks = all(place[axis] == 0 for axis in ("dp", "mp", "cp"))  # one rank for all: others may round otherwise
    for _ in range(sampling.max_new_tokens):
        last = torch.tensor([len(prompt) + len(text) - 1 for prompt, text in zip(prompts, texts, strict=True)])
        logits = strategy.evaluate("next_logits", tokens.to(device), last.to(device))
        chosen = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        if speaks and logits is not None:  # of a pipeline, the stage that has them
            chosen.copy_(sampling.choose(logits, generator))
        if dist.is_initialized():
            dist.all_reduce(chosen)
        moved()
        for row, token in enumerate(chosen.tolist()):
            is_open[row] = is_open[row] and token not in ends
            if is_open[row]:
                tokens[row, last[row] + 1] = token
                texts[row].append(token)
                is_open[row] = len(prompts[row]) + len(texts[row]) < width
        if not any(is_open):
            break
    return texts
