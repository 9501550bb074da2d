"""The command `autolaunch`: what was typed, in; jobs run, a page printed or one message, out. Imports no torch.

Exit codes: 0 done, 2 wrong config, 1 a run failed, 75 a signal ended it after it had saved, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from autolaunch import __version__
from autolaunch.config.command_line import HYDRA_INFO, CommandLine, compares_runs, parse, users_want_tracebacks
from autolaunch.garbage import no_garbage_collection
from autolaunch.planning.ahead import planner_beside
from autolaunch.report.streams import lost_output
from autolaunch_strategies.config import ConfigError, ConfigErrors, raise_all


def run(argv: Sequence[str], plans_beside: bool = False) -> int:
    """Do what a command line says and return the exit code; messages go to stderr.

    Args:
        plans_beside: whether plans may be made in a fork of this process.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        print("autolaunch: the working directory has been deleted; cd to one that is there", file=sys.stderr)
        return 2
    try:
        if argv and argv[0] == "checkpoint":
            from autolaunch.jobs.checkpoints import checkpoint_command

            return checkpoint_command(argv[1:])
        if argv and argv[0] == "data":
            from autolaunch.jobs.data import data_command

            return data_command(argv[1:])
        if compares_runs(argv):
            from autolaunch.jobs.compare import compare_finished

            return compare_finished(argv[1:])
        return _run(parse(argv), plans_beside)
    except (ConfigError, ConfigErrors) as error:
        if users_want_tracebacks():
            raise
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autolaunch: ended by Ctrl-C", file=sys.stderr)
        return 130


def _run(line: CommandLine, plans_beside: bool) -> int:
    if line.version:
        print(f"autolaunch {__version__}")
        return _printed(0)
    if line.help or (line.info is not None and line.info not in HYDRA_INFO):
        return _printed(_print_own_page(line))
    if line.runs:
        with contextlib.ExitStack() as stack:
            if plans_beside:
                stack.enter_context(planner_beside(line))
            with no_garbage_collection():
                from autolaunch.jobs.run import run_jobs

            return run_jobs(line)  # what it does is in its files: output that is lost is no failure
    return _printed(_print_page(line))


def _printed(code: int) -> int:
    """The exit code of a page: 1 if it could not be written."""
    error = lost_output()
    if error is not None:
        print(f"autolaunch: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return code if error is None else code or 1


def _print_page(line: CommandLine) -> int:
    from autolaunch.config.compose import compose, print_config, print_page

    if line.cfg is not None or line.info is not None:
        composed = compose(line)
        if line.cfg is not None and composed.config.get("ckpt_path") is not None:
            from autolaunch.jobs.run import composed_with_trained_job

            line, composed = composed_with_trained_job(line)
        raise_all(composed.errors)  # Hydra's own messages speak of its inner workings
        if line.cfg is not None:
            return print_config(line, composed.config)
    return print_page(line)


def _print_own_page(line: CommandLine) -> int:
    from autolaunch.config.help import is_option, print_help, print_info, print_task
    from autolaunch.directories import CONF
    from autolaunch.report.terminal import Terminal

    directories: list[Path] = [path for path in (line.config_path or CONF, line.config_dir) if path is not None]
    if line.help and line.task:
        print_task(line.task, directories, Terminal())
    elif line.help:
        print_help(directories, Terminal())
    else:
        assert line.info is not None
        if not is_option(line.info, directories):
            from autolaunch.config.compose import check_option

            check_option(line)
        print_info(line.info, directories, Terminal())
    return 0
