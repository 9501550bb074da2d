"""One rank of a run: join the others, run the task, leave.

`python -m autolaunch.worker <job.json>` is what a local run starts; torchrun, srun and a run of one rank call
`run_rank` or `run_here` from the command's own process.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from autolaunch.config.search import is_trial
from autolaunch.garbage import no_garbage_collection
from autolaunch.job import ResolvedJob
from autolaunch.launch.contact import end_process, in_contact
from autolaunch.launch.containment import die_with_parent
from autolaunch.launch.end import STACK_SIGNAL, STOP_SIGNAL, RunEnd, Stop, correct_summary, write_stop
from autolaunch.launch.failure import VERDICT_SECONDS, Failure, describe, failure_file, log_file, show, write_failure
from autolaunch.launch.heartbeat import PULSE, Board, limits_of
from autolaunch.launch.phase import Phase, forget_reports, stack_file, write_phase
from autolaunch.launch.place import Place, place
from autolaunch.launch.resources import choose_interface
from autolaunch.machine.affinity import processors_beside, run_on
from autolaunch.machine.devices import gpu_environment, visible_devices
from autolaunch.report.streams import keep_streams_open

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


def main() -> None:
    """Be one rank of a local run, as `autolaunch.launch.local` starts it; never returns."""
    parser = argparse.ArgumentParser(prog="python -m autolaunch.worker", description=main.__doc__)
    parser.add_argument("job", help="the job file")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--listen", type=int, help="descriptor of the socket on which rank 0 serves the store")
    parser.add_argument("--heartbeat", type=int, required=True, help="descriptor of the board for what the ranks do")
    arguments = parser.parse_args()
    keep_streams_open()
    die_with_parent(arguments.parent)
    signal.signal(STOP_SIGNAL, signal.SIG_DFL)
    job = ResolvedJob.read(arguments.job)
    where = replace(place(), kind="local", listen_fd=arguments.listen)
    PULSE.begin(partial(Board(arguments.heartbeat).write, where.rank))
    leave(run_rank(job, where))


def run_rank(job: ResolvedJob, place: Place, store: Store | None = None) -> int:
    """Run the job's task as one rank of several, and return the exit code to `leave` with.

    A failure is written to `<output_dir>/logs/failure_<rank>.json` in the moment it is caught; it is also printed here
    if no parent of ours is there to read that file.

    Args:
        job: the job, the same on every rank.
        place: this rank.
        store: what `rendezvous.connect` returned, if the caller has connected already.
    """
    job.logs.mkdir(parents=True, exist_ok=True)
    failure_file(job.logs, place.rank).unlink(missing_ok=True)
    log = log_file(job.logs, place.rank)
    launch = job.config["launch"]
    terminal = place.rank == 0 and (place.kind != "local" or (launch["logs"] == "rank0" and not is_trial(job.config)))
    failure: Failure | None = None
    with log.open("a", encoding="utf-8") as log_stream, stack_file(job.logs, place.rank).open("a") as stack_stream:
        try:
            faulthandler.enable(log_stream)
            faulthandler.register(STACK_SIGNAL, stack_stream)
            write_phase(job.logs, place.rank, Phase.STARTED)
            _log_records(log if terminal or place.kind != "local" else None, console=terminal or place.kind == "local")
            _see_working_directory()
            _set_gpu_defaults(job)

            with no_garbage_collection():
                import torch.distributed as dist

                from autolaunch import tasks
                from autolaunch.launch import rendezvous

            write_phase(job.logs, place.rank, Phase.IMPORTED)
            if store is None:
                store = rendezvous.connect(place, launch["start_timeout"])
            write_phase(job.logs, place.rank, Phase.CONNECTED)
            # What looks for torchrun's variables finds them under srun, too.
            os.environ.update({k: v for k, v in place.environment(job.output_dir.name).items() if k not in os.environ})
            if place.kind != "local" and (interface := choose_interface(place)):
                os.environ["GLOO_SOCKET_IFNAME"] = interface
            rendezvous.join(store, place, launch["first_step_timeout"], _gpu(job, place))
            write_phase(job.logs, place.rank, Phase.RUNNING)
            with _watched(store, job, place):
                try:
                    tasks.run(job, place)
                    if dist.is_initialized():
                        # A rank that is done must not take the connection from one that is not.
                        dist.barrier()
                        gc.collect()  # device meshes hold groups that gloo cannot lose after the process group
                        dist.destroy_process_group()
                except BaseException as error:
                    if _stop_in(error) is None:
                        failure = _record(error, job, place, log)  # before others are waited for
                    raise
            write_phase(job.logs, place.rank, Phase.DONE)
            rendezvous.leave_store(store, place)
        except BaseException as error:
            stop = _stop_in(error)
            if stop is None:
                return _fail(failure or _record(error, job, place, log), error, place)
            if place.rank == 0:
                write_stop(stop, job.logs)
                if place.kind != "local":
                    print(stop.render(job.output_dir), file=sys.stderr, flush=True)
            if place.kind != "local" and store is not None:
                rendezvous.leave_together(store, place)
            return stop.exit_code
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.enable()
    return 0


def _watched(store: Store, job: ResolvedJob, place: Place) -> contextlib.AbstractContextManager[None]:
    """Be missed when this rank dies or hangs; in a local run the parent watches already."""
    if place.kind == "local":
        return contextlib.nullcontext()
    from autolaunch_strategies.lightning.votes import TrainingStopped

    PULSE.begin()
    limits = limits_of(job.config["launch"])
    return in_contact(store, place, job.logs, limits, partial(end_process, place), TrainingStopped)


def run_here(job: ResolvedJob) -> RunEnd:
    """Run a job of one rank in this process. What goes wrong is in the result, not raised."""
    assert job.world_size == 1, f"{job.world_size} ranks do not fit in one process"
    where = Place()
    forget_reports(job.logs)
    log = log_file(job.logs, 0)
    _see_working_directory()
    _set_gpu_defaults(job)
    handler = _log_records(log, console=not logging.getLogger().handlers)
    with _stoppable() as received, log.open("a", encoding="utf-8") as log_stream:
        try:
            faulthandler.enable(log_stream)
            from autolaunch import tasks

            tasks.run(job, where)
        except BaseException as error:
            stop = _stop_in(error)
            if stop is not None:
                return RunEnd("interrupted", stop.exit_code, message=stop.render(job.output_dir))
            # Lightning turns Ctrl-C into sys.exit(1).
            signum = signal.SIGINT if _is_interrupt(error) else received[0] if received else None
            if signum is not None:
                return RunEnd("interrupted", 128 + signum, message="interrupted")
            failure = _record(error, job, where, log)
            return RunEnd("failed", failure.exit_code, failure, failure.render())
        finally:
            faulthandler.enable()
            logging.getLogger().removeHandler(handler)
            handler.close()
    return RunEnd("finished", 0)


def leave(code: int) -> NoReturn:
    """End this process with `code`, now, after what others registered with `atexit`.

    The interpreter's own way out would destroy what gloo's threads still use, and abort.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _set_gpu_defaults(job: ResolvedJob) -> None:
    if visible_devices(job.config["trainer"]["accelerator"])[0] == "gpu":
        os.environ.update(gpu_environment(job.logs))


def _gpu(job: ResolvedJob, place: Place) -> torch.device | None:
    """The GPU of this rank, from now on the one that CUDA uses; None where it computes on the CPU.

    With `launch.numa` threads of this process stay on the processors beside it.
    """
    kind, _ = visible_devices(job.config["trainer"]["accelerator"])
    if kind == "cpu":
        return None
    import torch

    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if job.config["launch"]["numa"]:
        where: Any = torch.cuda.get_device_properties(device)  # torch's stubs do not have all of them
        address = f"{where.pci_domain_id:04x}:{where.pci_bus_id:02x}:{where.pci_device_id:02x}.0"
        if processors := processors_beside(address):
            run_on(processors)
    return device


def _fail(failure: Failure, error: BaseException, place: Place) -> int:
    if place.kind == "local":
        return failure.exit_code
    if failure.peer_lost:
        print(f"rank {place.rank} of {place.world_size} stopped: it lost contact with another rank", file=sys.stderr)
        # Whoever started the ranks blames the first that ends.
        time.sleep(VERDICT_SECONDS)
    else:
        show(failure)
        if place.kind == "torchrun":
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            # torchrun shows what it finds in the file that this writes.
            get_error_handler().record_exception(error)
    return failure.exit_code


def _stop_in(error: BaseException) -> Stop | None:
    """What a signal ended, if that is what `error` says."""
    from autolaunch_strategies.lightning.votes import TrainingStopped

    if not isinstance(error, TrainingStopped):
        return None
    return Stop(error.signum, error.step, None if error.checkpoint is None else str(error.checkpoint))


def _record(error: BaseException, job: ResolvedJob, place: Place, log: Path) -> Failure:
    failure = describe(error, job.logs, place.rank, place.world_size, job.config)
    write_failure(failure, job.logs)
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as stream:
        stream.write("".join(traceback.format_exception(error)))
    if place.rank == 0 or place.kind != "local":  # there nobody else says it
        correct_summary(job.output_dir, "failed", failure.error)
    return failure


def _see_working_directory() -> None:
    # At the end: a file of the user's must not shadow an installed package.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _log_records(file: Path | None, *, console: bool) -> logging.Handler:
    """Send logging records to `file` and, where this rank has one, to the terminal; return the last handler added."""
    root = logging.getLogger()
    handlers: list[logging.Handler] = []
    if console:
        handlers.append(logging.StreamHandler())
        # Lightning shows its records itself and passes them on as well.
        handlers[-1].addFilter(lambda record: not record.name.startswith("lightning."))
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for handler in handlers:
        root.addHandler(handler)
    for name in ("autolaunch", "autolaunch_strategies"):
        logging.getLogger(name).setLevel(logging.INFO)
    return handlers[-1]


@contextlib.contextmanager
def _stoppable() -> Iterator[list[int]]:
    """While this lasts SIGTERM and SIGHUP raise SystemExit, so that the task cleans up; gives what was received."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL)
        raise SystemExit(128 + signum)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: dict[int, Any] = {signum: signal.getsignal(signum) for signum in signals}
    signal.signal(signal.SIGTERM, stop)
    if before[signal.SIGHUP] != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, stop)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _is_interrupt(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
