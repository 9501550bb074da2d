"""Ranks that torchrun or srun has started keep in contact, as no parent of ours watches them.

Every rank holds a connection to rank 0, on a thread of its own. The kernel closes that of a process that dies, so all
others know within seconds; over the living ones ranks say what they do, and rank 0 asks for stacks when none moves any
more. Whoever learns that the run can't go on tells the others, and every rank ends: a rank that waits in a collective
would wait for its timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autolaunch.launch.end import STACK_SIGNAL
from autolaunch.launch.failure import VERDICT_SECONDS, is_peer_lost
from autolaunch.launch.heartbeat import PULSE, Activity, Beat, Limits, Moves, Standing, find_hang, interval
from autolaunch.launch.phase import stack_file
from autolaunch.launch.place import Place
from autolaunch.launch.stacks import Stack

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_SECONDS = 3.0
"""How long a rank may take to end by its own error, which says more, once the run can't go on."""

CONNECT_SECONDS = 20.0
ANSWER_SECONDS = 10.0
"""How long a rank may take to send its stack."""

BEATS_PER_SECOND = 200
"""That rank 0 hears at most, whatever the number of ranks."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def in_contact(
    store: Store,
    place: Place,
    logs: Path,
    limits: Limits | None,
    end: Callable[[str], None],
    together: type[BaseException],
) -> Iterator[None]:
    """Be in contact with the other ranks while this lasts. Every rank of the run enters it.

    Args:
        store: what `rendezvous.connect` returned.
        place: this rank.
        logs: where its stack is written.
        limits: how long ranks may stand still; None: for ever, only those that die are missed.
        end: called with the reason, on a thread, when the run can't go on; ends this process.
        together: an exception that all ranks raise at the same time, so that nobody has to be told.
    """
    seconds = max(interval(limits.hang_timeout) if limits else 5.0, place.world_size / BEATS_PER_SECOND)
    if place.rank == 0:
        with socket.create_server(("", 0), backlog=1024) as listener:
            token = uuid.uuid4().hex
            store.set("contact", json.dumps({"port": listener.getsockname()[1], "token": token}))
            hub = _Hub(place, logs, limits, seconds, end, listener, token)
            yield from _running(hub, together)
        return
    where = json.loads(store.get("contact"))
    try:
        connection = socket.create_connection((place.master_addr, where["port"]), CONNECT_SECONDS)
    except OSError as error:
        _log.warning(
            "rank %d can't reach %s:%d (%s): if it hangs, the others notice by the timeout of their collectives",
            place.rank, place.master_addr, where["port"], error,
        )  # fmt: skip
        yield
        return
    with connection:
        spoke = _Spoke(place, logs, limits, seconds, end, _Line(connection, place.rank))
        spoke.line.send({"token": where["token"], "rank": place.rank, "host": socket.gethostname()})
        yield from _running(spoke, together)


def _running(side: _Hub | _Spoke, together: type[BaseException]) -> Iterator[None]:
    thread = threading.Thread(target=side.run, name="contact", daemon=True)
    thread.start()
    try:
        yield
    except together:
        side.leave()
        raise
    except BaseException as error:
        try:
            if is_peer_lost(error):
                thread.join(VERDICT_SECONDS)  # it may be about to see which rank has gone
        finally:
            side.failed()
        raise
    side.leave()
    thread.join(5.0)


class _Line:
    """A connection on which both sides send JSON values, one a line."""

    def __init__(self, connection: socket.socket, rank: int = -1) -> None:
        self.connection, self.rank, self.host = connection, rank, ""
        self.said_goodbye = False
        self._received = b""
        self._sending = threading.Lock()
        _notice_dead_machines(connection)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that can't be sent is no error: the end of the connection will be seen."""
        with self._sending, contextlib.suppress(OSError):
            self.connection.settimeout(5.0)
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come, when something has; None if the other side is gone."""
        try:
            text = self.connection.recv(65536)
        except OSError:
            return None
        if not text:
            return None
        *whole, self._received = (self._received + text).split(b"\n")
        return [json.loads(line) for line in whole]


def _notice_dead_machines(connection: socket.socket) -> None:
    """Let the kernel ask a silent other side whether it is there, so that a machine without power is missed, too."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Side:
    """What both sides know."""

    place: Place
    logs: Path
    limits: Limits | None
    seconds: float
    """Between two words."""
    end: Callable[[str], None]

    def own_stack(self) -> str:
        """What this process does, by the signal that a parent would send."""
        main = threading.main_thread().ident
        file = stack_file(self.logs, self.place.rank)
        assert main is not None
        with contextlib.suppress(OSError):
            os.truncate(file, 0)
            signal.pthread_kill(main, STACK_SIGNAL)
            time.sleep(0.2)
            return file.read_text(errors="replace")
        return ""


class _Spoke(_Side):
    """The side of every rank but the first."""

    def __init__(
        self, place: Place, logs: Path, limits: Limits | None, seconds: float, end: Callable[[str], None], line: _Line
    ) -> None:
        super().__init__(place, logs, limits, seconds, end)
        self.line = line
        self._leaving = False

    def run(self) -> None:
        """Say what this rank does, and answer rank 0; on a thread."""
        selector = selectors.DefaultSelector()
        selector.register(self.line.connection, selectors.EVENT_READ)
        heard = moved = time.monotonic()
        last = PULSE.beat
        while not self._leaving:
            if selector.select(self.seconds):
                messages = self.line.receive()
                if messages is None:
                    if not self.line.said_goodbye and not self._leaving:
                        self.end(f"rank 0 of {self.place.world_size} has gone, with the process or machine that it was")
                    return
                heard = time.monotonic()
                for message in messages:
                    self._answer(message)
            now = time.monotonic()
            if PULSE.beat != last:
                last, moved = PULSE.beat, now
            self.line.send({"beat": list(last)})
            if self.limits and min(now - heard, now - moved) > self.limits.hang_timeout + ANSWER_SECONDS:
                self.end(
                    f"rank 0 of {self.place.world_size} has not moved for {now - heard:.0f} s (launch.hang_timeout): "
                    "it does not answer, its process is stopped or its machine is stuck"
                )
                return

    def _answer(self, message: dict[str, Any]) -> None:
        if "stack" in message:
            self.line.send({"stack": self.own_stack(), "beat": list(PULSE.beat)})
        elif "end" in message:
            self.end("")  # rank 0 has said why
        elif "goodbye" in message:
            self.line.said_goodbye = True

    def failed(self) -> None:
        """Tell rank 0 that this rank ends by an error, of which it tells itself."""
        self._leaving = True
        self.line.send({"failed": True})

    def leave(self) -> None:
        """This rank needs nobody any more."""
        self._leaving = True
        self.line.send({"goodbye": True})


class _Hub(_Side):
    """The side of rank 0, which watches all."""

    def __init__(
        self,
        place: Place,
        logs: Path,
        limits: Limits | None,
        seconds: float,
        end: Callable[[str], None],
        listener: socket.socket,
        token: str,
    ) -> None:
        super().__init__(place, logs, limits, seconds, end)
        self.listener, self.token = listener, token
        self.lines: dict[int, _Line] = {}
        self.moves = Moves(place.world_size, time.monotonic())
        self._selector = selectors.DefaultSelector()
        self._leaving = False
        self._over = False
        self._stacks: dict[int, str] = {}
        self._asked: float | None = None
        self._next_question = 0.0

    def run(self) -> None:
        """Listen to all ranks and judge; on a thread."""
        self._selector.register(self.listener, selectors.EVENT_READ, None)
        next_tick = 0.0
        while not self._leaving and not self._over:
            for key, _ in self._selector.select(self.seconds):
                if key.data is None:
                    self._welcome()
                else:
                    self._listen(key.data)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + self.seconds
                self.moves.hear(0, PULSE.beat, now)
                self._tell({"tick": True})
                self._judge(now)

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, _Line(connection))

    def _listen(self, line: _Line) -> None:
        messages = line.receive()
        if messages is None:
            self._forget(line)
            if line.rank in self.lines and not line.said_goodbye and not self._leaving:
                self._stop(
                    f"rank {line.rank} of {self.place.world_size} on {line.host} has gone without a word: its process "
                    "was killed (out of memory?), or its machine is lost"
                )
            return
        for message in messages:
            if line.rank == -1:
                if message.get("token") != self.token:
                    self._forget(line)  # somebody else
                    return
                line.rank, line.host = message["rank"], message["host"]
                self.lines[line.rank] = line
            self._take(line, message)

    def _take(self, line: _Line, message: dict[str, Any]) -> None:
        if "beat" in message:
            moves, activity, step, longest = message["beat"]
            self.moves.hear(line.rank, Beat(moves, Activity(activity), step, longest), time.monotonic())
        if "stack" in message:
            self._stacks[line.rank] = message["stack"]
        if "goodbye" in message:
            line.said_goodbye = True
        if "failed" in message:
            line.said_goodbye = True
            self._stop("")  # it says itself why

    def _forget(self, line: _Line) -> None:
        self._selector.unregister(line.connection)
        line.connection.close()

    def _judge(self, now: float) -> None:
        if self.limits is None or now < self._next_question:
            return
        still = self.moves.still(now)
        if still <= self.limits.hang_timeout:
            self._asked = None
            return
        if self._asked is None:
            self._asked, self._stacks = now, {}
            self._tell({"stack": True})
            self._stacks[0] = self.own_stack()
            return
        if len(self._stacks) < 1 + len(self.lines) and now < self._asked + ANSWER_SECONDS:
            return
        self._asked, self._next_question = None, now + self.limits.hang_timeout / 4
        watched = [0, *(rank for rank, line in sorted(self.lines.items()) if not line.said_goodbye)]
        standings = {}
        for rank in watched:
            text = self._stacks.get(rank)
            standings[rank] = Standing(self.moves.beats[rank], Stack(text) if text else None)
        if (hang := find_hang(standings, still, self.limits)) is not None:
            self._stop(hang.render())

    def _stop(self, reason: str) -> None:
        self._over = True
        self._tell({"end": True})
        self.end(reason)

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self.lines.values():
            if not line.said_goodbye:
                line.send(message)

    def failed(self) -> None:
        """Tell the others that rank 0 ends by an error, of which it tells itself."""
        self._leaving = True
        self._tell({"end": True})

    def leave(self) -> None:
        """Rank 0 needs nobody any more."""
        self._leaving = True
        self._tell({"goodbye": True})


def end_process(place: Place, reason: str) -> None:
    """End this rank, because the run can't go on; say why, if there is something to say and nobody has said it.

    Returns never, but lets an error of the main thread go first.
    """
    if reason and place.rank in (0, 1):
        print(reason, file=sys.stderr, flush=True)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
