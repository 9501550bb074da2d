"""A batch as microbatches: how it is cut, joined on the last stage, and its gradients cut again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autolaunch_strategies.model.random_positions import Draws
from autolaunch_strategies.pipeline.linear_layers import StageLinears
from autolaunch_strategies.pipeline.own_memory import cut_off
from autolaunch_strategies.pipeline.record import Leaf
from autolaunch_strategies.pipeline.structure import Structure
from autolaunch_strategies.pipeline.transfer import Axes, Header, Metas
from autolaunch_strategies.torch_private.backward import run_backward_of

Gradients = Sequence[torch.Tensor | None]


@dataclass
class Work:
    """What is kept of a job between its forward and its backward."""

    inputs: list[torch.Tensor]
    """This rank's parts of what arrived."""
    outputs: list[torch.Tensor]
    """This rank's parts of what is carried on; at the end of it all: the loss alone."""
    header: Header
    draws: Draws | None = None
    """Where its random numbers stand in the run: the same ones where the backward pass computes it again."""
    linears: StageLinears | None = None
    """What its linear layers ran within: the same where they run again."""


@dataclass
class Microbatches:
    """What the steps of the microbatches of one batch gave, in order; on the last stage only."""

    losses: list[torch.Tensor] = field(default_factory=list)
    rest: list[Any] = field(default_factory=list)
    works: list[Work] | None = None
    """What the model returned; None if it was not to be kept."""


class Filled:
    """A batch that has been run forward: what joins its microbatches on the last stage, and cuts their gradients."""

    def __init__(self, structure: Structure, count: int) -> None:
        self.structure, self.count = structure, count
        self.trains = torch.is_grad_enabled()
        self._works: list[Work] = []
        self._whole: list[tuple[int, torch.Tensor, int | None]] = []  # place in the carry, joined part, dim
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.results: list[torch.Tensor] = []
        """What the call returned on another stage than the last, where a step goes on with it."""

    def is_in(self, leaf_ids: Collection[int]) -> bool:
        """Whether what the call returned is among what something depends on, by the `id`s of its leaf tensors."""
        made = (*(whole for _, whole, _ in self._whole), *(cut for _, cut in self._before), *self.results)
        return any(id(tensor) in leaf_ids for tensor in made)

    def forget(self) -> None:
        """Drop what only a backward pass needs; `is_in` is answered all the same."""
        self._works.clear()

    def cut_before(self, leaves: list[Any]) -> list[Any]:
        """The arguments of the call, cut off from what computed them; `differentiate_before` goes on there."""
        if not self.trains:
            return leaves
        cut = list(leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                cut[place] = cut_off(leaf)
                self._before.append((leaf, cut[place]))
        return cut

    def differentiate_before(self) -> None:
        """Differentiate what computed the arguments of the call."""
        pairs = [(leaf, cut.grad) for leaf, cut in self._before if cut.grad is not None]
        if pairs:
            run_backward_of([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])

    def take(self, work: Work) -> None:
        """Take what the last stage made of the next microbatch."""
        self._works.append(work)

    def joined(self, axes: Axes) -> tuple[dict[Leaf, torch.Tensor], Metas]:
        """What the output of the model needs, for the whole batch, and metas of everything."""
        headers = [work.header for work in self._works]
        metas = tuple(
            tuple(
                meta.resized(
                    self.structure.join_dim(Leaf(call, place)), [header.metas[call][place] for header in headers]
                )
                for place, meta in enumerate(row)
            )
            for call, row in enumerate(headers[0].metas)
        )
        known: dict[Leaf, torch.Tensor] = {}
        for place, leaf in enumerate(headers[0].carry):
            parts = [work.outputs[place].detach() for work in self._works]
            meta, dim = metas[leaf.call][leaf.place], self.structure.join_dim(leaf)
            whole = parts[0] if dim is None else torch.cat(parts, dim)
            if self.trains and meta.requires_grad:
                whole = cut_off(whole)
                self._whole.append((place, whole, dim))
            known[leaf] = meta.wrapped(whole, axes)
        return known, metas

    def gradients(self, index: int) -> Gradients:
        """The gradients of what the last stage made of a microbatch."""
        gradients: list[torch.Tensor | None] = [None] * len(self._works[index].outputs)
        for place, whole, dim in self._whole:
            if whole.grad is None:
                continue
            if dim is None:  # equal in all microbatches: one of them passes the gradient on
                gradients[place] = whole.grad if index == 0 else None
                continue
            sizes = [work.outputs[place].shape[dim] for work in self._works]
            gradients[place] = whole.grad.narrow(dim, sum(sizes[:index]), sizes[index])
        return gradients


def cut_leaves(leaves: Sequence[Any], batched: Sequence[bool], count: int) -> list[list[Any]]:
    """Flattened arguments of every microbatch: tensors of the batch in `count` parts along dim 0, the rest as it is.

    The first parts have one sample more where the batch does not divide.
    """
    if count == 1:
        return [list(leaves)]
    parts = [
        leaf.tensor_split(count) if is_batched else (leaf,) * count
        for leaf, is_batched in zip(leaves, batched, strict=True)
    ]
    return [list(part) for part in zip(*parts, strict=True)]


def shapes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The shapes of the tensors among `leaves`."""
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def spread(gradients: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of those of `tensors` that need one, with None for the others."""
    left = iter(gradients)
    return [next(left) if tensor.requires_grad else None for tensor in tensors]
