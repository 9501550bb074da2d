"""What a rank says that lost contact with another before it could know which one has gone."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from autolaunch.launch import contact
from autolaunch.launch.contact import in_contact
from autolaunch.launch.place import Place

LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:63660.")
LATER = 0.2
"""Seconds from the error on the main thread until the thread of the contact can see who has gone."""


def said_by(rank: int, directory: Path, error: Exception) -> list[str]:
    """What ends the run as a rank of two sees it that raises `error`, while the other one goes `LATER`."""
    store, said, raised = HashStore(), [], threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    if rank == 1:
        store.set("contact", json.dumps({"port": listener.getsockname()[1], "token": "this run"}))

    def other() -> None:
        if rank == 1:
            connection, _ = listener.accept()
        else:
            where = json.loads(store.get("contact"))
            connection = socket.create_connection(("127.0.0.1", where["port"]))
            connection.sendall(json.dumps({"token": where["token"], "rank": 1, "host": "node7"}).encode() + b"\n")
        with connection:
            raised.wait(10)
            time.sleep(LATER)

    thread = threading.Thread(target=other)
    thread.start()
    place = Place("torchrun", rank=rank, world_size=2)
    with listener, pytest.raises(type(error)), in_contact(store, place, directory, None, said.append, KeyError):
        time.sleep(LATER)  # until both are connected
        raised.set()
        raise error
    thread.join()
    return said


def test_a_rank_waits_to_see_that_rank_0_has_gone(tmp_path: Path) -> None:
    assert said_by(1, tmp_path, LOST) == ["rank 0 of 2 has gone, with the process or machine that it was"]


def test_rank_0_waits_to_see_which_rank_has_gone(tmp_path: Path) -> None:
    (reason,) = said_by(0, tmp_path, LOST)
    assert reason.startswith("rank 1 of 2 on node7 has gone without a word")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_its_own_waits_for_nobody(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "VERDICT_SECONDS", 60.0)
    begun = time.monotonic()
    assert said_by(rank, tmp_path, ValueError("its own")) == []
    assert time.monotonic() < begun + 30
