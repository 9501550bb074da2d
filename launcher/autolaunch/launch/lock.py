"""One directory, one run: a lock in the output directory that the kernel drops when its holder is gone.

The lock is `flock` on `<directory>/.lock`; what is written in that file only tells others who holds it. Where the file
system has no locks, it is what decides: a holder of this host is looked up among its processes; one of another host is
believed to be alive, unless it was an earlier start of the same job of Slurm, which ends one before it begins the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from autolaunch_strategies.config import ConfigError

LOCK_FILE = ".lock"
POLL_SECONDS = 0.5

HANDOVER_SECONDS = 120.0
"""How long a start of a job waits for the one before it: a file server keeps the locks of a lost machine a while."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What `flock` says where the file system has none."""


@dataclass(eq=False)
class Lock:
    """A lock that this process holds."""

    directory: Path
    descriptor: int


_held: list[Lock] = []
"""The locks of this process."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    pid: int
    host: str
    started: float
    """When it took the lock; seconds since 1970."""
    process: str = ""
    """What tells it from a later process of the same number: boot of the machine, and start time since."""
    slurm_job: str = ""
    """The job of Slurm that it belongs to."""

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether it certainly runs no more; of another machine's processes next to nothing is certain."""
        if self.is_here:
            return _identity(self.pid) != self.process
        return self.slurm_job != "" and self.slurm_job == _slurm_job()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} on {self.host}, since {since}"


@contextlib.contextmanager
def locked(directory: Path, name: str, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock of a directory, which has to exist; until the end of the `with` block, or `hand_over`.

    Args:
        name: how the directory is called in a message, as `key=value`.
        wait: seconds to wait for whoever holds it, instead of an error.

    Raises:
        ConfigError: another run holds it, or nothing can be written there.
    """
    lock = take(directory, name, wait=wait)
    try:
        yield
    finally:
        release(lock)


def take(directory: Path, name: str, *, wait: float = 0.0) -> Lock:
    """Take the lock as `locked` does; returns what `release` takes. It is dropped when this process ends."""
    path = directory / LOCK_FILE
    told, end = False, time.monotonic() + wait
    while (descriptor := _try(path, name, directory)) is None:
        holder = _holder(path)
        if time.monotonic() >= end:
            raise _in_use(name, path, holder)
        if not told:
            print(f"{name}: waiting for {holder or 'the run that holds it'}", file=sys.stderr, flush=True)
            told = True
        time.sleep(POLL_SECONDS)
    _held.append(Lock(directory, descriptor))
    return _held[-1]


def hand_over(directory: Path) -> None:
    """Let another process have the lock of a directory, if this one holds it: what was begun here goes on there."""
    for lock in [item for item in _held if item.directory == directory]:
        release(lock)


def release(lock: Lock) -> None:
    """Let others have a lock, if it is still held. The file stays: one that is removed could be locked by two."""
    if lock not in _held:
        return
    _held.remove(lock)
    with contextlib.suppress(OSError):  # the file system may be full, or gone
        os.ftruncate(lock.descriptor, 0)
    os.close(lock.descriptor)


def _try(path: Path, name: str, directory: Path) -> int | None:
    """A descriptor that holds the lock; None if another process does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _not_writable(name, directory, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            by_kernel = True
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            by_kernel = False
        if not _is_still(path, descriptor):  # its directory was deleted meanwhile
            os.close(descriptor)
            return _try(path, name, directory)
        before = _holder(path)
        if before is not None and not by_kernel and not before.is_gone:
            os.close(descriptor)
            return None
        if before is not None and not before.is_here:
            print(f"{name}: taken over from {before}, which left it locked and holds it no more", file=sys.stderr)
        me = Holder(os.getpid(), socket.gethostname(), time.time(), _identity(os.getpid()), _slurm_job())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(me)).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise _not_writable(name, directory, error) from None
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether a file that was opened is the one that others open now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _slurm_job() -> str:
    return os.environ.get("SLURM_JOB_ID", "")


def _holder(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # it is being written, or was when the machine went down
        return None


def _identity(pid: int) -> str:
    """Boot and start time of a process; empty if there is none of this number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name of the program, in parentheses, may hold spaces.
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
    return f"{boot} {ticks}"


def _in_use(name: str, path: Path, holder: Holder | None) -> ConfigError:
    if holder is None:
        return ConfigError(
            name,
            "another run is in this directory",
            "a directory of its own, or launch.wait=true, which starts when that run has ended",
            "launch.wait=true",
        )
    unseen = "" if holder.is_here else "; whether it still runs can't be seen from here"
    return ConfigError(
        name,
        f"another run is in this directory: {holder}{unseen}",
        "a directory of its own, or launch.wait=true, which starts when that run has ended"
        + ("" if holder.is_here else f"; if it is dead, remove {path}"),
        "launch.wait=true",
    )


def _not_writable(name: str, directory: Path, error: OSError) -> ConfigError:
    return ConfigError(name, f"nothing can be written there: {error.strerror}", "a directory that can be written")


def _forget_in_child() -> None:
    # A fork shares the lock, and may live longer than this process.
    for lock in _held:
        os.close(lock.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
