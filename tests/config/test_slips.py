"""What people type who come from elsewhere: every slip is answered with the line to write, or by what was meant."""

from __future__ import annotations

import pytest

from autolaunch import cli
from autolaunch.config.command_line import parse
from autolaunch.config.slips import slip
from autolaunch_strategies.config import ConfigError


@pytest.mark.parametrize(
    ("typed", "write"),
    [
        ("tp=2", "mesh=tp2"),
        ("dp=8", "mesh=dp8"),
        ("pp=-1", "mesh=pp-1"),
        ("tp=two", None),
        ("trainer.strategy=ddp", "dp=ddp"),
        ("strategy=fsdp", "dp=fsdp"),
        ("trainer.strategy=ddp_find_unused_parameters_true", "dp=ddp"),
        ("trainer.strategy=deepspeed_stage_2_offload", "dp=zero2"),
        ("trainer.strategy=deepspeed_stage_3", "dp=fsdp"),
        ("trainer.strategy=horovod", ""),
        ("model.size=8b", None),
    ],
)
def test_keys_of_other_tools(typed: str, write: str | None) -> None:
    error = slip(typed, *typed.split("="))
    assert (error.write if error else None) == write


def test_a_command_line_full_of_slips(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tp=2", "pp=4", "trainer.strategy=ddp"]) == 2
    said = capsys.readouterr().err
    assert all(f"write:   {line}\n" in f"{said}\n" for line in ("mesh=tp2", "mesh=pp4", "dp=ddp"))


@pytest.mark.parametrize(
    ("words", "page", "absent"),
    [
        (["help"], "autolaunch [task] [group=option] [key=value]", "Traceback"),
        (["help", "fit"], "autolaunch [task] [group=option] [key=value]", "Traceback"),
        (["help", "trainer"], "trainer.max_steps", "model.size"),
        (["--help", "trainer"], "trainer.max_steps", "model.size"),
        (["--help", "model=llama", "mesh=2"], "autolaunch [task] [group=option] [key=value]", "Traceback"),
        (["--info", "model=hf"], "model.path", "model.hidden_size"),
        (["--info", "model"], "model.hidden_size", "Traceback"),
    ],
)
def test_pages(words: list[str], page: str, absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    said = capsys.readouterr().out
    assert page in said and absent not in said


@pytest.mark.parametrize(
    ("words", "write"),
    [
        (["fit", "plan"], "autolaunch plan"),
        (["fit", "mesh=2", "plan"], "autolaunch plan mesh=2"),
        (["mesh=2", "plan"], "autolaunch plan mesh=2"),
        (["train"], "autolaunch fit"),
        (["2x2"], "mesh=2x2"),
    ],
)
def test_words_in_the_wrong_place(words: list[str], write: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(words)
    assert write in raised.value.write


def test_full_needs_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "mesh=2", "--full"]) == 2
    assert "write:   cluster=local --full" in capsys.readouterr().err
