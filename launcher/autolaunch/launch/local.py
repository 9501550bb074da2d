"""A run on this machine: one process per rank, started, watched and ended by this one.

torch has a launcher, but importing it costs more than a second before the first worker starts, and it shows the failure
that it notices first rather than the one that came first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import autolaunch
import autolaunch_strategies
from autolaunch.config.search import is_trial
from autolaunch.job import ResolvedJob
from autolaunch.launch.end import PREEMPTED, STACK_SIGNAL, STOP_SIGNAL, RunEnd, Stop, read_stop
from autolaunch.launch.failure import VERDICT_SECONDS, Exit, Failure, failure_file, first_failure, log_file, tail
from autolaunch.launch.heartbeat import Board, Hang, Moves, Standing, find_hang, interval, limits_of, where_ranks_are
from autolaunch.launch.phase import Phase, forget_reports, read_phase, stack_file
from autolaunch.launch.place import Place
from autolaunch.launch.resources import raise_file_limit
from autolaunch.launch.signals import Signals
from autolaunch.launch.stacks import Stack

POLL_SECONDS = 0.05
KILL_SECONDS = 5.0
STACK_SECONDS = 10.0
"""How long a rank may take to write its stack, on a machine that is busy; a stopped one is not waited for."""

_STOPPED_CODES = (PREEMPTED, *(128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)))
"""Exit codes of ranks that ended together because of a signal."""


@dataclass
class _Rank:
    """One worker process."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    shown: int
    """How much of the log was forwarded to the terminal."""
    alive_ns: int = 0
    told_to_stop: bool = False
    exit: Exit | None = None


def run_local(job: ResolvedJob, launch_cfg: dict[str, Any]) -> RunEnd:
    """Run a job with one process per rank and wait for its end; whatever that is, no process is left.

    Rank 0 has this process's terminal, the others write to `<output_dir>/logs/rank_<k>.log`; with `launch.logs=all`
    every rank writes there and its lines are repeated here after `[rank k] `. Trials of a search only write there.

    Args:
        job: the job; its file is written here.
        launch_cfg: the keys of `autolaunch.config.schema.Launch`.

    Raises:
        ConfigError: so many ranks can't have the files open that they need.
    """
    raise_file_limit(job.world_size)
    forget_reports(job.logs)
    path = job.write()
    with Signals().caught() as signals, Board.make() as board:
        ranks: list[_Rank] = []
        try:
            _start(job, path, launch_cfg["logs"] == "all" or is_trial(job.config), board, ranks)
            return _Watch(job, launch_cfg, ranks, signals, board).until_the_end()
        finally:
            _kill(ranks)


def _start(job: ResolvedJob, path: Path, all_logs: bool, board: Board, ranks: list[_Rank]) -> None:
    # Nobody can take the port: it is open from here on, and rank 0 gets the open socket.
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        for number in range(job.world_size):
            where = Place(
                kind="local",
                rank=number,
                world_size=job.world_size,
                local_rank=number,
                local_world_size=job.world_size,
                master_port=listener.getsockname()[1],
            )
            arguments = [str(path), "--heartbeat", str(board.descriptor)]
            descriptors = [board.descriptor]
            if number == 0:
                arguments += ["--listen", str(listener.fileno())]
                descriptors.append(listener.fileno())
            log = log_file(job.logs, number)
            with log.open("ab") as stream:
                start = stream.tell()
                output = stream if number or all_logs else None
                process = start_worker(arguments, _environment(where, job), output, tuple(descriptors))
            ranks.append(_Rank(number, process, log, start, start))


def start_worker(
    arguments: list[str], environment: dict[str, str], output: IO[bytes] | None, descriptors: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    """Start `python -m autolaunch.worker` as a child of this process. The tests put a faster start in its place.

    Args:
        arguments: what it is called with, `--parent` aside.
        environment: all of its environment.
        output: where its output goes; this process's own if None.
        descriptors: open files that it inherits.
    """
    # -P: a file in the working directory must not shadow an installed package.
    command = [sys.executable, "-P", "-u", "-m", "autolaunch.worker", *arguments, "--parent", str(os.getpid())]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=descriptors,
        start_new_session=True,
    )


def _environment(where: Place, job: ResolvedJob) -> dict[str, str]:
    env = os.environ | where.environment(job.output_dir.name)
    env.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // where.local_world_size)))
    if "lo" in {name for _, name in socket.if_nameindex()}:
        # gloo would ask for the address of the host's name, which many a laptop does not have.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), *source_roots()])
    return env


def source_roots() -> list[str]:
    """Directories that a child process needs on PYTHONPATH to import the same code; none of what is installed."""
    roots = {str(Path(module.__file__).parents[1]) for module in (autolaunch, autolaunch_strategies) if module.__file__}
    return sorted(roots - {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Watch:
    """Looks after the ranks until all of them have ended."""

    def __init__(
        self, job: ResolvedJob, launch_cfg: dict[str, Any], ranks: list[_Rank], signals: Signals, board: Board
    ) -> None:
        self.job, self.ranks, self.signals, self.board = job, ranks, signals, board
        self.forward = launch_cfg["logs"] == "all" and not is_trial(job.config)
        self.start_timeout: float = launch_cfg["start_timeout"]
        self.stop_timeout: float = launch_cfg["stop_timeout"]
        self.limits = limits_of(launch_cfg)
        self.moves: Moves | None = None
        """From when on all ranks have begun the task."""
        self.next_look = 0.0
        self.timeout: float | None = (job.config.get("search") or {}).get("timeout")

    def until_the_end(self) -> RunEnd:
        started = time.monotonic()
        deadline: float | None = started + self.start_timeout
        while True:
            self._look()
            if self.signals.received:
                return self._interrupted()
            if any(rank.exit is not None and rank.exit.code == PREEMPTED for rank in self.ranks):
                # A signal went to a rank, and all ranks have ended together.
                return self._stopped_together() or self._interrupted()
            failure = self._first_failure()
            if failure is not None:
                return self._failed(failure)
            if all(rank.exit for rank in self.ranks):
                return RunEnd("finished", 0)
            if deadline is not None:
                if all(self._phase(rank) >= Phase.RUNNING for rank in self.ranks):
                    deadline = None
                    self.moves = Moves(len(self.ranks), time.monotonic())
                elif time.monotonic() > deadline:
                    return self._never_started()
            if self.timeout is not None and time.monotonic() > started + self.timeout:
                return self._not_over()
            if (hang := self._hang()) is not None:
                self._stop()
                return RunEnd("timed_out", 1, message=f"{hang.render()}\nlogs and whole stacks: {self.job.logs}")
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        for rank in self.ranks:
            if rank.exit is None:
                now = time.time_ns()
                code = rank.process.poll()
                if code is None:
                    rank.alive_ns = now
                else:
                    done = self._phase(rank) == Phase.DONE
                    rank.exit = Exit(code, rank.process.pid, rank.alive_ns, rank.told_to_stop, done, rank.log_start)
            if self.forward:
                self._forward(rank)

    def _forward(self, rank: _Rank) -> None:
        with rank.log.open("rb") as log:
            log.seek(rank.shown)
            text = log.read()
        # A line is shown when it is whole, so that lines of ranks do not mix.
        whole = text if rank.exit else text[: text.rfind(b"\n") + 1]
        if whole:
            rank.shown += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                print(f"[rank {rank.number}] {line}")
            sys.stdout.flush()

    def _phase(self, rank: _Rank) -> Phase:
        return read_phase(self.job.logs, rank.number)

    def _first_failure(self) -> Failure | None:
        exits = {rank.number: rank.exit for rank in self.ranks if rank.exit}
        return first_failure(self.job.logs, exits, self.job.world_size)

    def _interrupted(self) -> RunEnd:
        signum = self.signals.received[0] if self.signals.received else int(signal.SIGTERM)
        if self._can_save():
            name = "Ctrl-C" if signum == signal.SIGINT else "a signal"
            print(f"{name}: saving after this step; once more ends at once", file=sys.stderr, flush=True)
            for rank in self.ranks:
                if rank.exit is None:
                    rank.told_to_stop = True
                    rank.process.send_signal(signal.SIGTERM)
            end = self._stopped_together(signum)
            if end is not None:
                return end
        self._stop()
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        return RunEnd("interrupted", 128 + signum, message=f"stopped by {name}; every rank has ended")

    def _can_save(self) -> bool:
        """Whether the ranks answer to a signal by saving."""
        training = self.job.config["task"] == "fit" and self.job.config["checkpoint"]["enabled"]
        # Before that they have nothing to save, and the signal would just end them.
        return training and all(self._phase(rank) == Phase.RUNNING for rank in self.ranks)

    def _stopped_together(self, signum: int | None = None) -> RunEnd | None:
        """Wait until all ranks have ended by themselves; None if they don't, or one fails, or one more signal comes.

        Args:
            signum: the signal that this process got; the ranks may have got another.
        """
        signals = len(self.signals.received)
        end = time.monotonic() + self.job.config["checkpoint"]["emergency_seconds"]
        while time.monotonic() < end and len(self.signals.received) == signals:
            self._look()
            stop = read_stop(self.job.logs)
            if stop is not None and all(rank.exit for rank in self.ranks):
                stop = Stop(signum or stop.signum, stop.step, stop.checkpoint)
                return RunEnd("interrupted", stop.exit_code, message=stop.render(self.job.output_dir))
            if any(rank.exit is not None and rank.exit.code not in _STOPPED_CODES for rank in self.ranks):
                return None
            time.sleep(POLL_SECONDS)
        return None

    def _hang(self) -> Hang | None:
        """The hang that this run is in, if it is one: looked for now and then only."""
        now = time.monotonic()
        if self.limits is None or self.moves is None or now < self.next_look:
            return None
        self.next_look = now + interval(self.limits.hang_timeout)
        for rank in self.ranks:
            self.moves.hear(rank.number, self.board.read(rank.number), now)
        still = self.moves.still(now)
        if still <= self.limits.hang_timeout or any(rank.exit for rank in self.ranks):
            return None
        # Where they are is asked less often than whether they move.
        self.next_look = now + self.limits.hang_timeout / 4
        standings = self._standings(self.ranks)
        self._look()
        for number, standing in standings.items():
            self.moves.hear(number, standing.beat, now := time.monotonic())
        if self.moves.still(now) < still or any(rank.exit for rank in self.ranks):
            return None  # while they were asked, one has moved
        return find_hang(standings, still, self.limits)

    def _standings(self, ranks: Sequence[_Rank]) -> dict[int, Standing]:
        stacks = self._stacks(ranks)
        return {
            rank.number: Standing(
                self.board.read(rank.number), Stack(stacks[rank.number]) if stacks[rank.number] else None
            )
            for rank in ranks
        }

    def _failed(self, failure: Failure) -> RunEnd:
        end = time.monotonic() + VERDICT_SECONDS
        while failure.peer_lost and time.monotonic() < end and not self.signals.received:
            time.sleep(POLL_SECONDS)
            self._look()
            failure = self._first_failure() or failure
        hung = [rank for rank in self.ranks if failure.peer_lost and rank.exit is None and rank.number != failure.rank]
        where = where_ranks_are(self._standings(hung)) if hung else []
        # A rank that failed by itself may finish what it does at its end; the others wait for it in vain.
        self._stop(spare=[number for number in range(len(self.ranks)) if self._failed_itself(number)])
        failure = self._first_failure() or failure
        return RunEnd("failed", failure.exit_code, failure, "\n".join([failure.render(), *where]))

    def _failed_itself(self, number: int) -> bool:
        return failure_file(self.job.logs, number).exists()

    def _never_started(self) -> RunEnd:
        phases = {rank.number: self._phase(rank) for rank in self.ranks}
        late = [number for number, phase in phases.items() if phase < Phase.RUNNING]
        stuck = self.ranks[min(late, key=lambda number: (phases[number], number))]
        lines = [
            f"{len(late)} of {len(self.ranks)} ranks had not begun the task after {self.start_timeout:g} s "
            "(launch.start_timeout):",
            *(f"  rank {number}: {phase.name.lower()}" for number, phase in phases.items()),
        ]
        if stack := self._stacks([stuck])[stuck.number]:
            lines += [f"where rank {stuck.number} is:", stack]
        if text := tail(stuck.log, stuck.log_start):
            lines += [f"the end of its log:\n{text}"]
        lines.append(f"log: {stuck.log}")
        self._stop()
        return RunEnd("timed_out", 1, message="\n".join(lines))

    def _not_over(self) -> RunEnd:
        lines = [f"not over after {self.timeout:g} s (search.timeout)", *where_ranks_are(self._standings(self.ranks))]
        self._stop()
        return RunEnd("timed_out", 1, message="\n".join(lines))

    def _stacks(self, ranks: Sequence[_Rank]) -> dict[int, str]:
        """Where ranks are right now: asked for with a signal that is answered even by one that hangs in C code.

        Of one that does not answer it is empty.
        """
        texts = dict.fromkeys((rank.number for rank in ranks), "")
        # Before it has started the signal would kill it.
        asked = [rank for rank in ranks if rank.exit is None and self._phase(rank) >= Phase.STARTED]
        for rank in asked:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(stack_file(self.job.logs, rank.number), 0)
            rank.process.send_signal(STACK_SIGNAL)
        end = time.monotonic() + STACK_SECONDS
        while asked and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            for rank in list(asked):
                text = stack_file(self.job.logs, rank.number).read_text(errors="replace")
                if (
                    (text and text == texts[rank.number])
                    or is_stopped(rank.process.pid)
                    or rank.process.poll() is not None
                ):
                    asked.remove(rank)
                texts[rank.number] = text
        return {number: text.rstrip() for number, text in texts.items()}

    def _stop(self, spare: Collection[int] = ()) -> None:
        """End all ranks but `spare`, and after `launch.stop_timeout` or one more signal kill whatever is left."""
        signals = len(self.signals.received)
        for rank in self.ranks:
            if rank.exit is None:
                rank.told_to_stop = True
                if rank.number not in spare:
                    rank.process.send_signal(STOP_SIGNAL)
        end = time.monotonic() + self.stop_timeout
        while time.monotonic() < end and len(self.signals.received) == signals:
            self._look()
            if all(rank.exit for rank in self.ranks):
                break
            time.sleep(POLL_SECONDS)
        _kill(self.ranks)
        self._look()
        if sys.stderr.isatty() and not self.forward:
            # Rank 0 may have ended in the middle of a progress bar, with the cursor hidden.
            sys.stderr.write("\x1b[?25h\n")
            sys.stderr.flush()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger: it would answer to no signal."""
    try:
        # `pid (name) state ...`; the name may hold blanks and parentheses
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _kill(ranks: list[_Rank]) -> None:
    """Kill what is left of the ranks, their loader processes included."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        # A process that waits for a dead file server cannot be killed; it will not do anything any more either.
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(KILL_SECONDS)
