"""What a pretended rank hears from others: what was said by ranks that were pretended before it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from autolaunch_strategies.dry_run.forks import Caller
from autolaunch_strategies.pipeline import cut, structure
from autolaunch_strategies.pipeline.record import Recording, record
from autolaunch_strategies.pipeline.transfer import Channel, Header

Way = tuple[int, int]
"""From one place along pp to another."""


SAID, HEARS, RECORDED, RECORDS = "said", "hears", "recorded", "records"
"""What a rank says to who has it work: (way, number, header) that is new; which of them it needs, and whether it must
have it (the answer is a header, or None); a pickled key and recording; for which pickled key it needs a recording (the
answer is one, pickled, or None: it has to record it)."""


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

    def __init__(self, caller: Caller | None = None) -> None:
        self._headers: dict[Way, list[Header]] = {}
        """What was sent, in order."""
        self._recordings: dict[Any, Recording] = {}
        """What calls of the model look like, which is the same on every rank: each kind is recorded once."""
        self._caller = caller

    def heard_from(self, caller: Caller) -> World:
        """The same world for a rank that somebody else works on, who tells it more, and is told of what is new."""
        world = World(caller)
        world._headers = {way: list(headers) for way, headers in self._headers.items()}
        world._recordings = dict(self._recordings)
        return world

    def add(self, way: Way, place: int, header: Header) -> bool:
        """Keep what was said as number `place` on a way. False if that was known."""
        said = self._headers.setdefault(way, [])
        assert place <= len(said), "a rank knows what was said before"
        if place == len(said):
            said.append(header)
            return True
        return False

    def header(self, way: Way, place: int, must: bool = False) -> Header | None:
        """What was said as number `place` on a way; None if it is not known, and will not be.

        Args:
            must: whether the rank can't go on without.
        """
        said = self._headers.setdefault(way, [])
        if place == len(said) and self._caller is not None:
            answer = self._caller.ask((HEARS, (way, place, must)))
            if answer is not None:
                said.append(answer)
        return said[place] if place < len(said) else None

    def know(self, key: Any, recording: Recording) -> None:
        """Keep what a call of the model looks like."""
        self._recordings.setdefault(key, recording)

    def recording(self, key: Any) -> Recording | None:
        """What a call of the model looks like; None if it is not known."""
        return self._recordings.get(key)

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
                if self._caller is not None:
                    self._caller.tell((SAID, (way, place, header)))
                if way == until:
                    raise Said

        def knows_header(channel: Channel, key: Any, source: int) -> bool:
            way = (source, channel.group.rank())
            known = channel._received_headers.get(source, {})
            return key in known or self.header(way, read.get(way, 0)) is not None

        def receive_header(channel: Channel, key: Any, source: int) -> Header:
            known = channel._received_headers.setdefault(source, {})
            if key not in known:
                way = (source, channel.group.rank())
                place = read.get(way, 0)
                header = self.header(way, place, must=True)
                if header is None:
                    raise NotSaidYet(way)
                read[way], known[key] = place + 1, header
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
            self._recordings[key] = self._asked(key) or record(model, units, args, kwargs, origin)
            self._tell(key)
        return self._recordings[key]

    def _asked(self, key: Any) -> Recording | None:
        """What another rank records or has recorded; None if this one is to."""
        with suppress(Exception):  # a key may hold objects of a model that can't be sent
            answer = None if self._caller is None else self._caller.ask((RECORDS, pickle.dumps(key)))
            return None if answer is None else unpickled(answer)
        return None

    def _tell(self, key: Any) -> None:
        """Let others have what was recorded, if that can be sent: else they find out by themselves."""
        if self._caller is None:
            return
        with suppress(Exception):
            self._caller.tell((RECORDED, pickle.dumps((key, self._recordings[key]))))


def unpickled(data: bytes) -> Any:
    """What another process of this program has pickled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, as it unpickles a tree
        return pickle.loads(data)


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
