"""Where ranks meet: one store that all of them reach, the job handed out over it, and the process group.

torch is imported inside the functions, so that a rank knows its place before it pays for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from autolaunch.job import ResolvedJob
from autolaunch.launch.place import Place, check_master_resolves
from autolaunch_strategies.config import ConfigError, ConfigErrors

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

FAREWELL_SECONDS = 10.0
"""How long the rank that hosts the store waits for the others to need it no more."""

LIFE_SECONDS = 5.0
"""How often rank 0 shows that it lives while the others wait for the job."""

SILENT_SECONDS = 15.0
"""After which a rank that still waits for rank 0 says so."""


class RankMissing(RuntimeError):
    """A rank did not come to where all of them meet."""


def connect(place: Place, timeout: float) -> Store:
    """The store that all ranks of this run share.

    In a local run rank 0 serves it, on the socket that the parent opened; under torchrun the agent does; else rank 0.

    Args:
        place: this rank.
        timeout: seconds to wait for rank 0, and later for every key.

    Raises:
        ConfigError: the host of rank 0 has no address here, or the port on rank 0, which was set, is taken.
        RankMissing: rank 0 did not answer in time; or the port that was derived from the job of Slurm is taken.
    """
    from torch.distributed import DistError, PrefixStore, TCPStore

    check_master_resolves(place)
    agent = place.kind == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = place.rank == 0 and not agent
    wait = timedelta(seconds=timeout)
    try:
        with _saying_what_is_waited_for(place, timeout):
            store = TCPStore(
                place.master_addr,
                place.master_port,
                is_master=host,
                timeout=wait,
                wait_for_workers=False,
                master_listen_fd=place.listen_fd,
            )
    except DistError as error:
        where = f"{place.master_addr}:{place.master_port}"
        if host:
            raise _cannot_listen(place, f"rank 0 cannot listen on {where}: {str(error).splitlines()[0]}") from error
        raise RankMissing(
            f"rank {place.rank} on {socket.gethostname()} got no answer from rank 0 at {where} within {timeout:g} s "
            "(launch.start_timeout)"
        ) from error
    # After a restart by torchrun the store still holds the keys of the attempt before.
    return PrefixStore(f"autolaunch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _cannot_listen(place: Place, problem: str) -> ConfigError | RankMissing:
    """A port that was set will be taken the next time, too; of one that was not, nobody is to blame."""
    if not os.environ.get("MASTER_PORT"):
        return RankMissing(
            f"{problem}\nthe next start of the job tries another port; export MASTER_PORT=<port> sets one"
        )
    return ConfigError(
        f"MASTER_PORT={place.master_port}",
        problem,
        "a free port of the node of rank 0",
        "export MASTER_PORT=<port>",
    )


@contextlib.contextmanager
def _saying_what_is_waited_for(place: Place, timeout: float) -> Iterator[None]:
    """Say it once, if it takes long: nobody waits ten minutes before a silent screen."""
    text = (
        f"rank {place.rank} on {socket.gethostname()} waits for rank 0 at {place.master_addr}:{place.master_port}, "
        f"{timeout:g} s at most (launch.start_timeout)"
    )
    timer = threading.Timer(SILENT_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def share_job(store: Store, place: Place, make_job: Callable[[], ResolvedJob], timeout: float = 600.0) -> ResolvedJob:
    """The one job of this run: rank 0 makes it, every other rank gets a copy.

    Args:
        store: what `connect` returned.
        place: this rank.
        make_job: composes the job; called on rank 0 only.
        timeout: seconds that rank 0 waits for every other rank to take it, and that they wait for one that is silent:
            it may take far longer to make it, if it waits for another run or downloads weights.

    Raises:
        RankMissing: on rank 0, when a rank did not come for the job in time; on the others, when rank 0 gave none.
        SystemExit: on the other ranks, when rank 0 could not make it; with the exit code of rank 0, which says why.
        BaseException: on rank 0, whatever `make_job` raised.
    """
    from torch.distributed import DistError

    if place.rank:
        try:
            message = json.loads(_await_job(store, place, timeout))
            store.set(f"job_taken/{place.rank}", "1")
        except DistError as error:
            raise RankMissing(f"rank {place.rank} got no job from rank 0: {str(error).splitlines()[0]}") from error
        if "exit_code" in message:
            raise SystemExit(message["exit_code"])
        return ResolvedJob.from_json(message["job"])
    try:
        with _showing_life(store, min(LIFE_SECONDS, timeout / 4)):
            job = make_job()
    except BaseException as error:
        store.set("job", json.dumps({"exit_code": exit_code_of(error)}))
        _missing(store, place.world_size, FAREWELL_SECONDS)
        raise
    store.set("job", json.dumps({"job": job.to_json()}))
    if missing := _missing(store, place.world_size, timeout):
        ranks = ", ".join(map(str, missing))
        raise RankMissing(
            f"rank{'s' if len(missing) > 1 else ''} {ranks} of {place.world_size} did not come within {timeout:g} s "
            "(launch.start_timeout)"
        )
    return job


@contextlib.contextmanager
def _showing_life(store: Store, seconds: float) -> Iterator[None]:
    """Count up in the store every `seconds`; over a connection of its own, as one can't be used by two threads."""
    done = threading.Event()
    own: Store = store.clone()  # type: ignore[attr-defined]  # torch: not in its stubs

    def count() -> None:
        with contextlib.suppress(Exception):  # the store is gone, and the main thread will see it
            while not done.wait(seconds):
                own.add("alive", 1)

    thread = threading.Thread(target=count, name="life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _await_job(store: Store, place: Place, timeout: float) -> bytes:
    """What rank 0 hands out, waited for as long as it lives.

    Raises:
        RankMissing: rank 0 was silent for `timeout` seconds.
        DistError: the store is gone.
    """
    from torch.distributed import DistStoreError

    alive = -1
    while (count := store.add("alive", 0)) != alive:
        alive = count
        with contextlib.suppress(DistStoreError):
            store.wait(["job"], timedelta(seconds=timeout))
            return store.get("job")
    raise RankMissing(
        f"rank {place.rank} got no job from rank 0, which was silent for {timeout:g} s (launch.start_timeout)"
    )


def _missing(store: Store, world_size: int, seconds: float) -> list[int]:
    """The ranks that did not take the job until `seconds` were over."""
    from torch.distributed import DistStoreError

    end = time.monotonic() + seconds
    missing = []
    for rank in range(1, world_size):
        try:
            # A wait of nothing at all is refused.
            store.wait([f"job_taken/{rank}"], timedelta(seconds=max(0.01, end - time.monotonic())))
        except DistStoreError:
            missing.append(rank)
    return missing


def exit_code_of(error: BaseException) -> int:
    """The exit code that a command which ends with `error` should have: 2 for a wrong config, 1 for a failure."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, (ConfigError, ConfigErrors)) else 1


def join(store: Store, place: Place, timeout: float, gpu: torch.device | None = None) -> None:
    """Join the process group of all ranks.

    Args:
        store: what `connect` returned.
        place: this rank.
        timeout: seconds after which a collective that a rank never joins is an error.
        gpu: of this rank. Groups then connect when they are made, split from this one, not each within the first
            collective or transfer of its own. None: it computes on the CPU.
    """
    import torch.distributed as dist

    from autolaunch_strategies.torch_private.gloo import complete_in_one_thread

    complete_in_one_thread()
    dist.init_process_group(
        "gloo" if gpu is None else "cpu:gloo,cuda:nccl",  # what checkpoints exchange goes through host memory
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=gpu,
    )


def leave_together(store: Store, place: Place) -> None:
    """Wait until the first rank has said how the run ended: srun and torchrun end all that outlive another rank."""
    from torch.distributed import DistError

    try:
        if place.rank:
            store.wait(["ended"], timedelta(seconds=FAREWELL_SECONDS))
        else:
            store.set("ended", "1")
    except DistError:
        pass  # the first rank is gone, and has said all it will
    leave_store(store, place)


def leave_store(store: Store, place: Place) -> None:
    """Say that this rank needs the store no more; the rank that may host it waits until nobody does."""
    from torch.distributed import DistError

    try:
        if place.rank:
            store.set(f"left/{place.rank}", "1")
        else:
            store.wait([f"left/{rank}" for rank in range(1, place.world_size)], timedelta(seconds=FAREWELL_SECONDS))
    except DistError:
        pass  # the task is done on every rank: who is gone by now needs nothing
