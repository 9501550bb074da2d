"""A run in which nothing moves any more ends soon, and says who stands where."""

from __future__ import annotations

import re
import socket
import sys
import textwrap
import time

import pytest

from tests.support.commands import Commands, Run, begin
from tests.support.ranks import environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
    *("model.num_kv_heads=2", "data.seq_len=32", "data.batch_size=8", "trainer.max_steps=8"),
    *("trainer.accelerator=cpu", "checkpoint.enabled=false", "launch.hang_timeout=4", "launch.stop_timeout=1"),
)
HANGS = textwrap.dedent("""
    import os, signal, time
    import lightning as L
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F


    class Hangs(L.Callback):
        def __init__(self, rank, how):
            self.rank, self.how = rank, how

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step == 2 and trainer.global_rank == self.rank:
                getattr(self, self.how)()

        def stopped(self):
            os.kill(os.getpid(), signal.SIGSTOP)

        def sleeps(self):
            time.sleep(600)

        def killed(self):
            os.kill(os.getpid(), signal.SIGKILL)

        def alone(self):
            dist.recv(torch.ones(1), src=1 - self.rank)


    class Slow(L.Callback):
        "Takes longer than the limit, for which there are reasons."

        def __init__(self, seconds):
            self.seconds = seconds

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step == 0:
                time.sleep(self.seconds)

        def on_validation_epoch_end(self, trainer, module):
            if trainer.is_global_zero:
                time.sleep(self.seconds)

        def on_train_batch_end(self, trainer, module, *args):
            if trainer.is_global_zero and trainer.global_step == 3:
                time.sleep(self.seconds)


    class Timeouts(L.Callback):
        "Prints the timeouts of all process groups."

        def on_train_start(self, trainer, module):
            self.say("before")

        def on_train_end(self, trainer, module):
            self.say("after")

        def say(self, when):
            groups = list(dist.distributed_c10d._world.pg_map)
            seconds = {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}
            print(f"{when}: {len(groups)} groups, {sorted(seconds)}", flush=True)


    class Prints(L.LightningModule):
        "Prints on one rank what all ranks are needed for."

        def __init__(self):
            super().__init__()
            from transformers import LlamaConfig, LlamaForCausalLM

            config = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=257, num_hidden_layers=2, **config))

        def training_step(self, batch, batch_idx):
            logits = self.model(input_ids=batch["input_ids"]).logits
            if self.trainer.is_global_zero and batch_idx == 2:
                print(logits.max())
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())
""")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    directory = tmp_path_factory.mktemp("hangs")
    (directory / "hangs.py").write_text(HANGS)
    return Commands(directory, *TINY, timeout=200)


def hung(command: Commands, how: str, rank: int, *more: str) -> Run:
    run = command("mesh=2", f"callbacks.hangs={{_target_: hangs.Hangs, rank: {rank}, how: {how}}}", *more, code=1)
    assert "Traceback" not in run.screen
    assert run.summary["status"] == "failed"
    return run


def line_of(text: str) -> int:
    return 1 + next(number for number, line in enumerate(HANGS.splitlines()) if text in line)


def test_a_stopped_rank_is_named(command: Commands) -> None:
    """The command watches all ranks alike; where they watch each other, below, both are tried."""
    screen = hung(command, "stopped", 0).screen
    assert re.search(r"^rank 0 of 2 has not moved for \d+ s \(launch.hang_timeout\): it does not answer", screen, re.M)
    assert "rank 0 (step 3): no answer" in screen
    assert "stack of rank 1 (most recent call first):" in screen


def test_a_rank_that_sleeps_is_named(command: Commands) -> None:
    screen = hung(command, "sleeps", 1).screen
    assert re.search(r"^rank 1 of 2 has not moved for \d+ s \(launch.hang_timeout\)$", screen, re.MULTILINE)
    assert f"rank 1 (step 3), busy: {command.directory}/hangs.py:{line_of('time.sleep(600)')} in sleeps" in screen
    assert re.search(r"rank 0 \((step 3|after step 3)\), waiting for other ranks: ", screen)
    assert "stack of rank 0 (" in screen and "stack of rank 1 (" in screen


@pytest.mark.every  # as those of the print below
def test_ranks_that_differ_are_told_by_their_lines(command: Commands) -> None:
    screen = hung(command, "alone", 0).screen
    assert re.search(r"^no rank of 2 has moved for \d+ s .*in different lines", screen, re.MULTILINE)
    line = line_of("dist.recv")
    assert f"rank 0 (step 3), waiting for other ranks: {command.directory}/hangs.py:{line} in alone" in screen
    assert "dist.recv(torch.ones(1), src=1 - self.rank)" in screen
    assert re.search(r"rank 1 .*, waiting for other ranks: ", screen)


def test_a_print_on_one_rank_is_told_by_its_line(command: Commands) -> None:
    """Under cp the largest logit is computed from all ranks' parts, and the others have gone on."""
    always = (word for word in TINY if not word.startswith(("model", "optimizer", "scheduler")))  # it brings its own
    own = Commands(command.directory, *always, timeout=200)
    run = own("mesh=cp2", "module={_target_: hangs.Prints}", "data=synthetic", code=1, into=command.directory / "own")
    told = " ".join(run.screen.split())
    assert "they wait for each other in different lines" in told
    file = command.directory / "hangs.py"
    line = line_of("print(logits.max())")
    assert f"rank 0 (step 3), waiting for other ranks: {file}:{line} in training_step print(logits.max())" in told
    assert f"rank 1 (step 3), waiting for other ranks: {file}:{line + 1} in training_step" in told


def test_what_takes_its_time_is_no_hang(command: Commands) -> None:
    """A first step, a validation and a callback between two steps, each longer than the limit."""
    slow = "callbacks.slow={_target_: hangs.Slow, seconds: 4}"
    more = ("launch.hang_timeout=1", "trainer.val_check_interval=4", "trainer.limit_val_batches=1")
    run = command("mesh=2", slow, *more)
    assert run.summary["status"] == "finished"


def test_every_group_has_the_timeout_of_the_moment(command: Commands) -> None:
    """Those of the mesh, too; longer until the first step is done."""
    callback = "callbacks.timeouts={_target_: hangs.Timeouts}"
    timeouts = ("launch.first_step_timeout=900", "launch.collective_timeout=500", "launch.hang_timeout=60")
    run = command("mesh=1x2", callback, *timeouts)
    assert re.search(r"^before: [2-9] groups, \[900\.0\]$", run.screen, re.MULTILINE), run.screen
    assert re.search(r"^after: [2-9] groups, \[500\.0\]$", run.screen, re.MULTILINE), run.screen


def apart(command: Commands, name: str, rank: int, how: str, *more: str) -> tuple[list[int | None], list[str], float]:
    """Two ranks as torchrun starts them on two nodes: their exit codes and errors, and the seconds until the last."""
    hangs = f"callbacks.hangs={{_target_: hangs.Hangs, rank: {rank}, how: {how}}}"
    words = [
        sys.executable,
        "-m",
        "autolaunch",
        *TINY,
        "mesh=2",
        hangs,
        *more,
        f"output_dir={command.directory}/{name}",
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = []
    try:
        for number in range(2):
            log = (command.directory / f"{name}_{number}").open("w")
            env = environment(**shared, RANK=str(number), GROUP_RANK=str(number))
            ranks.append(begin(words, env=env, cwd=command.directory, stdout=log, stderr=log))
        begun = time.monotonic()
        codes: list[int | None] = [None, None]
        ended = [0.0, 0.0]
        while None in [code for number, code in enumerate(codes) if how != "stopped" or number != rank]:
            assert time.monotonic() < begun + 100
            for number, process in enumerate(ranks):
                if codes[number] is None and process.poll() is not None:
                    codes[number], ended[number] = process.poll(), time.monotonic()
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
    return codes, [(command.directory / f"{name}_{number}").read_text() for number in range(2)], max(ended) - min(ended)


@pytest.mark.every  # one of this node is above, and below one of another that sleeps
def test_a_rank_of_another_node_that_is_stopped_is_named(command: Commands) -> None:
    codes, screens, _ = apart(command, "far_stopped", 1, "stopped")
    assert codes == [1, None]
    assert re.search(
        r"^rank 1 of 2 has not moved for \d+ s \(launch.hang_timeout\): it does not ans", screens[0], re.MULTILINE
    )
    assert "stack of rank 0 (" in screens[0]


@pytest.mark.every  # as the rank of another node above
def test_a_first_rank_that_is_stopped_is_named_by_the_next(command: Commands) -> None:
    codes, screens, _ = apart(command, "first_stopped", 0, "stopped")
    assert codes == [None, 1]
    assert re.search(
        r"^rank 0 of 2 has not moved for \d+ s \(launch.hang_timeout\): it does not ans", screens[1], re.MULTILINE
    )


def test_a_rank_of_another_node_that_sleeps_is_named(command: Commands) -> None:
    codes, screens, _ = apart(command, "far_sleeps", 1, "sleeps")
    assert codes == [1, 1]
    line = line_of("time.sleep(600)")
    assert f"rank 1 (step 3), busy: {command.directory}/hangs.py:{line} in sleeps" in screens[0]
    assert "stack of rank 0 (" in screens[0] and "stack of rank 1 (" in screens[0]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.every)])
def test_a_dead_rank_ends_all_in_seconds(rank: int, command: Commands) -> None:
    codes, screens, seconds = apart(command, f"killed_{rank}", rank, "killed")
    assert codes[1 - rank] == 1 and seconds < 10
    assert f"rank {rank} of 2 " in screens[1 - rank] and "has gone" in screens[1 - rank]
    assert "Traceback" not in screens[1 - rank]
