"""Pictures that the program makes: each schedule of a pipeline as `autolaunch plan` writes it to schedule.svg."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from autolaunch.report.schedule_svg import write_schedule_svg
from autolaunch_strategies.config import SCHEDULES
from autolaunch_strategies.schedules.schedule import build_schedule, timeline

RANKS, MICROBATCHES = 4, 8


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in SCHEDULES:
        drawn = timeline(build_schedule(name, RANKS, MICROBATCHES))
        with tempfile.TemporaryDirectory() as directory:
            picture = write_schedule_svg(drawn, Path(directory) / "schedule.svg").read_text(encoding="utf-8")
        files.append(File.generated(config, f"pictures/{name}.svg", content=picture))
    return files
