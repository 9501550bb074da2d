"""Context parallelism applied to a model, in place: which of its modules run on parts of sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autolaunch_strategies.config import SAME_DATA_AXES, ConfigError, ContextParallel
from autolaunch_strategies.context.interception import AttentionCalls
from autolaunch_strategies.context.marked import Marked
from autolaunch_strategies.context.sharded_modules import Sequences, ShardedModule
from autolaunch_strategies.context.transformers_attention import use_torch_attention
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import Blocks


@dataclass
class ContextParallelModule:
    """A model whose sequences are sharded: the context in which it runs, and what runs on parts of them."""

    sequences: Sequences | None = None
    sharded: list[ShardedModule] = field(default_factory=list)
    _seen_is_checked: bool = False

    def running(self) -> AbstractContextManager[None]:
        """Forward and backward passes of the model run within it, and within what `model_parallel` needs inside it."""
        return nullcontext() if self.sequences is None else self.sequences.calls.running()

    def repeating(self) -> AbstractContextManager[None]:
        """The context in which a block that runs now can run again, in a backward pass."""
        return nullcontext() if self.sequences is None else self.sequences.calls.repeating()

    def check_seen(self, name: str, group: dist.ProcessGroup | None) -> None:
        """Once, after the first step: whether attention has been seen at all.

        Args:
            group: the ranks that hold the other stages; collective over it.

        Raises:
            ConfigError: it has not, so sequences were not sharded where it matters.
        """
        if self.sequences is None or self._seen_is_checked:
            return
        self._seen_is_checked = True
        seen = torch.tensor(self.sequences.calls.seen, device=self.sequences.device)
        if group is not None:
            dist.all_reduce(seen, group=group)
        if not int(seen):
            ranks = self.sequences.peers.size
            raise ConfigError(
                f"cp={ranks} but no attention call was intercepted in model {name}",
                "nothing in its blocks calls torch.nn.functional.scaled_dot_product_attention on [b, heads, s, d] with "
                "a sequence that can be sharded",
                "models whose attention is scaled_dot_product_attention (for transformers: attn_implementation=sdpa) "
                "on inputs [batch, sequence, ...] (batch_first=True), or a mesh with cp of size 1",
            )


def prepare_context(
    model: nn.Module, config: ContextParallel | None, mesh: RankMesh, marked: Marked, device: torch.device
) -> ContextParallelModule:
    """Take what has to be there before blocks are wrapped: calls of attention are found from now on.

    Nothing is done where cp has one rank.
    """
    peers = mesh.cp_peers()
    if peers is None:
        return ContextParallelModule()
    assert config is not None
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # it would make the sequence a dim without a size
            module.use_nested_tensor = False
    use_torch_attention(model)
    calls = AttentionCalls(peers, config.backend)
    for name, backend in marked.attention.items():
        module = model.get_submodule(name)
        forward = module.forward
        module.forward = functools.wraps(forward)(_using(calls, backend, forward))
    mp = mesh.sub_mesh("mp")
    ranks_along_mp = 1 if mp is None else mp.size()
    together = mesh.group(*(axis for axis in SAME_DATA_AXES if axis != "pp"))
    return ContextParallelModule(Sequences(peers, calls, config.pad, device, together, ranks_along_mp))


def _using(calls: AttentionCalls, backend: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with calls.using(backend):
            return forward(*args, **kwargs)

    return run


def shard_sequences(
    applied: ContextParallelModule,
    model: nn.Module,
    blocks: Blocks,
    marked: Marked,
    is_elsewhere: Callable[[nn.Module], bool] = lambda module: False,
) -> None:
    """Take over the calls of the modules that run on parts of sequences, once everything else has been applied.

    Args:
        blocks: of this rank.
        is_elsewhere: whether a module belongs to a stage of another rank.
    """
    if applied.sequences is None:
        return
    chosen = sharded_modules(model, [block.module for block in blocks], marked)
    for name, (module, is_block) in chosen.items():
        if not is_elsewhere(module):
            if is_block:
                _refuse_statistics(name, module, applied.sequences.peers.size)
            backend = marked.regions.get(name, applied.sequences.calls.backend)
            applied.sharded.append(ShardedModule(name, module, applied.sequences, is_block, backend))


def _refuse_statistics(name: str, block: nn.Module, ranks: int) -> None:
    for part_name, part in block.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"cp={ranks} with {name}.{part_name} ({type(part).__name__})",
                "it takes its statistics from the positions that it sees, which are those of one rank",
                "other norms, or a mesh with cp of size 1",
            )


def sharded_modules(model: nn.Module, blocks: list[nn.Module], marked: Marked) -> Mapping[str, tuple[nn.Module, bool]]:
    """Name -> (module, whether it is a block): blocks, or what a plan marks, and layers with parameters around them."""
    names = {module: name for name, module in model.named_modules()}
    chosen: dict[str, tuple[nn.Module, bool]] = {}
    tops = [model.get_submodule(name) for name in marked.regions] or blocks or _only_blocks(model)
    within: set[nn.Module] = set()
    for module in tops:
        if module not in within:
            chosen[names[module]] = module, True
            within.update(module.modules())
    for module, name in names.items():
        is_layer = next(module.children(), None) is None and next(module.parameters(recurse=False), None) is not None
        if is_layer and module not in within:
            chosen[name] = module, False
    return chosen


def _only_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that has one of each kind, so that nothing is repeated."""
    return [
        child
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for child in module.children()
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    ]


def account_of_context(
    config: ContextParallel, ranks: int, model: nn.Module, blocks: list[nn.Module], marked: Marked
) -> dict[str, Any]:
    """What is done along cp, as plain data for plan.yaml."""
    chosen = sharded_modules(model, blocks, marked)
    return {
        "backend": config.backend,
        "ranks": ranks,
        "ulysses": config.split(ranks)[1],
        "pad": config.pad,
        "regions": [name for name, (_, is_block) in chosen.items() if is_block],
        "layers": [name for name, (_, is_block) in chosen.items() if not is_block],
        "attention": dict(marked.attention),
    }


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Two contexts as one."""
    with outer, inner:
        yield
