"""What a command prints, put behind it: always that of this version, and never typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
MARK = "_What it prints is shown on the site._"
"""Stands behind a block with one command. In the repository it is a note to the reader."""

_COMMAND = re.compile(rf"```bash\n(?:cd (\S+) && )?autolaunch (plan [^\n]*)\n```\n\n{re.escape(MARK)}")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _COMMAND.sub(lambda match: match[0].replace(MARK, f"```text\n{_printed(match[1], match[2])}\n```"), markdown)


def _printed(directory: str | None, words: str) -> str:
    """What a plan prints, which writes its files to a directory that is removed."""
    with tempfile.TemporaryDirectory() as outputs:
        command = f'"$PYTHON" -m autolaunch {words} output_dir="$OUTPUTS"'
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT / (directory or "."),
            env={**os.environ, "PYTHON": sys.executable, "OUTPUTS": outputs, "COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    if ended.returncode != 0:
        raise PluginError(f"autolaunch {words}\n{ended.stderr}")
    shown = ended.stdout.replace(outputs, "outputs/mine".ljust(len(outputs)))  # as long, so that boxes stay whole
    return "\n".join(line.rstrip() for line in re.sub(r"outputs/mine +(?=[/,])", "outputs/mine", shown).splitlines())
