"""Data parallelism: what each sharding level does to a module, and when gradients are exchanged.

Level 0 keeps whole parameters and averages gradients (`GradientAverage`). Levels 1 to 3 are FSDP2 (`fully_shard`),
by itself for each block, for what in it belongs to another gradient group, for an embedding of tokens and its head,
and for the rest:

level 1  parameters are gathered once per step; gradients stay whole while a step accumulates, and are exchanged once;
level 2  as 1, but gradients are exchanged and sharded after each backward;
level 3  as 2, and parameters are freed after each use and gathered again for the backward pass.

At all three, what outlives a step (parameters, optimizer state) is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autolaunch_strategies.config import SHARDING_AXES, ConfigError, DataParallel
from autolaunch_strategies.data_parallel.ends import Ends, find_ends
from autolaunch_strategies.data_parallel.gradients import GradientAverage
from autolaunch_strategies.data_parallel.groups import GradientGroup
from autolaunch_strategies.data_parallel.outside import GathersOnUse
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import Blocks
from autolaunch_strategies.model.linear_weights import linear_weights
from autolaunch_strategies.model.parts import modules_of
from autolaunch_strategies.torch_private.fsdp import (
    abandon_several_backwards,
    begin_several_backwards,
    complete_after_backward,
    end_left_forward,
    end_several_backwards,
    exchange_after_last_backward,
    follow_requires_grad,
    gather_in,
    initialise_fsdp,
    keep_absent_gradients,
    keep_through_nested_forwards,
)
from autolaunch_strategies.torch_private.gradient_hooks import has_gradient_hooks
from autolaunch_strategies.torch_private.second_derivatives import SecondDerivatives
from autolaunch_strategies.torch_private.sharding_rules import read_whole_numbers
from autolaunch_strategies.torch_private.unused_parameters import UnusedParameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


@dataclass
class DataParallelModule:
    """A module with data parallelism applied: switches gradient exchange on and off."""

    root: nn.Module
    level: int
    averaged: dict[str, GradientGroup] = field(default_factory=dict)
    """Names of parameters that are not sharded -> over which ranks their gradients are averaged."""
    average: GradientAverage | None = None
    gathers: GathersOnUse | None = None
    """Gathers what is used outside of its block, where something is sharded."""
    accumulates: bool = False
    keeps_gathered: bool = False
    """Whether parameters may have stayed gathered since a backward pass that only added to the gradients."""
    second_derivatives: SecondDerivatives | None = None
    """Of what is sharded."""

    def begin(self, autocast: torch.dtype | None = None) -> None:
        """Start exchanging gradients. Called once, when every parameter has its values.

        Args:
            autocast: type in which weights of linear layers are gathered, since forward passes run in autocast to it.
        """
        if isinstance(self.root, FSDPModule):
            initialise_fsdp(self.root)
            if autocast is not None:
                gather_in(self.root, set(linear_weights(self.root).values()), autocast)
            names = {parameter: name for name, parameter in self.root.named_parameters()}
            UnusedParameters(self.root, _refuse_other_orders, partial(_refuse_write, names))
            self.second_derivatives = SecondDerivatives(self.root, self._exchanges)
        parameters = dict(self.root.named_parameters())
        averaged = {parameters[name]: group for name, group in self.averaged.items() if group.averages}
        if averaged:
            self.average = GradientAverage(averaged)

    def running(self) -> AbstractContextManager[None]:
        """Forward passes and all else that uses parameters run within it."""
        return nullcontext() if self.gathers is None else self.gathers.running()

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
    def several_backwards(self) -> Iterator[Callable[[Iterable[nn.Module]], None]]:
        """Within it any number of backward passes count as one; sharded gradients are exchanged at its end.

        `finish_backward` completes the rest, as after a single pass. Nothing is gathered again between the passes. If
        anything is raised, nothing more is exchanged, and sharded gradients that waited for it are dropped.

        Gives a function for `units` of which no pass follows: it exchanges their gradients at once, in that order, and
        frees what of them is gathered. Collective.
        """
        sharded = self.root if isinstance(self.root, FSDPModule) else None
        exchange, all_reduce = self._exchanges()

        def complete(units: Iterable[nn.Module]) -> None:
            if sharded is not None:
                exchange_after_last_backward(units, exchange, all_reduce)

        if self.average is not None:
            self.average.enabled = False
        if sharded is not None:
            begin_several_backwards(sharded)
        try:
            yield complete
        except BaseException:
            if sharded is not None:
                abandon_several_backwards(sharded, exchange)
            raise
        else:
            if sharded is not None:
                end_several_backwards(sharded, exchange, all_reduce)
        finally:
            if self.average is not None:
                self.average.enabled = not self.accumulates

    def _exchanges(self) -> tuple[bool, bool]:
        """Whether sharded gradients are reduce-scattered after a backward pass, and whether summed over replicas."""
        return not (self.accumulates and self.level == 1), not self.accumulates

    def units(self) -> dict[str, nn.Module]:
        """What is sharded by itself, by name, without what belongs to none of it."""
        return {
            name: module
            for name, module in self.root.named_modules()
            if _is_sharded(module) and module is not self.root
        }

    def gather_rest(self) -> None:
        """Gather what belongs to no block, for code that is not the forward of the root."""
        if isinstance(self.root, FSDPModule):
            self.root.unshard()

    def forget_gathered(self) -> None:
        """Free every gathered parameter. After an optimizer step their values are old."""
        if not isinstance(self.root, FSDPModule):
            return
        if self.second_derivatives is not None:
            self.second_derivatives.forget()
        for module in modules_of(self.root):
            if isinstance(module, FSDPModule):
                end_left_forward(module)  # a stage leaves the forward of its model behind its own part
                module.reshard()

    def forget_until_backward(self) -> None:
        """Free every gathered parameter that the backward pass gathers again, which not all may do."""
        if self.second_derivatives is None or not self.second_derivatives.is_kept:
            self.forget_gathered()

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


def apply_data_parallel(
    root: nn.Module,
    blocks: Blocks,
    mesh: RankMesh,
    dp: DataParallel,
    other_groups: Mapping[str, GradientGroup] = MappingProxyType({}),
) -> DataParallelModule:
    """Apply a sharding level to `root` in place: one unit of parameters per block and end, one for everything else.

    Parameters may be on meta. Names of parameters do not change. With one rank along dp and cp nothing is done at all,
    unless state is kept elsewhere or computed with in another type. A stage of a pipeline uses its blocks for one
    microbatch after the other: there they stay gathered for the whole step at level 3, too, and of the two ends it has
    one at most.

    Args:
        other_groups: names of parameters -> their gradient group, if it is not that of all ranks along dp and cp. To be
            sharded, they stand in modules whose parameters are all of one group: each is a unit of its own.
    """
    pipelined = mesh.shape.pp > 1
    if mesh.group(*SHARDING_AXES) is None and not dp.acts_on_one_rank:
        return DataParallelModule(root, 0, dict(other_groups))
    if mesh.shape.dp > 1:
        _refuse_other_rows(root)
    usual = GradientGroup.of_mesh(mesh, sharded=dp.sharding_level > 0)
    groups = {name: other_groups.get(name, usual) for name, _ in root.named_parameters()}
    if dp.sharding_level == 0:
        return DataParallelModule(root, 0, groups)
    _refuse_unsharded(root)
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # torch shards no others
    scalars = _scalars(root)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[dp.param_dtype], reduce_dtype=DTYPES[dp.reduce_dtype], cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        if dp.cpu_offload
        else OffloadPolicy(),
        "ignored_params": set(scalars.values()),
    }
    group_of = {parameter: groups[name] for name, parameter in root.named_parameters() if name not in scalars}
    names = {parameter: name for name, parameter in root.named_parameters()}
    gathers = GathersOnUse(root)
    ends = Ends({}, {}) if pipelined else find_ends(root, blocks)
    stays = {root, *ends.heads.values()}  # the backward pass begins with a head
    for unit in (*(block.module for block in blocks), *ends.embeddings.values(), *ends.heads.values(), root):
        parts = list(_of_other_groups(unit, group_of, usual))
        if all(module is not unit for module, _ in parts):
            parts.append((unit, usual))
        for module, group in parts:
            _refuse_mixed_types(module, names)
            frees = dp.sharding_level == 3 and not pipelined and unit not in stays
            _shard(module, group, reshard_after_forward=frees, **options)
            if module is not root:
                module.register_forward_pre_hook(_follow_requires_grad)
                gathers.leave_within(module)
    for embedding in ends.embeddings.values():
        if isinstance(embedding, FSDPModule):
            embedding.set_unshard_in_backward(False)  # the gradient of a look-up needs no table
    for module in root.modules():
        if not _is_sharded(module) and any(map(_is_sharded, module.modules())):
            gathers.act_within(module)
    if dp.sharding_level < 3:  # at level 3 hooks between forward and backward see what is sharded, and its gradients
        keep_through_nested_forwards(root)
    units = [module for module in root.modules() if isinstance(module, FSDPModule) and module is not root]
    in_units = {module for unit in units for module in unit.modules()}
    for module in root.modules():
        if module is not root and module not in in_units and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_gather_rest_of(root))
    averaged = {name: groups[name] for name in scalars}
    return DataParallelModule(root, dp.sharding_level, averaged, gathers=gathers)


_WHOLE = "parameters that stay whole on every rank", "dp=ddp"


def refuse_hooked_if_sharded(root: nn.Module, dp: DataParallel, ranks: int) -> None:
    """Raise ConfigError for parameters on which somebody has put hooks, where sharding would take their places.

    Args:
        ranks: along dp and cp together.
    """
    if dp.sharding_level == 0 or (ranks == 1 and not dp.acts_on_one_rank):
        return
    for name, parameter in root.named_parameters():
        if has_gradient_hooks(parameter) and parameter.dim() > 0:
            raise ConfigError(
                "dp",
                f"{name} has hooks on its gradient, which would not run: what is sharded is another parameter, and has "
                "a part of the gradient",
                _WHOLE[0],
                _WHOLE[1],
            )


def _refuse_unsharded(root: nn.Module) -> None:
    """Raise ConfigError for parameters of which torch shards neither values nor gradients."""
    for name, parameter in root.named_parameters():
        if parameter.is_complex():
            raise ConfigError("dp", f"{name} is of {parameter.dtype}, and complex numbers can't be sharded", *_WHOLE)
    for name, module in root.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            allowed = f"sparse=False for {name}, or {_WHOLE[0]}"
            raise ConfigError("dp", f"{name} has sparse gradients, which can't be sharded", allowed, _WHOLE[1])


def _refuse_other_rows(root: nn.Module) -> None:
    """Raise ConfigError for tables that treat the rows that a batch looks up in their own way: a rank has fewer."""
    for name, module in root.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.weight.requires_grad:
            continue
        if module.max_norm is not None:
            raise ConfigError(
                "dp",
                f"{name}(max_norm={module.max_norm:g}) shortens the rows that it looks up, which are others on every "
                "rank, so replicas would differ",
                "a hook after the optimizer's step that shortens all rows (torch.renorm)",
                "max_norm=None",
            )
        if module.scale_grad_by_freq:
            raise ConfigError(
                "dp",
                f"{name}(scale_grad_by_freq=True) counts how often a row is looked up, and a rank sees its part of the "
                "batch only",
                "scale_grad_by_freq=False",
                "scale_grad_by_freq=False",
            )


def _refuse_other_orders() -> NoReturn:
    raise ConfigError(
        "dp",
        "in one step ranks have called sharded blocks in different orders, as some that samples choose, so parts of "
        "different blocks were put together",
        f"a model that calls all of its blocks, or {_WHOLE[0]}",
        _WHOLE[1],
    )


def _refuse_write(names: Mapping[nn.Parameter, str], parameter: nn.Parameter) -> NoReturn:
    raise ConfigError(
        "dp",
        f"{names.get(parameter, 'a parameter')} is written into between forward and backward, when it is gathered: "
        "what is sharded stays as it was",
        f"a hook after the optimizer's step that writes into it, or {_WHOLE[0]}",
        _WHOLE[1],
    )


def _refuse_mixed_types(unit: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Raise ConfigError for parameters of several types that would be sharded, and exchange gradients, together."""
    first: dict[torch.dtype, str] = {}
    for parameter in unit.parameters():
        if parameter in names and parameter.requires_grad and parameter.dim() > 0:  # others are sharded already
            first.setdefault(parameter.dtype, names[parameter])
    if len(first) > 1:
        both = " and ".join(f"{name} ({str(kind).removeprefix('torch.')})" for kind, name in first.items())
        raise ConfigError("dp", f"{both} are trained in one block, and sharded gradients have one type", *_WHOLE)


def _of_other_groups(
    module: nn.Module, group_of: Mapping[nn.Parameter, GradientGroup], usual: GradientGroup
) -> Iterator[tuple[nn.Module, GradientGroup]]:
    """The outermost modules of `module`, or itself, all of whose parameters are of one group that is not the usual."""
    if isinstance(module, FSDPModule):
        return
    present = {group_of[parameter] for parameter in module.parameters() if parameter in group_of}
    if present <= {usual}:
        return
    own = {group_of[parameter] for parameter in module.parameters(recurse=False) if parameter in group_of}
    if len(present) == 1 and (own or type(module).forward is not nn.Module.forward):
        yield module, present.pop()
        return
    assert own <= {usual}, "a module can't have parameters of another gradient group beside those of its parts"
    for part in module.children():
        yield from _of_other_groups(part, group_of, usual)


def _shard(module: nn.Module, group: GradientGroup, **options: Any) -> None:
    assert group.mesh is not None, "a gradient group of sharded parameters has a mesh"
    read_whole_numbers()
    keep_absent_gradients()
    sharded = fully_shard(module, mesh=group.mesh, **options)
    if group.divisor != group.mesh.size():
        sharded.set_gradient_divide_factor(group.divisor)
        # gloo has no other; where nothing is scattered torch would divide by the factor twice
        sharded.set_force_sum_reduction_for_comms(group.mesh.size(group.mesh.ndim - 1) > 1)


def sharding_reasons(
    root: nn.Module,
    blocks: Blocks,
    dp: DataParallel,
    ranks: int,
    pipelined: bool = False,
    autocast: torch.dtype | None = None,
) -> dict[str, str]:
    """What `apply_data_parallel` and `begin` do to which parameters of `root`, and why.

    Args:
        ranks: along dp and cp together.
        pipelined: whether the model is cut into stages.
        autocast: the type that forward passes are cast to.
    """
    if ranks == 1 and not dp.acts_on_one_rank:
        return {"all parameters": "one rank along dp: nothing to exchange"}
    if dp.sharding_level == 0:
        return {"all parameters": "level 0: whole on every rank; gradients averaged in buckets during backward"}
    use = "gathered once per step"
    if dp.sharding_level == 3 and not pipelined:
        use = "gathered for its forward and freed; again for its backward"
    reasons = {block.name: use for block in blocks}
    if not pipelined:
        ends = find_ends(root, blocks)
        frees = dp.sharding_level == 3
        for end in ends.embeddings:
            reasons[end] = (
                "gathered for its forward and freed; a look-up needs no table in its backward" if frees else use
            )
        for end in ends.heads:
            reasons[end] = "gathered for its forward; it stays for its backward, which follows" if frees else use
    reasons["everything else"] = "gathered once per step: it is used at the start and at the end of it"
    if dp.sharding_level == 3 and not pipelined:
        reasons["everything else"] = "gathered for the forward; again for the backward if training_step calls the model"
    if scalars := _scalars(root):
        reasons[", ".join(scalars)] = "whole on every rank: a scalar can't be sharded"
    if autocast is not None and dp.follows_autocast and linear_weights(root):
        name = next(key for key, value in DTYPES.items() if value == autocast)
        reasons["weights of linear layers"] = (
            f"gathered in {name}, to which autocast casts them; gradients summed in fp32"
        )
    return reasons


def _scalars(root: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in root.named_parameters() if parameter.dim() == 0}


def _follow_requires_grad(module: nn.Module, args: Any) -> None:
    follow_requires_grad(module)


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _gather_rest_of(root: nn.Module) -> Callable[[nn.Module, Any], None]:
    """A hook for modules that hold parameters of the root's group: people also call them outside of its forward."""
    assert isinstance(root, FSDPModule)

    def gather(module: nn.Module, args: Any) -> None:
        root.unshard()
        follow_requires_grad(root)

    return gather
