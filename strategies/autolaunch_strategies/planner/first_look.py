"""A first look at a model: one forward pass of one sequence shows which blocks run when, and which run the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from autolaunch_strategies.planner.model_call import ModelCall
from autolaunch_strategies.planner.operators import Tally, Tape
from autolaunch_strategies.torch_private.calls import run_call
from autolaunch_strategies.tracing.tensors import Labels


class FirstLook:
    """What a forward pass without gradients shows.

    Args:
        args, kwargs: what the model is called with.

    Raises:
        Untraceable: it can't run on shapes alone.
    """

    def __init__(self, model_call: ModelCall, args: Any, kwargs: Mapping[str, Any]) -> None:
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
        self.kind_of = self._kinds(model_call)
        """Block, in order of execution -> the first one that runs the same."""

    @property
    def order(self) -> list[str]:
        """Blocks in the order of their first calls."""
        return list(self.blocks)

    def _block(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self.calls:  # it was not what follows the last block
            self.before.matmuls += self.after.matmuls
            self.after.matmuls.clear()
        self.calls.append(name)
        self._tape.tally = self.blocks.setdefault(name, Tally())
        leaves, spec = tree_flatten((args, kwargs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._arguments.setdefault(name, {})[place] = leaf
                self._readers.add(leaf, frozenset({name}))
        self._tape.tally.operators.append(
            (str(spec), *(leaf.shape if isinstance(leaf, torch.Tensor) else repr(leaf)[:80] for leaf in leaves))
        )
        output = run_call(module, *args, **kwargs)
        self._tape.tally = self.after
        return output

    def _kinds(self, model_call: ModelCall) -> dict[str, str]:
        """By class, by shapes and sharding of the parameters, and by the operators that ran."""
        firsts: dict[Any, str] = {}
        kinds = {}
        for name, tally in self.blocks.items():
            module = model_call.subject.blocks[name]
            shapes = tuple((own, tuple(parameter.shape)) for own, parameter in module.named_parameters())
            dims = tuple(model_call.sharding.dims.get(f"{name}.{own}") for own, _ in shapes)
            kinds[name] = firsts.setdefault((type(module), shapes, dims, tuple(tally.operators)), name)
        return kinds
