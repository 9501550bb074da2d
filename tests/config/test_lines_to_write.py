"""Lines to write stand as they are typed: a shell and Hydra read in them what was meant, whatever a path is called."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from autolaunch.config.command_line import parse
from autolaunch.config.resume import resolve_ckpt_path
from autolaunch.data.documents import find_files
from autolaunch.jobs.directory import check_what_is_there
from autolaunch.jobs.run import _as_sweep
from autolaunch.launch.end import Stop
from autolaunch_strategies.checkpoint.files import write_manifest
from autolaunch_strategies.config import ConfigError, as_typed

NAMES = [
    *("my run", "it's", 'say "x"', "a,b", "[a](2){3}", "a=b", "$HOME", "a; rm -r b", "größe 🚀", "--x", "~/x", " x "),
    *("a\\", 'a\\"b', "${name}", "\\${name}", "true", "NULL", "123", "1.5", ".5", "", "'", "a\nb"),
]


def read(word: str) -> str:
    """The value of an override, as a job has it."""
    (item,) = OverridesParser.create().parse_overrides([word])
    return OmegaConf.create({"name": "other", "value": item.value()}).value


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_as_it_is(name: str) -> None:
    (word,) = shlex.split(as_typed("output_dir", name))
    assert (word.partition("=")[0], read(word)) == ("output_dir", name)


def test_what_needs_no_quotes_has_none() -> None:
    assert as_typed("ckpt_path", Path("/data/run_1/2026-01-01_00-00-00/step_0000001.ckpt")) == (
        "ckpt_path=/data/run_1/2026-01-01_00-00-00/step_0000001.ckpt"
    )


def test_a_question_may_hold_quotes() -> None:
    assert [read(item) for item in parse(["plan", "--why", "it's"]).overrides] == ["plan", "it's"]


def test_only_what_is_in_the_way_is_removed(tmp_path: Path) -> None:
    (tmp_path / "my run" / "metrics.csv").mkdir(parents=True)
    (tmp_path / "my run" / "logs").touch()
    with pytest.raises(ValueError) as caught:
        check_what_is_there(tmp_path / "my run")
    lines = [error.write for error in getattr(caught.value, "errors", [])]
    assert [shlex.split(line) for line in lines] == [
        ["rm", f"{tmp_path}/my run/logs"],
        ["rm", "-r", f"{tmp_path}/my run/metrics.csv"],
    ]


def test_lines_that_go_on(tmp_path: Path) -> None:
    directory = tmp_path / "my run"
    checkpoint = directory / "checkpoints" / "step_0000001.ckpt"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, 1, "1")
    (tmp_path / "texts, all").touch()
    told = Stop(15, 1, str(checkpoint)).render(directory).rpartition("with ")[2]
    assert [read(word) for word in shlex.split(told)] == [str(directory), "last"]
    with pytest.raises(ConfigError) as caught:
        resolve_ckpt_path({"ckpt_path": str(checkpoint.with_name("step_2")), "task": "fit", "name": "run"}, directory)
    assert read(*shlex.split(caught.value.write)) == str(checkpoint)
    with pytest.raises(ConfigError) as caught:
        find_files(str(tmp_path / "text, all"), ())
    assert read(*shlex.split(caught.value.write)) == str(tmp_path / "texts, all")
    assert shlex.split(_as_sweep(["name=my run", "mesh='2'"])) == ["autolaunch", "-m", "name=my run", "mesh=2"]
