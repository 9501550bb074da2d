"""The batches of a `DataLoader`, shared out among ranks: together they are what one process would see."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import random
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from autolaunch_strategies.config import ConfigError

_WHERE = "dataloader"


@dataclass(frozen=True)
class Share:
    """Which part of every batch a rank has: the `index`-th of `count` consecutive ones."""

    index: int = 0
    count: int = 1

    def bounds(self, size: int) -> tuple[int, int]:
        """(start, stop) in a batch of `size` samples; where it does not divide, the first parts have one more."""
        each, more = divmod(size, self.count)
        start = self.index * each + min(self.index, more)
        return start, start + each + (self.index < more)

    def taken(self, size: int) -> tuple[int, int]:
        """`bounds`, or the first sample where nothing is left: every rank runs every step (see `weight`)."""
        start, stop = self.bounds(size)
        return (start, stop) if stop > start or size == 0 else (0, 1)

    def weight(self, size: int) -> float:
        """The weight of this part's mean in the mean over `size` samples: 1 if parts are equal, 0 if it is empty."""
        start, stop = self.bounds(size)
        return (stop - start) * self.count / size if size else 1.0


class Counted:
    """Says whether the present batch of this rank counts, or is there only to keep step with the others.

    Asked by what adds up over the batches of all ranks; whoever trains sets `ask`.
    """

    def __init__(self) -> None:
        self.ask: Callable[[], bool] = lambda: True

    def __call__(self) -> bool:
        return self.ask()


class DistributedLoader:
    """The batches of `loader`, of each the part that belongs to this rank's place along dp.

    The parts of all ranks along dp, one after the other, are the batches of one process, in its order: samplers run on
    every rank with the random state of the first one. Ranks along other axes get the same part. The first batch of a
    pass is collective; every rank goes through the same number of batches. A map-style dataset is asked for this
    rank's samples only, and `collate_fn` joins only those (what it pads to may differ between ranks). An iterable
    dataset is read whole by every rank. A loader that has no batch size of its own, or goes through its data in a way
    of its own, is run whole as well, and its tensors are cut along their first dim.

    Of a last batch that does not divide, the first ranks have one sample more, and a rank for which nothing is left
    gets one that does not count: gradients that flow through the model's outputs are weighed by `weight`.

    Every attribute that is not named here (``dataset``, ``batch_size``, ``sampler``, ...) is that of `loader`.

    Args:
        loader: see `check_loader`.
        share: this rank's part.
        world: how many ranks there are; with one, batches are those of `loader` itself.
        plan: what was decided, for people to read.
        only_even: refuse batches that do not divide (stages and sharded sequences can't be weighed).
        joined: how many consecutive batches of `loader` are one of all ranks: 1 where its batch size is that of all
            ranks, as many as there are parts where it is that of each.
    """

    def __init__(
        self,
        loader: DataLoader,
        share: Share,
        world: int,
        plan: Any = None,
        only_even: bool = False,
        joined: int = 1,
    ) -> None:
        assert joined in (1, share.count)
        self.loader, self.share, self.plan, self.only_even = loader, share, plan, only_even
        self.weight = 1.0
        """What the mean over the batch handed out last counts in the mean over all ranks: samples here / mean of it."""
        self.weights: deque[float] = deque()
        """`weight` of every batch handed out in this pass; whoever uses them takes them from the left."""
        self._world, self.joined = world, joined
        self._is_same = False
        """Whether it has been seen that all ranks read the same stream."""
        self._inner = loader
        self._sizes: IndexShare | None = None
        self._is_cut_here = not _has_own_batches(loader) or type(loader).__iter__ is not DataLoader.__iter__
        if world == 1:
            return
        _share_generators(loader)
        if self._is_cut_here:
            return
        if isinstance(loader.dataset, IterableDataset):
            self._inner = DataLoader(
                loader.dataset,
                batch_size=_whole(loader.batch_size) * joined,
                drop_last=loader.drop_last,
                **{**_options(loader), "collate_fn": _CollateShare(loader.collate_fn, share)},
            )
        else:
            assert loader.batch_sampler is not None
            self._sizes = IndexShare(loader.batch_sampler, generators_of(loader), share, joined)
            self._inner = DataLoader(loader.dataset, batch_sampler=self._sizes, **_options(loader))

    @property
    def samples_per_batch(self) -> int | None:
        """Samples of all ranks in a full batch; None if the loader does not say."""
        size = global_batch_size(self.loader)
        return None if size is None else size * self.joined

    def __len__(self) -> int:
        return len(self._inner) if self._inner is not self.loader else -(-len(self.loader) // self.joined)

    @property
    def reader(self) -> DataLoader:
        """What reads the data, with its worker processes."""
        return self._inner

    def __call__(self) -> Iterator[Any]:
        """A new pass, as ``iter(loader)``."""
        return iter(self)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._world == 1:
            return iter(self.loader)
        # A loader draws random numbers when a pass begins: now, as on one process, not with the first batch.
        return self._pass(self._in_step() if self._sizes is None else self._by_index(iter(self._inner), self._sizes))

    def _pass(self, batches: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        weights = self.weights = deque()
        try:
            for size, batch in batches:
                self.weight = self.share.weight(size)
                weights.append(self.weight)
                if self.only_even and size % self.share.count:
                    raise ConfigError(
                        _WHERE,
                        f"a batch of {size} samples can't be shared out evenly among {self.share.count} ranks along "
                        "dp, which stages and sharded sequences need",
                        "drop_last=True, or a batch size that divides",
                    )
                yield batch
        finally:
            self.weight = 1.0

    def global_mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of `loss`, a mean over this rank's part of the batch, over all samples of the batch. Collective.

        Exact where each sample counts alike in the loss. Called while the batch is the current one.

        Returns:
            0-dim, without a gradient, equal on every rank.
        """
        value = loss.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if self._world == 1:
            return value
        # Ranks of one replica hold the same value; where nothing counts it may be anything, nan included.
        total = value * self.weight if self.weight else torch.zeros_like(value)
        dist.all_reduce(total)
        return total / self._world

    def _by_index(self, batches: Iterator[Any], share: IndexShare) -> Iterator[tuple[int, Any]]:
        sizes = share.sizes  # of this pass, which has begun
        for batch in batches:
            yield sizes.popleft(), batch

    def _in_step(self) -> Iterator[tuple[int, Any]]:
        """Every rank reads the same stream; the data may draw random numbers while it is read."""
        same = SameRandomness()
        with same:
            batches = iter(self._inner)
        while True:
            with same:
                joined = list(itertools.islice(batches, self.joined if self._is_cut_here else 1))
            if not self._is_same:
                self._is_same = True
                _refuse_other_data(joined if self._is_cut_here else [part[2] for part in joined])
            if not joined:
                return
            if not self._is_cut_here:
                yield joined[0][:2]
            elif self.joined == 1:
                yield cut_batch(joined[0], self.share)
            else:  # whole ones, of which the last ranks may miss theirs at the end: then one that does not count
                yield len(joined), joined[self.share.taken(len(joined))[0]]


def check_loader(loader: Any) -> None:
    """Check that a loader's batches can be shared out.

    Raises:
        ConfigError: not a `DataLoader`, one that shares out its data already, or one without an order.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            _WHERE, f"a torch.utils.data.DataLoader is needed, not {type(loader).__name__}", "DataLoader(dataset, ...)"
        )
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                f"{_WHERE}: {type(sampler).__name__}",
                "it shares out the data among ranks already, and each of them would get a part of its part",
                "the loader of one process: shuffle=True, or a sampler that goes through all data; without set_epoch",
                "DataLoader(dataset, batch_size=<of all ranks>, shuffle=True)",
            )
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ConfigError(
            f"{_WHERE}: in_order=False", "batches would come in another order on every rank", "in_order=True"
        )


def global_batch_size(loader: DataLoader) -> int | None:
    """Samples in a full batch of `loader`; None if it does not say so (batches that the data makes itself)."""
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


# --- who reads what ----------------------------------------------------------------------------------------------


class IndexShare(Sampler[list[Any]]):
    """Draws batches of indices and yields this rank's part of each.

    `sizes` has the number of samples of each whole batch, for the pass over the data that was begun last.

    Args:
        batches: of all ranks, drawn with the random state of the first one.
        generators: those with which they are drawn.
        share: this rank's part.
        joined: how many consecutive ones are one batch of all ranks.
    """

    def __init__(
        self, batches: Iterable[list[Any]], generators: list[torch.Generator], share: Share, joined: int = 1
    ) -> None:
        self.batches, self.generators = batches, generators
        self.share, self.joined = share, joined
        self.sizes: deque[int] = deque()

    def __len__(self) -> int:
        # torch's samplers are iterables that may have a length: one without raises TypeError, as it should.
        return -(-len(self.batches) // self.joined)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        self.sizes = deque()
        return self._pass(self.sizes)

    def _pass(self, sizes: deque[int]) -> Iterator[list[Any]]:
        # This begins with the first batch that is asked for: after what the loader itself draws, as on one process.
        same = SameRandomness(self.generators)
        with same:
            batches = iter(self.batches)
        while True:
            with same:
                joined = list(itertools.islice(batches, self.joined))
            if not joined:
                return
            listed = [index for indices in joined for index in indices]
            sizes.append(len(listed))
            start, stop = self.share.taken(len(listed))
            yield listed[start:stop]


class _CollateShare:
    """Joins this rank's part of the samples of a batch.

    Gives (samples in the whole of it, what `collate` makes, what tells the first whole batch from another).
    """

    def __init__(self, collate: Callable[[Any], Any], share: Share) -> None:
        self.collate, self.share = collate, share
        self.is_first = True

    def __call__(self, samples: Any) -> tuple[int, Any, str | None]:
        start, stop = self.share.taken(len(samples))
        print_of_first = _fingerprint(samples) if self.is_first else None
        self.is_first = False
        return len(samples), self.collate(samples[start:stop]), print_of_first


def _fingerprint(data: Any) -> str:
    """Equal for equal tensors, arrays, numbers and texts, in lists, tuples or dicts; of others the type counts."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(data):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray):
            digest.update(f"{leaf.shape}{leaf.dtype}".encode() + np.ascontiguousarray(leaf).tobytes())
        else:
            digest.update((repr(leaf) if _is_plain(leaf) else type(leaf).__name__).encode())
    return digest.hexdigest()


def _refuse_other_data(first: Any) -> None:
    """Collective. Raise ConfigError on every rank if the first batches of a stream differ between ranks."""
    prints = [""] * dist.get_world_size()
    dist.all_gather_object(prints, _fingerprint(first))
    if len(set(prints)) > 1:
        raise ConfigError(
            _WHERE,
            "its dataset gives each rank other samples, so it shares them out itself; each rank would get a part of "
            "its part",
            "a dataset that gives every rank all samples; or, with lightning, loaders that are left alone",
            "Trainer(use_distributed_sampler=False)",
        )


def cut_batch(batch: Any, share: Share) -> tuple[int, Any]:
    """(samples, this rank's part) of a batch that is whole: its tensors are cut along their first dim.

    Dicts, lists, tuples, dataclasses and arrays are followed; tensors without dims, numbers and texts stay, and a list
    of them is cut if it has one for each sample.

    Raises:
        ConfigError: first dims differ, or there is something else in it.
    """
    sizes = {len(leaf) for leaf in _leaves(batch)}
    if len(sizes) != 1:
        listed_sizes = ", ".join(map(str, sorted(sizes))) or "none"
        raise ConfigError(
            _WHERE,
            "its batches can't be shared out among ranks: the first dims of their tensors, which count the samples, "
            f"should be one number, but are {listed_sizes}",
            "a loader with a batch size or a batch sampler, or tensors that all have samples as their first dim",
        )
    size = sizes.pop()
    start, stop = share.taken(size)

    def cut(item: Any) -> Any:
        if _has_samples(item):
            return item[start:stop]
        if _is_plain(item):
            return item
        if isinstance(item, Mapping):
            parts = {key: cut(value) for key, value in item.items()}
            if isinstance(item, dict | UserDict):  # the latter is what tokenizers of transformers make
                same_type = copy.copy(item)
                same_type.update(parts)
                return same_type
            return parts
        if isinstance(item, list | tuple) and hasattr(item, "_fields"):
            return type(item)(*(cut(value) for value in item))
        if isinstance(item, list | tuple):
            kept = item[start:stop] if len(item) == size and all(map(_is_plain, item)) else [cut(x) for x in item]
            return type(item)(kept)
        return dataclasses.replace(item, **{field.name: cut(getattr(item, field.name)) for field in _fields(item)})

    return size, cut(batch)


def _leaves(item: Any) -> Iterator[Any]:
    if _has_samples(item):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _leaves(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in _fields(item):
            yield from _leaves(getattr(item, field.name))
    elif not _is_plain(item):
        raise ConfigError(
            _WHERE,
            f"its batches hold a {type(item).__name__}, and how that is shared out among ranks is not known",
            "tensors, arrays, numbers and texts in dicts, lists, tuples or dataclasses; or a loader with a batch size "
            "or a batch sampler, whose collate_fn may make anything",
        )


def _fields(item: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(item)


def _has_samples(item: Any) -> bool:
    return isinstance(item, torch.Tensor | np.ndarray) and item.ndim > 0


def _is_plain(item: Any) -> bool:
    scalar = isinstance(item, torch.Tensor | np.ndarray) and item.ndim == 0
    return scalar or item is None or isinstance(item, str | bytes | int | float | complex | np.generic)


def _whole(batch_size: int | None) -> int:
    assert batch_size is not None, "a loader that joins samples has a batch size"
    return batch_size


def _has_own_batches(loader: DataLoader) -> bool:
    return loader.batch_sampler is not None


def _options(loader: DataLoader) -> dict[str, Any]:
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


# --- random numbers ----------------------------------------------------------------------------------------------


class SameRandomness:
    """Within it every rank draws what the first rank would. Made collectively; entered any number of times.

    What was drawn within it stays drawn for ranks whose own state was that of the first rank, as on one process;
    others go on with their own.

    Args:
        generators: of a loader, which get the state that they have on the first rank for good.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        _share_states(list(generators))
        states = [get_random_states() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(states, 0)
        assert states[0] is not None
        self._shared: list[Any] = states[0]
        self._own: list[Any] = []

    def __enter__(self) -> SameRandomness:
        self._own = get_random_states()
        self._follows = [equal_states(own, shared) for own, shared in zip(self._own, self._shared, strict=True)]
        set_random_states(self._shared)
        return self

    def __exit__(self, *_: Any) -> None:
        self._shared = get_random_states()
        after = zip(self._own, self._shared, self._follows, strict=True)
        set_random_states([shared if follows else own for own, shared, follows in after])


_ARRAY = "array of numpy"
_HOLD_ARRAYS = {np.ndarray, dict, list, tuple}


def get_random_states() -> list[Any]:
    """Of torch on the CPU, numpy and python: what draws orders and samples."""
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]


def set_random_states(states: list[Any]) -> None:
    """Put the states of `get_random_states` back."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def with_tensors(state: Any) -> Any:
    """`state` with tensors (of bytes) for the arrays of numpy in it: so it is plain data for torch."""
    if isinstance(state, np.ndarray) and state.dtype.kind in "biuf":
        content = torch.frombuffer(bytearray(state.tobytes()), dtype=torch.uint8) if state.size else torch.empty(0)
        return {_ARRAY: state.dtype.str, "shape": list(state.shape), "bytes": content}
    return _rebuilt(state, with_tensors)


def with_arrays(state: Any) -> Any:
    """What `with_tensors` was given."""
    if isinstance(state, dict) and _ARRAY in state:
        return np.frombuffer(state["bytes"].numpy().tobytes(), state[_ARRAY]).reshape(state["shape"]).copy()
    return _rebuilt(state, with_arrays)


def _rebuilt(state: Any, change: Callable[[Any], Any]) -> Any:
    if type(state) is dict:
        return {key: change(value) for key, value in state.items()}
    if type(state) in (list, tuple) and not _HOLD_ARRAYS.isdisjoint(map(type, state)):
        return type(state)(map(change, state))
    return state


def equal_states(one: Any, other: Any) -> bool:
    """Whether two states of one kind are the same."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, tuple) and any(isinstance(item, np.ndarray) for item in one):
        return all(equal_states(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    return bool(one == other)


def state_of(generator: Any) -> Any:
    """The state of a generator of torch, numpy or python as plain data; None if it is none of these."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    return None


def set_state(generator: Any, state: Any) -> None:
    """Put back what `state_of` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def samplers_of(loader: DataLoader) -> list[Any]:
    batches = loader.batch_sampler
    return [loader.sampler, batches, getattr(batches, "sampler", None)]


def generators_of(loader: DataLoader) -> list[torch.Generator]:
    """Those that the loader and its samplers hold, each once."""
    holders = [loader, *samplers_of(loader)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list({id(item): item for item in generators if isinstance(item, torch.Generator)}.values())


def _share_generators(loader: DataLoader) -> None:
    _share_states(generators_of(loader))


def _share_states(generators: list[torch.Generator]) -> None:
    if not generators:
        return
    states = [[generator.get_state() for generator in generators]]
    dist.broadcast_object_list(states, 0)
    for generator, state in zip(generators, states[0], strict=True):
        generator.set_state(state)
