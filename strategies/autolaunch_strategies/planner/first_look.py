"""A first look at a model: one forward pass of one sequence shows which blocks run when, and which run the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autolaunch_strategies.planner.alike import structure
from autolaunch_strategies.planner.model_call import ModelCall
from autolaunch_strategies.planner.operators import Tally, Tape
from autolaunch_strategies.planner.subject import Subject
from autolaunch_strategies.torch_private.calls import run_call
from autolaunch_strategies.torch_private.tracing import storage_key
from autolaunch_strategies.tracing.tensors import Labels


class _Again(BaseException):
    """A block is called a second time. No error of the model's, so that nobody on the way takes it for one."""


class FirstLook:
    """What a forward pass without gradients shows. Of blocks that are alike the first is run.

    Args:
        args, kwargs: what the model is called with.

    Raises:
        Untraceable: it can't run on shapes alone.
    """

    def __init__(self, model_call: ModelCall, args: Any, kwargs: Mapping[str, Any]) -> None:
        try:
            self._run(model_call, args, kwargs, {})
        except _Again:  # what a block does may depend on how often it was called
            self._run(model_call, args, kwargs, None)

    def _run(
        self,
        model_call: ModelCall,
        args: Any,
        kwargs: Mapping[str, Any],
        ran: dict[Hashable, tuple[str, TreeSpec, list[Any]]] | None,
    ) -> None:
        """
        Args:
            ran: structure and arguments of a block -> the one that ran, and what it returned; None runs all of them.
        """
        self._ran = ran
        self._stands_for: dict[str, str] = {}
        """Block that was not run -> the one that is alike."""
        self._subject, self._sharding = model_call.subject, model_call.sharding
        self.calls: list[str] = []
        """Blocks in the order of their calls."""
        self.before, self.after = Tally(), Tally()
        """Of what runs before the blocks, and of what runs behind the last one."""
        self.blocks: dict[str, Tally] = {}
        """Of every block."""
        self._tape = Tape()
        self._arguments: dict[str, dict[int, torch.Tensor]] = {}
        self._readers = Labels[str]()
        with model_call.on(self._tape, args, kwargs, self._block) as call, torch.no_grad():
            self._tape.tally = self.before
            call()
        self.shared = {
            name: {place for place, tensor in tensors.items() if len(self._readers.of(tensor)) > 1}
            for name, tensors in self._arguments.items()
        }
        """Block -> the places of the tensors among its arguments that other blocks are called with, too."""
        self._arguments.clear()
        self._readers = Labels()
        self.is_behind_trained = self._behind_trained(model_call.subject)
        """Block -> whether its input needs a gradient."""
        self.kind_of = self._kinds(model_call)
        """Block, in order of execution -> the first one that runs the same."""
        for name, other in self._stands_for.items():  # it may be the first of its kind: behind what is trained
            self.blocks[name] = self.blocks[other]

    @property
    def order(self) -> list[str]:
        """Blocks in the order of their first calls."""
        return list(self.blocks)

    def _block(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self.calls:  # it was not what follows the last block
            self.before.matmuls += self.after.matmuls
            self.after.matmuls.clear()
        if name in self.blocks and self._ran is not None:
            raise _Again
        self.calls.append(name)
        self._tape.tally = self.blocks.setdefault(name, Tally())
        leaves, spec = tree_flatten((args, kwargs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._arguments.setdefault(name, {})[place] = leaf
                self._readers.add(leaf, frozenset({name}))
        called_with = (
            str(spec),
            *(leaf.shape if isinstance(leaf, torch.Tensor) else repr(leaf)[:80] for leaf in leaves),
        )
        self._tape.tally.operators.append(called_with)
        output = self._output(name, module, args, kwargs, called_with, leaves)
        self._tape.tally = self.after
        return output

    def _output(
        self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], called_with: Any, leaves: list[Any]
    ) -> Any:
        """What a block returns: as one that is alike did, if one has run with such arguments."""
        if self._ran is None:
            return run_call(module, *args, **kwargs)
        sharded = {own: self._sharding.dims.get(f"{name}.{own}") for own, _ in module.named_parameters()}
        types = tuple(
            (leaf.dtype, leaf.stride(), self._tape.dim_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)
        )
        key = structure(module, sharded), called_with, types
        if key in self._ran:
            self._stands_for[name], spec, shapes = self._ran[key]
            return self._stand_in(spec, shapes)
        output = run_call(module, *args, **kwargs)
        outputs, spec = tree_flatten(output)
        given = {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        tensors = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
        if len(tensors) == len(outputs) and not any(storage_key(leaf) in given for leaf in tensors):
            shapes = [(leaf.shape, leaf.stride(), leaf.dtype, self._tape.dim_of(leaf)) for leaf in tensors]
            self._ran[key] = name, spec, shapes
        return output

    def _stand_in(self, spec: TreeSpec, shapes: list[Any]) -> Any:
        with self._tape.unheard():
            outputs = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype, _ in shapes]
            for tensor, (*_, dim) in zip(outputs, shapes, strict=True):
                if dim is not None:
                    self._tape.shard(tensor, dim)
        return tree_unflatten(outputs, spec)

    def _kinds(self, model_call: ModelCall) -> dict[str, str]:
        """By class, by shapes and sharding of the parameters, by the operators that ran, and by what is trained."""
        firsts: dict[Any, str] = {}
        keys: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        for name, tally in self.blocks.items():
            if name in self._stands_for:
                keys[name] = keys[self._stands_for[name]]
            else:
                module = model_call.subject.blocks[name]
                shapes = tuple(
                    (own, tuple(parameter.shape), parameter.requires_grad)
                    for own, parameter in module.named_parameters()
                )
                dims = tuple(model_call.sharding.dims.get(f"{name}.{own}") for own, *_ in shapes)
                keys[name] = type(module), shapes, dims, tuple(tally.operators)
            kinds[name] = firsts.setdefault((keys[name], self.is_behind_trained[name]), name)
        return kinds

    def _behind_trained(self, subject: Subject) -> dict[str, bool]:
        """Block -> whether anything before it is trained, so that its input needs a gradient.

        Of models that are trained as a whole it is said of all blocks, so that the first one is like the others.
        """
        parameters = dict(subject.model.named_parameters())
        trains = all(parameter.requires_grad for parameter in parameters.values()) or any(
            parameters[name].requires_grad and any(user is self.before for user in users)
            for name, users in self._tape.used.items()
            if name in parameters
        )
        behind = {}
        for name in self.blocks:
            behind[name] = trains
            trains = trains or any(parameter.requires_grad for parameter in subject.blocks[name].parameters())
        return behind
