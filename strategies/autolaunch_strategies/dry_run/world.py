"""What a pretended rank hears from others: what was said by ranks that were pretended before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from autolaunch_strategies.pipeline import cut, structure
from autolaunch_strategies.pipeline.record import Recording, record
from autolaunch_strategies.pipeline.transfer import Channel, Header

Way = tuple[int, int]
"""From one place along pp to another."""


class NotSaidYet(BaseException):
    """A rank waits for what another one has not said so far, which has to be pretended first.

    No Exception: user code must not catch it.
    """

    def __init__(self, way: Way) -> None:
        super().__init__(f"nothing was said on the way {way}")
        self.way = way


class Said(BaseException):
    """A rank has said what somebody waited for."""


class World:
    """What ranks have told each other about shapes; values are never told.

    Ranks at other places of the axes beside pp say the same to their own neighbours, so one is heard by all.
    """

    def __init__(self) -> None:
        self._headers: dict[Way, list[Header]] = {}
        """What was sent, in order."""
        self._recordings: dict[Any, Recording] = {}
        """What calls of the model look like, which is the same on every rank: each kind is recorded once."""
        self._tell_said: Callable[[Way, int, Header], None] = lambda *_: None
        self._tell_recorded: Callable[[Any, Recording], None] = lambda *_: None

    def heard_from(self, said: Callable[[Way, int, Header], None], recorded: Callable[[Any, Recording], None]) -> World:
        """The same world for a rank of which another process is told.

        Args:
            said: is called with what `add` takes.
            recorded: is called with what `know` takes.
        """
        world = World()
        world._headers = {way: list(headers) for way, headers in self._headers.items()}
        world._recordings = dict(self._recordings)
        world._tell_said, world._tell_recorded = said, recorded
        return world

    def add(self, way: Way, place: int, header: Header) -> bool:
        """Keep what was said as number `place` on a way. False if that was known."""
        said = self._headers.setdefault(way, [])
        assert place <= len(said), "a rank knows what was said before"
        if place == len(said):
            said.append(header)
            return True
        return False

    def know(self, key: Any, recording: Recording) -> None:
        """Keep what a call of the model looks like."""
        self._recordings.setdefault(key, recording)

    def has_heard(self, way: Way) -> bool:
        """Whether anything was said on it."""
        return self.count(way) > 0

    def count(self, way: Way) -> int:
        """How much was said on it."""
        return len(self._headers.get(way, []))

    @contextmanager
    def heard_by_a_rank(self, until: Way | None = None) -> Iterator[None]:
        """Within it objects that ranks exchange are answered from what is known, without tensors.

        What was said to a rank it knows from the start, as in any step but a first one.

        Args:
            until: raise `Said` once the rank has said something new on it.
        """
        read: dict[Way, int] = {}
        sent: dict[Way, int] = {}

        def send_header(channel: Channel, key: Any, header: Header, to: int) -> None:
            known = channel._sent_headers.setdefault(to, {})
            if key in known:
                return
            known[key] = header
            way = (channel.group.rank(), to)
            place = sent.get(way, 0)
            sent[way] = place + 1
            if self.add(way, place, header):
                self._tell_said(way, place, header)
                if way == until:
                    raise Said

        def knows_header(channel: Channel, key: Any, source: int) -> bool:
            way = (source, channel.group.rank())
            known = channel._received_headers.get(source, {})
            return key in known or read.get(way, 0) < len(self._headers.get(way, []))

        def receive_header(channel: Channel, key: Any, source: int) -> Header:
            known = channel._received_headers.setdefault(source, {})
            if key not in known:
                way = (source, channel.group.rank())
                place, said = read.get(way, 0), self._headers.get(way, [])
                if place == len(said):
                    raise NotSaidYet(way)
                read[way], known[key] = place + 1, said[place]
            return known[key]

        start_sending = dist.isend

        def isend(*args: Any, **kwargs: Any) -> _Sent:
            start_sending(*args, **kwargs)
            return _Sent()

        with ExitStack() as stack:
            for owner, name, instead in (
                (Channel, "send_header", send_header),
                (Channel, "knows_header", knows_header),
                (Channel, "receive_header", receive_header),
                (dist, "isend", isend),
                (dist, "broadcast_object_list", lambda *_, **__: None),
                (dist, "all_gather_object", _alike),
                (torch, "equal", lambda one, other: one.shape == other.shape),
                (cut, "record", self._recorded),
                (structure, "record", self._recorded),
            ):
                stack.enter_context(_replaced(owner, name, instead))
            yield

    def _recorded(
        self, model: nn.Module, units: Sequence[str], args: Any, kwargs: Mapping[str, Any], origin: str = ""
    ) -> Recording:
        """As `record.record`."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        kinds = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        key = tuple(units), model.training, torch.is_grad_enabled(), origin, spec, tuple(kinds)
        if key not in self._recordings:
            self._recordings[key] = record(model, units, args, kwargs, origin)
            self._tell_recorded(key, self._recordings[key])
        return self._recordings[key]


class PretendedExchange:
    """What the last stage says of a batch, as `pipeline.batch.Exchange`: one number, broadcast."""

    def __init__(self, group: dist.ProcessGroup, last: int) -> None:
        self._group, self._last = group, last

    def share(self, extra: Mapping[str, torch.Tensor | int]) -> dict[str, Any]:
        loss = torch.zeros((), dtype=torch.float64)
        dist.broadcast(loss, group=self._group, group_src=self._last)
        return {"loss": loss, "drew": 0}

    def fail(self, error: Exception, where: str) -> None:
        """Nobody waits."""


class _Sent:
    """A message that its receiver has taken: what was sent is held no longer."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def _alike(gathered: list[Any], item: Any, group: Any = None) -> None:
    gathered[:] = [item] * len(gathered)


@contextmanager
def _replaced(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, before)
