"""Context parallelism applied to a model, in place: which of its modules run on parts of sequences."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autolaunch_strategies.config import SAME_DATA_AXES, ContextParallel
from autolaunch_strategies.context.interception import AttentionCalls
from autolaunch_strategies.context.marked import Marked
from autolaunch_strategies.context.sharded_modules import Sequences, ShardedModule, mixes_positions
from autolaunch_strategies.context.transformers_attention import blocks_without_torch_attention, use_torch_attention
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import Blocks

log = logging.getLogger(__name__)


@dataclass
class ContextParallelModule:
    """A model whose sequences are sharded: the context in which it runs, and what runs on parts of them."""

    sequences: Sequences | None = None
    sharded: list[ShardedModule] = field(default_factory=list)
    _is_reported: bool = False

    def running(self) -> AbstractContextManager[None]:
        """Forward and backward passes of the model run within it, and within what `model_parallel` needs inside it."""
        return nullcontext() if self.sequences is None else self.sequences.calls.running()

    def repeating(self) -> AbstractContextManager[None]:
        """The context in which a block that runs now can run again, in a backward pass."""
        return nullcontext() if self.sequences is None else self.sequences.calls.repeating()

    def now(self) -> Hashable:
        """What attention depends on where it is called, beside what it is called with."""
        return None if self.sequences is None else self.sequences.calls.now()

    def report(self, name: str, group: dist.ProcessGroup | None) -> None:
        """Once, after the first step, warn of what gathers sequences, and of a model in which none are sharded.

        Args:
            group: the ranks that hold the other stages; collective over it.
        """
        if self.sequences is None or self._is_reported:
            return
        self._is_reported = True
        own = self.sequences.calls.seen, self.sequences.has_sharded, gathering(self.sharded)
        stages: list[Any] = [own]
        if group is not None:
            stages = [None] * group.size()
            dist.all_gather_object(stages, own, group=group)
        seen, sharded = any(stage[0] for stage in stages), any(stage[1] for stage in stages)
        lines = list(dict.fromkeys(line for stage in stages for line in stage[2]))
        if self.sequences.peers.rank == 0:
            for line in lines or _nothing_seen(name, seen, sharded):
                log.warning("cp=%d: %s", self.sequences.peers.size, line)


def _nothing_seen(name: str, attention: bool, sharded: bool) -> list[str]:
    """What is said of a model in which no sequences are sharded, or no attention has been found."""
    if not sharded:
        return [
            f"nothing is sharded in {name}: its modules run on whole sequences, so that each rank does all of the work "
            "of its share of the data"
        ]
    if attention:
        return []
    return [
        f"no call of torch.nn.functional.scaled_dot_product_attention over a sharded sequence was seen in {name}: if "
        "it has attention, cp shards something else than sequences; what it shards is the second dim, so that inputs "
        "have to be [batch, sequence, ...] (for torch's layers: batch_first=True)"
    ]


def gathering(sharded: Iterable[ShardedModule]) -> list[str]:
    """What blocks do not run on parts of sequences, and what that costs: a line for all of a class."""
    alike: dict[str, list[ShardedModule]] = {}
    for module in sharded:
        if module.is_block and module.why_whole:
            alike.setdefault(type(module.module).__name__, []).append(module)
    lines = []
    for kind, modules in alike.items():
        names = modules[0].name + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
        repeats = modules[0].repeats
        more = f" and {len(repeats) - _SHOWN} more" if len(repeats) > _SHOWN else ""
        lines.append(
            f"{names} ({kind}) can't run on parts of sequences: {modules[0].why_whole}. What meets there is gathered, "
            f"{_readable(sum(module.gathered for module in modules))} per rank in a forward pass"
            + (f"; each rank computes {', '.join(repeats[:_SHOWN])}{more} of whole sequences" if repeats else "")
        )
    return lines


_SHOWN = 4


def _readable(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


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
    return ContextParallelModule(Sequences(peers, calls, config, device, together, ranks_along_mp))


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
            backend = marked.regions.get(name, applied.sequences.calls.backend)
            applied.sharded.append(ShardedModule(name, module, applied.sequences, is_block, backend))


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
    """What is done along cp, as plain data for plan.yaml. What only a trial can show is not in it."""
    chosen = sharded_modules(model, blocks, marked)
    regions = {name: module for name, (module, is_block) in chosen.items() if is_block}
    gathered = dict(_foreseen_gathers(model, regions))
    return {
        "backend": config.backend,
        "ranks": ranks,
        "ulysses": config.split(ranks)[1],
        "pad": config.pad,
        "regions": [name for name in regions if name not in gathered],
        "layers": [name for name, (_, is_block) in chosen.items() if not is_block],
        "attention": dict(marked.attention),
        **({"gathered": gathered} if gathered else {}),
    }


def _foreseen_gathers(model: nn.Module, regions: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """(name, why) of blocks in which positions meet outside of calls of attention, as far as their classes say it."""
    written_out = blocks_without_torch_attention(model)
    for name, region in regions.items():
        mixing = next((part for part in region.modules() if mixes_positions(part)), None)
        if mixing is not None:
            yield name, f"{type(mixing).__name__} sees several positions"
        elif region in written_out:
            yield name, f"attention is computed as `{written_out[region]}`, not by scaled_dot_product_attention"


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Two contexts as one."""
    with outer, inner:
        yield
