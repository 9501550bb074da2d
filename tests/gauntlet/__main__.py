"""`python -m tests.gauntlet [pattern ...]`: run cells whose name holds a pattern, and write `docs/gauntlet.md`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests import ROOT
from tests.gauntlet.libraries import is_installed
from tests.gauntlet.report import page
from tests.gauntlet.run import Results, run
from tests.gauntlet.table import rows
from tests.support import warm

RESULTS = Path(__file__).with_name("results.json")
"""What came out last, of every cell."""
PAGE = ROOT / "docs" / "gauntlet.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gauntlet", description=__doc__)
    parser.add_argument("pattern", nargs="*", help="part of a cell's name, <library>:<model>@<mesh>; all if none")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file for what comes out")
    parser.add_argument("--new", action="store_true", help="only cells that the file does not have")
    parser.add_argument("--not-right", action="store_true", help="only cells that were not right")
    parser.add_argument("--list", action="store_true", help="say the names of rows and leave")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(rows()))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = Results(arguments.results)
    there = {}
    for library in dict.fromkeys(row.library for row in rows().values()):
        there[library] = is_installed(library)
        if not there[library]:
            print(f"{library} is left out: it is not installed", file=sys.stderr)

    def chosen(cell: str) -> bool:
        known = results.cells.get(cell, {}).get("verdict")
        if (arguments.new and known) or (arguments.not_right and known == "right"):
            return False
        return not arguments.pattern or any(part in cell for part in arguments.pattern)

    server, _listener = warm.start_server("tests.gauntlet.preloaded")
    try:
        run([row for row in rows().values() if there[row.library]], chosen, results, _say)
    finally:
        server.terminate()
        server.wait()
    results.keep(rows())
    if arguments.results == RESULTS:
        PAGE.write_text(page(results.cells))
    bad = [cell for cell, entry in results.cells.items() if entry["verdict"] in ("wrong", "crash", "hang")]
    return 1 if bad else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    assert Path.cwd() == ROOT, f"run it in {ROOT}"
    sys.exit(main())
