"""The progress of a run: on a terminal, in a pipe, and when it ends badly."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.commands import begin

SCRIPT = """
import logging, sys, time
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.metrics_csv import MetricsCsv
from autolaunch.report.progress import ProgressLine

output_dir, ending = sys.argv[1:]

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            print("a word in between")
            logging.getLogger("lightning.pytorch").warning("a log line in between")
        if batch_idx == 8 and ending == "fails":
            raise RuntimeError("out of luck")
        if batch_idx == 8 and ending == "waits":
            print("waiting", flush=True)
            time.sleep(60)
        return self.linear(batch).pow(2).mean()
    def validation_step(self, batch, batch_idx):
        time.sleep(0.3)
        self.log("val_loss", self.linear(batch).pow(2).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

step_metrics = StepMetrics()
trainer = pl.Trainer(accelerator="cpu", max_steps=12, max_epochs=-1, logger=[MetricsCsv(output_dir)],
    log_every_n_steps=1, callbacks=[step_metrics, ProgressLine(step_metrics)],
    enable_model_summary=False, enable_checkpointing=False,
    num_sanity_val_steps=0, val_check_interval=6, check_val_every_n_epoch=None, limit_val_batches=2)
data = DataLoader(torch.randn(100, 4), batch_size=4)
trainer.validate(Model(), data, verbose=False) if ending == "validates" else trainer.fit(Model(), data, data)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def environment() -> dict[str, str]:
    inherited = ranks.environment(TERM="xterm-256color", PYTHONWARNINGS="ignore")
    return {k: v for k, v in inherited.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI")}


def on_a_terminal(script: Path, ending: str, interrupt_at: bytes = b"") -> tuple[int, str]:
    """(exit code, everything that arrived at the terminal); sends Ctrl-C's signal when `interrupt_at` has arrived."""
    leader, follower = pty.openpty()
    command = [sys.executable, str(script), str(script.parent), ending]
    process = begin(command, stdin=follower, stdout=follower, stderr=follower, env=environment())
    os.close(follower)
    arrived, deadline = b"", time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if select.select([leader], [], [], 0.2)[0]:
                try:
                    arrived += os.read(leader, 65536)
                except OSError:  # the other side is closed
                    break
            if interrupt_at and interrupt_at in arrived:
                process.send_signal(signal.SIGINT)
                interrupt_at = b""
        return process.wait(10), arrived.decode()
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ending", "interrupt_at", "code"),
    [
        pytest.param("fails", b"", 1, id="fails"),
        pytest.param("waits", b"waiting", 1, id="ctrl-c"),
        pytest.param("validates", b"", 0, id="validates"),
    ],
)
def test_the_terminal_is_left_as_it_was(script: Path, ending: str, interrupt_at: bytes, code: int) -> None:
    found, text = on_a_terminal(script, ending, interrupt_at)
    assert found == code, text
    assert_cursor_is_back(text)


def assert_cursor_is_back(text: str) -> None:
    assert "\x1b[?25l" in text, "no bar was shown"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is still hidden"


@pytest.mark.timeout(120)
def test_the_bar(script: Path) -> None:
    code, text = on_a_terminal(script, "finishes")
    assert code == 0, text
    assert_cursor_is_back(text)
    plain = without_codes(text)
    *_, bar, values = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert re.fullmatch(r"training 12/12 ━+ 100% 0:00:\d\d left 0:00:00\s*", bar)
    assert re.fullmatch(
        r"loss \d\.\d{4}   [\d,.]+k? samples/s   [\d.e-]+ s/step   \d+ MiB   val_loss \d\.\d{4}\s*", values
    )
    assert re.search(r"validation [012]/2 ", plain)
    # What others print stands on lines of its own, above the bar.
    assert re.search(r"(?m)^\s*a word in between\s*$", plain.replace("\r", "\n"))
    assert re.search(r"(?m)^\s*a log line in between\s*$", plain.replace("\r", "\n"))


@pytest.mark.timeout(120)
def test_plain_lines_in_a_pipe(script: Path) -> None:
    command = [sys.executable, str(script), str(script.parent), "finishes"]
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as pipe, (script.parent / "errors").open("w+") as errors:
        process = begin(command, stdin=subprocess.DEVNULL, stdout=writing, stderr=errors, env=environment())
        os.close(writing)
        said = pipe.read()
        assert process.wait(10) == 0, (script.parent / "errors").read_text()
    assert "\x1b" not in said
    values = r"loss \d\.\d{4}  [\d,.]+k? samples/s  [\d.e-]+ s/step  \d+ MiB"
    expected = [
        rf"step  1/12  {values}",
        r"a word in between",
        r"validation at step 6  val_loss \d\.\d{4}  \d\.\d s",
        r"validation at step 12  val_loss \d\.\d{4}  \d\.\d s",
        rf"step 12/12  {values}  val_loss \d\.\d{{4}}",
    ]
    lines = said.splitlines()
    assert len(lines) == len(expected), said
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line)
