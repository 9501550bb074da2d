"""The order in which a sampler goes through the data, drawn again by another process."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.loader import (
    get_random_states,
    set_random_states,
    set_state,
    state_of,
    with_arrays,
    with_tensors,
)

log = logging.getLogger(__name__)

_MOST_SAMPLERS = 100


class Order(Sampler[Any]):
    """Yields what `sampler` yields, and knows how its pass began and what it has yielded.

    So another process with a sampler that was made alike goes on anywhere in the pass: it puts the random states and
    what changes in the sampler to what they were when the pass began, and draws what was handed out once more, without
    loading it. A hash of what was drawn says whether it is the same.

    Every attribute that is not named here is that of `sampler`.

    Args:
        sampler: of indices or of batches of them. With `state_dict` and `load_state_dict` it says itself what changes
            in it; of others generators, numbers, texts and lists of numbers are kept where they have changed.
    """

    def __init__(self, sampler: Any) -> None:
        self.inner = sampler
        self._made = _contents(sampler)
        self._pristine: dict[str, Any] | None = None
        self._to_resume: Mapping[str, Any] | None = None
        self.is_silent = False
        """Whether passes that begin now have nothing in them, and leave the sampler alone."""
        self.forget()

    def forget(self) -> None:
        """A new pass is about to begin."""
        self._begin: dict[str, Any] | None = None
        self._read, self._has_ended = 0, False
        self._digest = self._digest_handed_out = ""
        self._digests: deque[str] = deque()
        self._handed_out = 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def handed_out(self, count: int) -> None:
        """`count` more of what was yielded have been handed out by the loader, which may read ahead."""
        for _ in range(min(count, len(self._digests))):
            self._digest_handed_out = self._digests.popleft()
            self._handed_out += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain data, the same on every rank if the sampler draws the same there.

        ``handed_out`` and ``read`` count what the sampler yielded, ``begin`` is None before the pass has begun.
        """
        return {
            "handed_out": self._handed_out,
            "digest": self._digest_handed_out,
            "read": self._read,
            "digest_read": self._digest,
            "has_ended": self._has_ended,
            "begin": self._begin,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on behind what was handed out."""
        self._to_resume = state

    def can_resume(self, state: Mapping[str, Any]) -> bool:
        """Whether the sampler draws what was handed out once more. Leaves all as it is."""
        if state["begin"] is None:
            return True
        outside = get_random_states()
        _, digest = self._redrawn(state["begin"], state["handed_out"])
        assert self._pristine is not None
        self._restore(self._pristine)
        set_random_states(outside)
        return bool(digest == state["digest"])

    def resume_behind(self, state: Mapping[str, Any]) -> None:
        """Leave the sampler as that pass left it; one that is another now, as such a pass would, with a warning."""
        self.forget()
        if state["begin"] is None:
            return
        outside = get_random_states()
        rest, digest = self._redrawn(state["begin"], state["read"])
        if state["has_ended"]:
            next(rest, None)  # what it does at its end is done
        if digest != state["digest_read"]:
            log.warning(
                "train_dataloader: %s draws other samples than in the epoch before the checkpoint: the order of those "
                "that follow may be another than without the interruption",
                _name_of(self.inner),
            )
        set_random_states(outside)

    def resume_at(self, handed_out: int) -> bool:
        """The next pass goes on behind so many; False if where that is depends on what was drawn."""
        if not _draws_nothing(self.inner):
            return False
        self._to_resume = {"handed_out": handed_out, "begin": {}, "digest": None}
        return True

    def __iter__(self) -> Iterator[Any]:
        if self.is_silent:
            return
        state, self._to_resume = self._to_resume, None
        self.forget()
        rest = None if state is None or state["begin"] is None else self._resumed(state)
        if rest is None:
            self._begin = with_tensors({"random": get_random_states(), "sampler": self._changes()})
            rest = iter(self.inner)
        for indices in rest:
            yield self._noted(indices)
        self._has_ended = True

    def _noted(self, indices: Any) -> Any:
        self._read += 1
        self._digest = _next_digest(self._digest, indices)
        self._digests.append(self._digest)
        return indices

    def _resumed(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """What is left of a pass."""
        count = state["handed_out"]
        outside = get_random_states()
        rest, digest = self._redrawn(state["begin"], count)
        if state["digest"] is not None and state["digest"] != digest:
            self._refuse()
        first = [] if count else list(itertools.islice(rest, 1))  # drawn when it began
        set_random_states(outside)
        self._begin, self._read, self._handed_out = state["begin"], count, count
        self._digest = self._digest_handed_out = state["digest"] or ""
        return itertools.chain(first, rest)

    def _redrawn(self, begin: Mapping[str, Any], count: int) -> tuple[Iterator[Any], str]:
        """(what follows the first `count` of a pass that began so, digest of those). Leaves random states as then."""
        if self._pristine is None:
            self._pristine = {name: copy.deepcopy(content) for name, (content, _) in _contents(self.inner).items()}
        else:  # what is resumed once more begins as it did
            self._restore(self._pristine)
        if begin:
            states = with_arrays(begin)
            set_random_states(states["random"])
            self._restore(states["sampler"])
        rest, drawn = iter(self.inner), ""
        for _ in range(count):
            drawn = _next_digest(drawn, next(rest, "nothing"))
        return rest, drawn

    def _refuse(self) -> None:
        """The sampler draws something else than it did."""
        raise ConfigError(
            "train_dataloader",
            f"{_name_of(self.inner)} draws other samples than before the checkpoint, so its pass can't be gone on "
            "with where it stopped: the data, the batch size or the sampler changed, or it draws from something "
            "that is not known",
            "the data and the sampler of the run that saved; a sampler with a generator of its own, or with "
            "state_dict and load_state_dict; or to begin the data again",
            "checkpoint.data_position=start_over, in a script MeshStrategy(data_position='start_over')",
        )

    # --- what changes in samplers -----------------------------------------------------------------------------------

    def _changes(self) -> dict[str, Any]:
        """Name of a part or an attribute -> its state, of what draws and of what is another than when it was made."""
        contents = _contents(self.inner)
        return {
            name: copy.deepcopy(content)
            for name, (content, mark) in contents.items()
            if mark is None or name not in self._made or self._made[name][1] != mark
        }

    def _restore(self, changes: Mapping[str, Any]) -> None:
        places = _places(self.inner)
        for name, content in changes.items():
            if name not in places:
                continue  # another sampler: what it draws will tell
            holder, attribute = places[name]
            if attribute is None:
                holder.load_state_dict(content)
            else:
                _put(holder, attribute, content)


def _draws_nothing(sampler: Any) -> bool:
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) is SequentialSampler


def _name_of(sampler: Any) -> str:
    inner = getattr(sampler, "sampler", None)
    return type(inner if type(sampler) is BatchSampler else sampler).__name__


def _next_digest(digest: str, indices: Any) -> str:
    listed = indices.tolist() if isinstance(indices, torch.Tensor | np.ndarray) else indices
    return hashlib.blake2b(f"{digest} {listed!r}".encode(), digest_size=12).hexdigest()


def _places(sampler: Any) -> dict[str, tuple[Any, str | None]]:
    """Name -> (holder, its attribute); no attribute where the holder says its state itself."""
    places: dict[str, tuple[Any, str | None]] = {}
    waiting: deque[tuple[str, Any]] = deque([("", sampler)])
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_SAMPLERS:
        path, holder = waiting.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if has_state(holder):
            places[path or "."] = (holder, None)
            continue
        for attribute, value in getattr(holder, "__dict__", {}).items():
            name = f"{path}.{attribute}" if path else attribute
            waiting.extend(_samplers_in(name, attribute, value))
            if attribute not in ("data_source", "dataset"):
                places[name] = (holder, attribute)
    return places


def _samplers_in(name: str, attribute: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(f"{name}.{i}", item) for i, item in enumerate(value[:_MOST_SAMPLERS]) if isinstance(item, Sampler)]
    if isinstance(value, dict):
        return [(f"{name}.{key}", item) for key, item in value.items() if isinstance(item, Sampler)]
    return [(name, value)] if isinstance(value, Sampler) or attribute.endswith("sampler") else []


def _contents(sampler: Any) -> dict[str, tuple[Any, str | None]]:
    """Name -> (state as plain data, what tells it from another; None of what draws, which is always kept)."""
    contents: dict[str, tuple[Any, str | None]] = {}
    for name, (holder, attribute) in _places(sampler).items():
        if attribute is None:
            contents[name] = holder.state_dict(), None
            continue
        value = getattr(holder, attribute)
        state = state_of(value)
        if state is not None:
            contents[name] = state, None
        elif value is None or isinstance(value, bool | int | float | str):
            contents[name] = value, repr(value)
        elif not isinstance(holder, DistributedSampler) and _is_of_numbers(value):
            contents[name] = value, hashlib.blake2b(pickle.dumps(value), digest_size=12).hexdigest()
    return contents


def _is_of_numbers(value: Any) -> bool:
    """Whether it is an array, or a list, set, or dict that begins with a number, or with one that does."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iufb"
    if isinstance(value, dict):
        value = list(value.values())[:1]
    if isinstance(value, list | tuple | set | deque):
        first = next(iter(value), 0)
        return isinstance(first, int | float | np.number) or _is_of_numbers(first)
    return False


def _put(holder: Any, attribute: str, content: Any) -> None:
    value = getattr(holder, attribute, None)
    if state_of(value) is not None:
        set_state(value, content)
    elif type(value) is list and type(content) is list:
        value[:] = content  # something else may hold it, too
    else:
        setattr(holder, attribute, content)


def has_state(item: Any) -> bool:
    """Whether it follows the protocol of torch for what can be saved in the middle of something."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
