"""The command as it is started: by its script, by `python -m autolaunch`, and so by torchrun and srun."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Do what was typed, and end with its exit code. What takes longest begins before the rest is imported."""
    try:
        from autolaunch.planning import profiler
        from autolaunch.report.streams import keep_streams_open

        keep_streams_open()
        profiler.begin(sys.argv[1:])
        from autolaunch import cli
    except KeyboardInterrupt:  # nearly all of the time before `run`, which tells the same
        print("autolaunch: ended by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    try:
        code = cli.run(sys.argv[1:], plans_beside=True)
    finally:
        if (unused := profiler.taken()) is not None:
            unused.end()
    gc.freeze()  # before it ends, Python would look for garbage in all of torch once more, for half a second
    sys.exit(code)


if __name__ == "__main__":
    main()
