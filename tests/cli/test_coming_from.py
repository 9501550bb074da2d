"""docs/coming_from: what it says to write in place of other tools' settings composes, and fits the schema."""

from __future__ import annotations

import re
import shlex

import pytest
from omegaconf import OmegaConf

from autolaunch.config.against_schema import validate
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from tests import ROOT
from tests.support.tiers import but_one_in, tiered

PAGE = (ROOT / "docs" / "coming_from" / "index.md").read_text(encoding="utf-8")
_NEW_COLUMN = [line.rstrip(" |").rpartition(" | ")[2] for line in PAGE.splitlines() if line.startswith("| ")]
LINES = sorted(
    {code for cell in _NEW_COLUMN for code in re.findall(r"`([^`]+)`", cell) if "=" in code and "(" not in code}
)


@pytest.mark.parametrize("line", tiered(LINES, [], but_one_in(3, LINES)))  # a composition each
def test_line(line: str) -> None:
    composed = compose(parse([word for word in shlex.split(line) if word != "autolaunch"]))
    assert composed.errors == []
    config = OmegaConf.to_container(composed.config)
    config.pop("hydra")
    assert validate(config)[1] == []


def test_there_are_lines() -> None:
    assert len(LINES) > 80
