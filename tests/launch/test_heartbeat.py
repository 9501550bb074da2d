"""When standing still is a hang, and whose: judged from what ranks say and from their stacks."""

from __future__ import annotations

import os
import re
import sysconfig
import time
from pathlib import Path

import pytest

from autolaunch.launch.failure import Exit, first_failure, log_file, told_of_peers
from autolaunch.launch.heartbeat import Activity, Beat, Board, Limits, Moves, Pulse, Standing, find_hang
from autolaunch.launch.stacks import Stack, named

LIMITS = Limits(60, 1800)
TORCH = sysconfig.get_path("purelib") + "/torch"
LEFT = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 327 in wait\n\n'


def stack(*frames: tuple[str, int, str]) -> Stack:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return Stack("\n".join([LEFT + "Current thread 0x2 (most recent call first):", *lines]))


def waiting(line: int = 7) -> Stack:
    inner = (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce")
    return stack(inner, (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"), ("/home/me/train.py", line, "step"))


def busy() -> Stack:
    return stack(("/home/me/train.py", 3, "slow"), (f"{TORCH}/distributed/tensor/_dispatch.py", 5, "dispatch"))


def compiling() -> Stack:
    return stack((f"{TORCH}/_inductor/compile_fx.py", 3, "compile"), (f"{TORCH}/_dynamo/eval_frame.py", 4, "_fn"))


def standing(found: Stack | None, activity: Activity = Activity.STEP, step: int = 3, longest: float = 1) -> Standing:
    return Standing(Beat(1, activity, step, longest), found)


@pytest.mark.parametrize(
    ("ranks", "still", "culprits"),
    [
        pytest.param([standing(waiting()), standing(None)], 61, [1], id="stopped"),
        pytest.param([standing(waiting()), standing(None, Activity.SAVING)], 61, [1], id="stopped while saving"),
        pytest.param([standing(waiting()), standing(waiting(8))], 61, [], id="all wait"),
        pytest.param([standing(waiting()), standing(waiting(), step=2)], 61, [1], id="one is behind"),
        pytest.param([standing(waiting()), standing(busy())], 61, [1], id="one is busy in a step"),
        pytest.param([standing(waiting()), standing(waiting())], 59, None, id="not yet"),
        pytest.param([standing(waiting()), standing(busy(), longest=20)], 199, None, id="steps are long"),
        pytest.param([standing(waiting()), standing(busy(), longest=20)], 201, [1], id="longer than long steps"),
        pytest.param([standing(waiting()), standing(busy(), Activity.BETWEEN)], 1799, None, id="between steps"),
        pytest.param([standing(waiting()), standing(busy(), Activity.BETWEEN)], 1801, [1], id="too long between"),
        pytest.param([standing(waiting()), standing(compiling())], 1799, None, id="compiles again"),
        pytest.param([standing(waiting(), Activity.STARTING)] * 2, 1799, None, id="a large model on its way"),
        pytest.param([standing(waiting(), Activity.STARTING)] * 2, 1801, [], id="never started"),
        pytest.param([standing(waiting(), Activity.BETWEEN)] * 2, 61, [], id="all wait in a validation"),
        pytest.param([standing(busy())] * 2, 61, [], id="all are busy"),
    ],
)
def test_what_is_a_hang(ranks: list[Standing], still: float, culprits: list[int] | None) -> None:
    hang = find_hang(dict(enumerate(ranks)), still, LIMITS)
    assert (None if hang is None else hang.culprits) == culprits


def test_the_message_names_ranks_and_lines() -> None:
    hang = find_hang(dict(enumerate([standing(waiting(7)), standing(waiting(9)), standing(waiting(9))])), 61, LIMITS)
    assert hang is not None
    lines = hang.render().splitlines()
    assert lines[0].startswith(
        "no rank of 3 has moved for 61 s (launch.hang_timeout): they wait for each other in diff"
    )
    assert lines[2:4] == [
        "  rank 0 (step 4), waiting for other ranks: /home/me/train.py:7 in step",
        "  ranks 1-2 (step 4), waiting for other ranks: /home/me/train.py:9 in step",
    ]
    assert "stack of ranks 1-2 (most recent call first):" in lines


def test_ranks_are_named_in_ranges() -> None:
    assert (named([3]), named([0, 1, 2, 5, 7, 6])) == ("rank 3", "ranks 0-2, 5-7")


def test_a_board_holds_the_last_word_of_every_rank() -> None:
    with Board.make() as board:
        assert board.read(1) == Beat()
        beats = [Beat(5, Activity.STEP, 2, 0.5), Beat(7, Activity.SAVING, 3, 1.5)]
        for rank, beat in enumerate(beats):
            board.write(rank, beat)
        assert [board.read(0), board.read(1), board.read(2)] == [*beats, Beat()]


def test_still_counts_from_the_last_move_of_any_rank() -> None:
    moves = Moves(2, now=0)
    for now, rank, count in ((10, 0, 1), (20, 1, 1), (30, 1, 1)):
        moves.hear(rank, Beat(count), now)
    assert moves.still(35) == 15


def test_a_move_takes_microseconds() -> None:
    pulse = Pulse()
    with Board.make() as board:
        pulse.begin(lambda beat: board.write(0, beat))
        begin = time.perf_counter()
        for number in range(1000):
            pulse.moved(Activity.STEP, number)
        assert time.perf_counter() - begin < 0.2  # 1,000 of them; a hundred times less than a step's own
        assert board.read(0).moves == 1000


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete", "not come .* within 60 s"),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, Timeout(ms)=600000)", "600 s"),
        ("[pair.cc:537] Read error [10.0.0.7]:19680: Connection closed by peer", "lost contact"),
        ("NCCL error: remote process exited or there was a network error", "lost contact"),
    ],
)
def test_a_failed_collective_is_told_as_what_it_is(said: str, told: str) -> None:
    assert re.search(told, told_of_peers(said))


@pytest.mark.parametrize(
    ("log", "peer_lost", "told"),
    [
        ("[E ProcessGroupNCCL.cpp] Watchdog caught collective operation timeout: Timeout(ms)=5000\n", True, "5 s"),
        ("Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n", False, "gloo or NCCL"),
        ("Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n", False, "killed by SIGABRT"),
    ],
)
def test_an_abort_of_the_watchdog_is_no_first_failure(log: str, peer_lost: bool, told: str, tmp_path: Path) -> None:
    log_file(tmp_path, 0).write_text(log)
    failure = first_failure(tmp_path, {0: Exit(-6, os.getpid(), 1)}, 2)
    assert failure is not None and failure.peer_lost == peer_lost and told in failure.error
