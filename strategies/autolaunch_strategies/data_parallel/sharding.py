"""Data parallelism: what each sharding level does to a module, and when gradients are exchanged.

Level 0 keeps whole parameters and averages gradients (`GradientAverage`). Levels 1 to 3 are FSDP2 (`fully_shard`),
one group per block and one for the rest:

level 1  parameters are gathered once per step; gradients stay whole while a step accumulates, and are exchanged once;
level 2  as 1, but gradients are exchanged and sharded after each backward;
level 3  as 2, and parameters are freed after each use and gathered again for the backward pass.

At all three, what outlives a step (parameters, optimizer state) is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from autolaunch_strategies.config import SHARDING_AXES, DataParallel
from autolaunch_strategies.data_parallel.gradients import GradientAverage
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import Blocks
from autolaunch_strategies.torch_private.fsdp import (
    abandon_several_backwards,
    begin_several_backwards,
    complete_after_backward,
    end_left_forward,
    end_several_backwards,
    follow_requires_grad,
    initialise_fsdp,
    keep_through_nested_forwards,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


@dataclass
class DataParallelModule:
    """A module with data parallelism applied: switches gradient exchange on and off."""

    root: nn.Module
    level: int
    averaged_names: list[str] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    average: GradientAverage | None = None
    accumulates: bool = False
    keeps_gathered: bool = False
    """Whether parameters may have stayed gathered since a backward pass that only added to the gradients."""

    def begin(self) -> None:
        """Start exchanging gradients. Called once, when every parameter has its values."""
        if isinstance(self.root, FSDPModule):
            initialise_fsdp(self.root)
        if self.group is not None and self.averaged_names:
            parameters = dict(self.root.named_parameters())
            self.average = GradientAverage([parameters[name] for name in self.averaged_names], self.group)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within it, backward passes add to the gradients and exchange no more than the level needs to save memory.

        Below level 3 what they gathered stays gathered for the next pass, until one outside of it has run.
        """
        sharded = self.root if isinstance(self.root, FSDPModule) else None
        self.accumulates = True
        if self.average is not None:
            self.average.enabled = False
        if sharded is not None:
            self.keeps_gathered = self.level < 3
            sharded.set_reshard_after_backward(not self.keeps_gathered)
            if self.level == 1:
                sharded.set_requires_gradient_sync(False)
            else:
                sharded.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self.accumulates = False
            if self.average is not None:
                self.average.enabled = True
            if sharded is not None:
                sharded.set_reshard_after_backward(True)
                if self.level == 1:
                    sharded.set_requires_gradient_sync(True)
                else:
                    sharded.set_requires_all_reduce(True)

    @contextmanager
    def several_backwards(self) -> Iterator[None]:
        """Within it any number of backward passes count as one; sharded gradients are exchanged at its end.

        `finish_backward` completes the rest, as after a single pass. Nothing is gathered again between the passes. If
        anything is raised, nothing is exchanged, and sharded gradients that waited for it are dropped.
        """
        sharded = self.root if isinstance(self.root, FSDPModule) else None
        exchange = not (self.accumulates and self.level == 1)
        if self.average is not None:
            self.average.enabled = False
        if sharded is not None:
            begin_several_backwards(sharded)
        try:
            yield
        except BaseException:
            if sharded is not None:
                abandon_several_backwards(sharded, exchange)
            raise
        else:
            if sharded is not None:
                end_several_backwards(sharded, exchange, all_reduce=not self.accumulates)
        finally:
            if self.average is not None:
                self.average.enabled = not self.accumulates

    def gather_rest(self) -> None:
        """Gather what belongs to no block, for code that is not the forward of the root."""
        if isinstance(self.root, FSDPModule):
            self.root.unshard()

    def forget_gathered(self) -> None:
        """Free every gathered parameter. After an optimizer step their values are old."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                end_left_forward(module)  # a stage leaves the forward of its model behind its own part
                module.reshard()

    def end_step(self) -> None:
        """Free what still is gathered, as it is where the last backward pass of a step did not take place."""
        if self.keeps_gathered:
            self.forget_gathered()
            self.keeps_gathered = False

    def begin_backward(self, loss: torch.Tensor) -> None:
        """Prepare the exchange of gradients if `loss` was not made by the forward of the root."""
        if isinstance(self.root, FSDPModule):
            complete_after_backward(self.root, loss)

    def finish_backward(self) -> None:
        """Complete the exchange of gradients after a backward pass."""
        if self.average is not None:
            self.average.finish()


def apply_data_parallel(root: nn.Module, blocks: Blocks, mesh: RankMesh, dp: DataParallel) -> DataParallelModule:
    """Apply a sharding level to `root` in place: one group of parameters per block, one for everything else.

    Parameters may be on meta. Names of parameters do not change. With one rank along dp and cp and no offload nothing
    is done at all. A stage of a pipeline uses its blocks for one microbatch after the other: there they stay gathered
    for the whole step at level 3, too.
    """
    group = mesh.group(*SHARDING_AXES)
    ranks = 1 if group is None else group.size()
    pipelined = mesh.shape.pp > 1
    if ranks == 1 and not dp.cpu_offload:
        return DataParallelModule(root, 0)
    if dp.sharding_level == 0:
        return DataParallelModule(root, 0, [name for name, _ in root.named_parameters()], group)
    scalars = _scalars(root)
    options: dict[str, Any] = {
        "mesh": mesh.sharding_mesh(),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[dp.param_dtype], reduce_dtype=DTYPES[dp.reduce_dtype], cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        if dp.cpu_offload
        else OffloadPolicy(),
        "ignored_params": set(scalars.values()),
    }
    for block in blocks:
        fully_shard(block.module, reshard_after_forward=dp.sharding_level == 3 and not pipelined, **options)
        block.module.register_forward_pre_hook(_follow_requires_grad)
    fully_shard(root, reshard_after_forward=False, **options)
    if dp.sharding_level < 3:  # at level 3 hooks between forward and backward see what is sharded, and its gradients
        keep_through_nested_forwards(root)
    in_blocks = {module for block in blocks for module in block.module.modules()}
    for module in root.modules():
        if module is not root and module not in in_blocks and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_gather_rest_of(root))
    return DataParallelModule(root, dp.sharding_level, list(scalars), group)


def sharding_reasons(
    root: nn.Module, blocks: Blocks, dp: DataParallel, ranks: int, pipelined: bool = False
) -> dict[str, str]:
    """What `apply_data_parallel` does to which parameters of `root`, and why; `ranks` along dp and cp together."""
    if ranks == 1 and not dp.cpu_offload:
        return {"all parameters": "one rank along dp: nothing to exchange"}
    if dp.sharding_level == 0:
        return {"all parameters": "level 0: whole on every rank; gradients averaged in buckets during backward"}
    use = "gathered once per step"
    if dp.sharding_level == 3 and not pipelined:
        use = "gathered for its forward and freed; again for its backward"
    reasons = {block.name: use for block in blocks}
    reasons["everything else"] = "gathered once per step: it is used at the start and at the end of it"
    if dp.sharding_level == 3 and not pipelined:
        reasons["everything else"] = "gathered for the forward; again for the backward if training_step calls the model"
    if scalars := _scalars(root):
        reasons[", ".join(scalars)] = "whole on every rank: a scalar can't be sharded"
    return reasons


def _scalars(root: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in root.named_parameters() if parameter.dim() == 0}


def _follow_requires_grad(module: nn.Module, args: Any) -> None:
    follow_requires_grad(module)


def _gather_rest_of(root: nn.Module) -> Callable[[nn.Module, Any], None]:
    """A hook for modules that hold parameters of the root's group: people also call them outside of its forward."""
    assert isinstance(root, FSDPModule)

    def gather(module: nn.Module, args: Any) -> None:
        root.unshard()
        follow_requires_grad(root)

    return gather
