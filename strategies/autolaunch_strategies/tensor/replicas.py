"""Plain tensors that are the same on every rank as sharded ones (`DTensor`), and back; differentiable both ways."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils._pytree import tree_map

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.backward import version_of
from autolaunch_strategies.torch_private.sharding_rules import DIFFERENTIATES_TWICE


class Replicator:
    """Plain tensors as replicated DTensors; the same tensor used several times in a row is converted once.

    Its gradient is then summed over ranks once, too, and not once per use.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.remembers = True
        """Off where every operation has to be repeated: whether a tensor was remembered is not always the same."""
        self._last: tuple[weakref.ref[torch.Tensor], tuple[bool, int], DTensor] | None = None

    def __call__(self, tensor: torch.Tensor) -> DTensor:
        """`tensor` (equal on every rank of the mesh) as a DTensor; one that is a DTensor already stays."""
        if isinstance(tensor, DTensor):
            return tensor
        state = torch.is_grad_enabled(), version_of(tensor)  # changed in place, it has another history
        if self._last is not None and self._last[0]() is tensor and self._last[1] == state:
            return self._last[2]
        replica = _Replica.apply(tensor, self.mesh)
        if not isinstance(tensor, torch.nn.Parameter):
            self._remember(tensor, replica)
        return replica

    def whole(self, tensor: Any) -> Any:
        """As `plain`; where the whole goes on to sharded layers its gradient is scattered, not added up whole before.

        Differentiable.
        """
        if not isinstance(tensor, DTensor):
            return plain(tensor)
        replica = replicated(tensor)
        whole = _Whole.apply(replica)
        self._remember(whole, replica)
        return whole

    def _remember(self, tensor: torch.Tensor, replica: DTensor) -> None:
        if self.remembers:
            state = torch.is_grad_enabled(), version_of(tensor)
            self._last = (weakref.ref(tensor, self._forget), state, replica)

    def for_mesh(self, mesh: DeviceMesh) -> Replicator:
        """This one, or another if a process has models on several meshes."""
        if mesh is self.mesh:
            return self
        if mesh != self.mesh:
            return Replicator(mesh)
        self.mesh, self._last = mesh, None  # an equal one: the groups of the other may have ended
        return self

    def _forget(self, tensor: weakref.ref[torch.Tensor]) -> None:
        # What was remembered before may end when it is replaced: its tensor lives as long as the DTensor made of it.
        if self._last is not None and self._last[0] is tensor:
            self._last = None


def plain(tensor: Any) -> Any:
    """A DTensor or a sequence shard as the whole plain tensor, the same on every rank; anything else as it is.

    Differentiable.
    """
    if isinstance(tensor, SequenceShard):
        tensor = tensor.whole()
    if not isinstance(tensor, DTensor):
        return tensor
    return _Whole.apply(replicated(tensor))


def replicated(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


class _Replica(torch.autograd.Function):
    """As `DTensor.from_local` of what is the same on every rank; but its gradient can be differentiated again."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not DIFFERENTIATES_TWICE:
            raise ConfigError(
                "create_graph=True with a mesh that has mp",
                "this torch forgets where gradients of sharded layers come from, and a gradient of them would be wrong",
                "torch 2.12 or newer; a mesh without mp; the gradient without create_graph=True",
            )
        return plain(gradients[0]), None


class _Whole(torch.autograd.Function):
    """As `DTensor.to_local` of a replicated DTensor; but not a view, which models can't change in place (`x +=`)."""

    @staticmethod
    def forward(context: Any, tensor: DTensor) -> torch.Tensor:
        context.mesh, context.placements = tensor.device_mesh, tensor.placements
        return tensor.to_local().detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return DTensor.from_local(gradients[0], context.mesh, context.placements, run_check=False)


def on_whole_tensors(replicate: Replicator, func: Any, args: Any, kwargs: Any) -> Any:
    """A function that does not work on sharded tensors, on whole plain ones: every rank does all of the work."""
    return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def combined(result: Any) -> Any:
    """A tensor whose parts on the ranks are combined by more than a sum (a norm, a maximum) as it is when combined.

    DTensor takes sums and stacks of such parts for parts of the sum or stack, which they are not. One number is always
    combined: what reads it (a logged loss) may read the part of its rank.
    """
    if type(result) is not DTensor or not any(isinstance(placement, Partial) for placement in result.placements):
        return result
    kept = [result.ndim > 0 and _is_linear(placement) for placement in result.placements]
    return result if all(kept) else _Combined.apply(result, kept)


class _Combined(torch.autograd.Function):
    """As `DTensor.redistribute` of such a tensor; but with any gradient, also one that is to be added up over ranks.

    torch would turn that into parts that are combined as the tensor's are, for which it has no way.
    """

    @staticmethod
    def forward(context: Any, tensor: DTensor, kept: list[bool]) -> DTensor:
        context.kept = kept
        return _replicated_except(tensor, kept)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _replicated_except(gradients[0], context.kept), None


def _replicated_except(tensor: DTensor, kept: list[bool]) -> DTensor:
    placements = zip(tensor.placements, kept, strict=True)
    return tensor.redistribute(placements=[one if keep else Replicate() for one, keep in placements])


def _is_linear(placement: Placement) -> bool:
    return not isinstance(placement, Partial) or (type(placement) is Partial and placement.reduce_op in ("sum", "avg"))
