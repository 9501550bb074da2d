"""Random numbers for tensors that are sharded: independent where ranks hold different elements, equal elsewhere.

Every rank of the mp axis has the same default generator, in the same state: what is drawn for a plain (whole) tensor is
the same on all of them. For a sharded tensor each rank draws for its own part: one number is drawn from the
default generator, and it and the place of the rank along the sharded dims seed a stream for this one call. So the
default generators stay in step, a repeated run repeats its numbers, and activation checkpointing, which puts the
default generator back before it computes again, draws the same mask again. It works on every device.

torch's own tensor-parallel tracker (`TensorParallelRNGTracker`, and `OffsetBasedRNGTracker` after it) keeps seeds or
offsets per device and exists for CUDA only; on a CPU it lets every rank draw the same mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from autolaunch_strategies.model.random_positions import holding_part_of
from autolaunch_strategies.torch_private.random_state import saved_random_state, seed_torch

_EACH: frozenset[Any] = frozenset(
    {
        F.dropout, F.alpha_dropout, F.rrelu, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
        torch.rrelu, torch.rrelu_, torch.bernoulli, torch.poisson, torch.normal, torch.rand_like, torch.randn_like,
        torch.randint_like, torch.Tensor.bernoulli,
    }
)  # fmt: skip
_IN_PLACE: frozenset[Any] = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in ("bernoulli", "normal", "uniform", "exponential", "cauchy", "log_normal", "geometric", "random")
)
_PER_GROUP: frozenset[Any] = frozenset(
    {
        F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, F.gumbel_softmax, torch.feature_dropout,
        torch.feature_alpha_dropout, torch.multinomial, torch.Tensor.multinomial,
    }
)  # fmt: skip

_DROPOUTS: frozenset[Any] = frozenset(
    {F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout}
)
_DROPOUT_ARGUMENTS = ("input", "p", "training", "inplace")

PER_ELEMENT = _EACH | _IN_PLACE
"""Functions that draw a number for each element, independent of all others."""
RANDOM_FUNCTIONS = PER_ELEMENT | _PER_GROUP


@contextmanager
def own_stream(sharded: DTensor) -> Iterator[None]:
    """Within it this rank draws numbers for its own part of `sharded`. Every rank of its mesh enters it together."""
    placements = sharded.placements
    place = [sharded.device_mesh.get_local_rank(dim) for dim, item in enumerate(placements) if not item.is_replicate()]
    if not place:
        yield
        return
    with stream_of(str(place), sharded.device), holding_part_of(sharded):
        yield


@contextmanager
def stream_of(place: str, device: torch.device) -> Iterator[None]:
    """Within it this rank draws numbers for its `place`; every default generator then stands where the others' do.

    Every rank that shares a default generator enters it together.
    """
    number = int(torch.randint(2**62, (), device="cpu"))
    digest = hashlib.blake2b(f"{number}:{place}".encode(), digest_size=8).digest()
    with saved_random_state(device):
        seed_torch(int.from_bytes(digest, "little") >> 1, device)
        yield


def run_random(_: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A torch function that draws random numbers, of tensors of which some are DTensors: as on one process.

    Functions whose numbers serve many elements (`dropout2d`, `multinomial`) run on the whole tensor on every rank.
    """
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, DTensor)]
    if func in _DROPOUTS:
        default = {"p": 0.5, "training": func not in (F.alpha_dropout, F.feature_alpha_dropout)}
        named = default | dict(zip(_DROPOUT_ARGUMENTS, args, strict=False)) | kwargs
        if not named["training"] or named["p"] == 0:  # torch draws nothing for it either
            return func(*args, **kwargs)
    from_generator = kwargs.get("generator") is not None  # the user's own: its numbers are for the whole tensor
    if func in _IN_PLACE and from_generator:
        whole = func(_whole(args[0]).detach().clone(), *tree_map(_whole, args[1:]), **tree_map(_whole, kwargs))
        args[0].copy_(_replicated(whole, args[0]).redistribute(placements=args[0].placements))
        return args[0]
    if func in _IN_PLACE:
        with own_stream(args[0]), torch.no_grad():
            func(args[0].to_local(), *tree_map(_whole, args[1:]), **tree_map(_whole, kwargs))
        return args[0]
    sharded = next((tensor for tensor in tensors if any(item.is_shard() for item in tensor.placements)), None)
    if func in _PER_GROUP or sharded is None or from_generator:
        args, kwargs = tree_map(_whole, (args, kwargs))
        return _replicated(func(*args, **kwargs), tensors[0])
    placements = [item if item.is_shard() else Replicate() for item in sharded.placements]

    def local(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not isinstance(leaf, DTensor):
            leaf = _replicated(leaf, sharded)
        assert leaf.shape == sharded.shape, "numbers per element of tensors of one shape"
        return leaf.redistribute(placements=placements).to_local()

    args, kwargs = tree_map(local, (args, kwargs))
    args, kwargs = _not_in_place(func, args, kwargs)  # the local part is a view of the sharded tensor
    with own_stream(sharded):
        output = func(*args, **kwargs)
    return DTensor.from_local(
        output, sharded.device_mesh, placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _not_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if func in (torch.dropout_, torch.alpha_dropout_, torch.rrelu_):
        return (args[0].clone(), *args[1:]), kwargs
    positions = {F.dropout: 3, F.alpha_dropout: 3, F.rrelu: 4}
    if func in positions:
        return args[: positions[func]], {key: value for key, value in kwargs.items() if key != "inplace"}
    return args, kwargs


def _replicated(whole: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    return leaf.redistribute(placements=[Replicate()] * leaf.device_mesh.ndim).to_local()
