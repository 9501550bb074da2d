"""Pipeline schedules: complete tables, transfers that cannot block each other, rules, files, and idle time."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autolaunch_strategies.config import SCHEDULE_SPECS, SCHEDULES, ConfigError, ConfigErrors, PipelineParallel
from autolaunch_strategies.schedules.schedule import (
    Action,
    Kind,
    Rows,
    Schedule,
    build_schedule,
    check_schedule,
    default_virtual_stages,
    fill_and_drain,
    fitting_microbatches,
    forward_then_backward,
    routes,
    timeline,
    with_transfers,
)
from tests import ROOT
from tests.support.messages import Told, assert_only_told, assert_told

NAMES = "gpipe, 1f1b, looped_bfs, interleaved_1f1b, interleaved_zero_bubble, zbv_zero_bubble, dualpipev"
MICROBATCHES = {
    "interleaved_1f1b": {1: (1, 5), 2: (1, 3, 8), 4: (3, 10, 16)},
    "interleaved_zero_bubble": {1: (1, 5), 2: (1, 3, 8), 4: (3, 10, 16)},
    "1f1b": {1: (1, 5), 2: (2, 3, 8), 4: (4, 5, 16)},
    "dualpipev": {1: (2, 5), 2: (4, 5, 8), 4: (8, 9, 16)},
}
ANY = {1: (1, 5), 2: (1, 3, 8), 4: (1, 5, 16)}
TABLES = [
    pytest.param(name, ranks, microbatches, virtual, id=f"{name}-{ranks}x{microbatches}-v{virtual}")
    for name in SCHEDULES
    for ranks, counts in MICROBATCHES.get(name, ANY).items()
    for microbatches in counts
    for virtual in ((2, 3) if name.startswith(("interleaved", "looped")) else (default_virtual_stages(name),))
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "virtual"), TABLES)
def test_each_stage_works_once_on_each_microbatch(name: str, ranks: int, microbatches: int, virtual: int) -> None:
    schedule = build_schedule(name, ranks, microbatches, virtual)
    assert (schedule.stages, schedule.virtual_stages, len(schedule.actions)) == (ranks * virtual, virtual, ranks)
    for rank, actions in enumerate(schedule.actions):
        assert {action.stage for action in actions} == set(schedule.stages_of(rank))
        assert len(schedule.stages_of(rank)) == virtual
        done: dict[tuple[int, int], str] = {}
        for action in actions:
            place = (action.stage, action.microbatch)
            done[place] = done.get(place, "") + action.kind
        assert set(done) == {(s, m) for s in schedule.stages_of(rank) for m in range(microbatches)}
        assert set(done.values()) <= {"FB", "FIW"}


def test_placement() -> None:
    assert build_schedule("1f1b", 4, 8).rank_of_stage == (0, 1, 2, 3)
    assert build_schedule("interleaved_1f1b", 2, 4, 3).rank_of_stage == (0, 1, 0, 1, 0, 1)
    v = build_schedule("zbv_zero_bubble", 4, 8)
    assert v.rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (v.v_shaped, v.stages_of(1)) == (True, (1, 6))
    assert not build_schedule("interleaved_1f1b", 4, 8).v_shaped


def test_order_of_gpipe_and_1f1b() -> None:
    rows = [" ".join(map(str, row)) for row in build_schedule("gpipe", 2, 3).actions]
    assert rows == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    rows = [" ".join(map(str, row)) for row in build_schedule("1f1b", 3, 4).actions]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


# --- transfers ---------------------------------------------------------------------------------------------------


def message(action: Action) -> Action:
    """What a RECV takes is what the SEND of the neighbouring stage sent."""
    if action.kind == Kind.RECV_F:
        return Action(Kind.SEND_F, action.stage - 1, action.microbatch)
    if action.kind == Kind.RECV_B:
        return Action(Kind.SEND_B, action.stage + 1, action.microbatch)
    return action


def peer(action: Action, schedule: Schedule) -> int:
    down = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return schedule.rank_of_stage[action.stage + (1 if down else -1)]


@dataclass
class Entry:
    """Something in a queue of a device: it begins when the one before it in its queue, and what it needs, has ended."""

    action: Action
    before: list[Entry]
    ended: bool = False


Queue = Callable[[int, int], object]
"""Which queue of a rank takes a transfer (from, to)."""


def stuck(schedule: Schedule, rows: Rows, queue: Queue) -> list[Action]:
    """Carry out `rows` as GPUs with NCCL do; what can never begin.

    A rank has a queue of passes, and some of transfers, and puts everything into them without waiting. A transfer
    begins when both ends come to it, each behind its passes so far; it holds up what follows in both queues.
    """
    transfers: dict[Action, list[Entry]] = {}
    entries: list[Entry] = []
    for rank, row in enumerate(rows):
        ends: dict[object, Entry] = {}  # the last entry of every queue
        receives: dict[Action, Entry] = {}
        for action in row:
            if len(action.kind) > 1:
                to = peer(action, schedule)
                name = queue(*((rank, to) if action.kind in (Kind.SEND_F, Kind.SEND_B) else (to, rank)))
                entry = Entry(action, [ends[key] for key in (("transfer", name), "passes") if key in ends])
                ends["transfer", name] = receives[action] = entry
                transfers.setdefault(message(action), []).append(entry)
            else:
                s, m = action.stage, action.microbatch
                kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
                needed = receives.pop(Action(kind, s, m), None) if action.kind is not Kind.W else None
                entry = Entry(action, [entry for entry in (ends.get("passes"), needed) if entry is not None])
                ends["passes"] = entry
                entries.append(entry)
    assert all(len(pair) == 2 for pair in transfers.values()), "sent and not received, or the other way round"
    waiting = [[entry] for entry in entries] + list(transfers.values())
    while True:
        ready = [both for both in waiting if all(before.ended for entry in both for before in entry.before)]
        if not ready:
            return [both[0].action for both in waiting]
        for both in ready:
            for entry in both:
                entry.ended = True
        waiting = [both for both in waiting if not both[0].ended]


def by_route(source: int, to: int) -> object:
    return source, to


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """What must come before an action on its rank, any of the last two if there are three."""
    s, m, last = action.stage, action.microbatch, schedule.stages - 1
    if action.kind is Kind.F:
        return [Action(Kind.RECV_F, s, m), Action(Kind.F, s - 1, m)] if s else []
    if action.kind in (Kind.B, Kind.I):
        return [Action(kind, s + 1, m) for kind in (Kind.B, Kind.I)] + [Action(Kind.RECV_B, s, m)] if s < last else []
    return {
        Kind.W: [Action(Kind.I, s, m)],
        Kind.SEND_F: [Action(Kind.F, s, m)],
        Kind.SEND_B: [Action(Kind.B, s, m), Action(Kind.I, s, m)],
        Kind.RECV_B: [Action(Kind.F, s, m)],  # which tells its shape
    }.get(action.kind, [])


@pytest.mark.parametrize(("name", "ranks", "microbatches", "virtual"), TABLES)
def test_transfers(name: str, ranks: int, microbatches: int, virtual: int) -> None:
    schedule = build_schedule(name, ranks, microbatches, virtual)
    rows = with_transfers(schedule)
    computing = tuple(tuple(action for action in row if len(action.kind) == 1) for row in rows)
    assert computing == schedule.actions
    sends, receives = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)
    for here in range(ranks):
        for there in range(ranks):
            sent = [a for a in rows[here] if a.kind in sends and peer(a, schedule) == there]
            assert sent == [message(a) for a in rows[there] if a.kind in receives and peer(a, schedule) == here]
            assert not sent or (here, there) in routes(schedule.rank_of_stage)
    crossings = sum(a != b for a, b in zip(schedule.rank_of_stage, schedule.rank_of_stage[1:], strict=False))
    assert sum(len(action.kind) > 1 for row in rows for action in row) == 2 * 2 * crossings * microbatches
    for row in rows:
        have: set[Action] = set()
        held = 0
        for action in row:
            needed = needs(action, schedule)
            assert not needed or have.intersection(needed), action
            have.add(action)
            held += action.kind in receives
            held -= len(action.kind) == 1 and bool(have.intersection(a for a in needed if a.kind in receives))
            assert held <= 3, "received long before it is needed"
    assert stuck(schedule, rows, by_route) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_of_many_microbatches_wait_for_nobody(name: str) -> None:
    schedule = build_schedule(name, 8, 32, SCHEDULE_SPECS[name].most_stages or 3)
    assert stuck(schedule, with_transfers(schedule), by_route) == []


@pytest.mark.parametrize("queue", [lambda *_: "one", lambda *ends: tuple(sorted(ends))], ids=["of a rank", "of a pair"])
def test_receives_that_come_early_need_queues_of_their_own(queue: Queue) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    assert stuck(schedule, with_transfers(schedule), queue)


@pytest.mark.parametrize("rank_of_stage", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1)])
def test_what_is_done_before_and_behind_a_loss_of_the_whole_batch(rank_of_stage: tuple[int, ...]) -> None:
    schedule = forward_then_backward(rank_of_stage, 5)
    halves = fill_and_drain(rank_of_stage, 5)
    for half in halves:
        assert stuck(schedule, half, by_route) == []
    both = [[*first, *second] for first, second in zip(*halves, strict=True)]
    assert [sorted(map(str, row)) for row in both] == [sorted(map(str, row)) for row in with_transfers(schedule)]
    assert tuple(tuple(a for a in row if len(a.kind) == 1) for row in both) == schedule.actions


def test_a_receive_begins_one_pass_early() -> None:
    rows = [" ".join(map(str, row)) for row in with_transfers(build_schedule("1f1b", 2, 2))]
    assert rows == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_a_table_that_cannot_run_has_no_transfers() -> None:
    F, B = Kind.F, Kind.B
    rows = ((Action(F, 0, 0), Action(B, 0, 0)), (Action(B, 1, 0), Action(F, 1, 0)))
    with pytest.raises(ConfigError) as error:
        with_transfers(Schedule("own", 2, 1, 1, (0, 1), rows))
    assert_only_told(error.value, Told("pp.schedule=own", "0B0", "pipe rank 0", "waits for 1B0"))


# --- files -------------------------------------------------------------------------------------------------------


def test_a_file_that_torch_wrote(tmp_path: Path) -> None:
    from torch.distributed.pipelining import ScheduleDualPipeV
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    stages: Any = [SimpleNamespace(num_stages=4, group_size=2, group_rank=0, submod=None) for _ in range(2)]
    file = tmp_path / "mine.csv"
    PipelineScheduleMulti._dump_csv(ScheduleDualPipeV(stages, 6), file)
    assert "OVERLAP_F_B" in file.read_text()
    read, built = build_schedule(str(file), 2), build_schedule("dualpipev", 2, 6)
    assert read == Schedule(str(file), 2, 2, 6, built.rank_of_stage, built.actions)
    assert read.v_shaped
    pp = PipelineParallel("custom", "microbatch", str(file))
    assert check_schedule(pp, 2, None) == []
    assert [fitting_microbatches(str(file), 2, None, None, batch) for batch in (5, 6, 13)] == [0, 6, 6]


GOOD = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param(
            GOOD.replace("1B0", "1X0"),
            Told("pp.schedule=my.csv, row 2, column 3: 1X0", "not a step", allowed=("F, B, I or W", "0F0")),
            id="unknown cell",
        ),
        pytest.param(
            GOOD.replace("1B0", "1RECV_B0"),
            Told("pp.schedule=my.csv, row 2, column 3: 1RECV_B0", "not a step", allowed=("F, B, I or W", "0F0")),
            id="a transfer",
        ),
        pytest.param(
            GOOD + "2F0,2F1,2B0,2B1",
            Told("pp.schedule=my.csv", "3 rows", "2 ranks along pp"),
            id="too many rows",
        ),
        pytest.param(
            "",
            Told("pp.schedule=my.csv", "0 rows", "2 ranks along pp"),
            id="empty",
        ),
        pytest.param(
            GOOD.replace("0B1", "1B1"),
            Told("pp.schedule=my.csv, row 2, column 2: 1F0", "stage 1", "row 1"),
            id="a stage on two ranks",
        ),
        pytest.param(
            GOOD.replace("1F", "2F").replace("1B", "2B"),
            Told("pp.schedule=my.csv", "a stage 2", "no stage 1"),
            id="a stage left out",
        ),
        pytest.param(
            "0F0,1F0,1B0,0B0\n2F0,2B0",
            Told("pp.schedule=my.csv", "row 2 has 1 stage", "row 1 has 2"),
            id="uneven stages",
        ),
        pytest.param(
            "0F0,0B0\n\n",
            Told("pp.schedule=my.csv", "1 row", "2 ranks along pp"),
            id="an empty row",
        ),
        pytest.param(
            GOOD.replace("0F1", "0F0"),
            Told("pp.schedule=my.csv, row 1, column 2: 0F0", "second time"),
            id="twice",
        ),
        pytest.param(
            GOOD.replace("0B1", "0W0"),
            Told("pp.schedule=my.csv, row 1, column 6: 0W0", "beside 0B0"),
            id="B and W",
        ),
        pytest.param(
            GOOD.replace("1F1,1B1", "1B1,1F1"),
            Told("pp.schedule=my.csv, row 2, column 4: 1B1", "before 1F1", allowed=("F first", "W after I")),
            id="backward first",
        ),
        pytest.param(
            GOOD.replace("1B1", "1W1"),
            Told("pp.schedule=my.csv, row 2, column 5: 1W1", "before 1I1", allowed=("F first", "W after I")),
            id="weights first",
        ),
        pytest.param(
            GOOD.replace("1B1", "1I1"),
            Told("pp.schedule=my.csv, row 2", "1W1", "missing", allowed=("0 to 1",)),
            id="no weights",
        ),
        pytest.param(
            GOOD.replace(",1B1", ""),
            Told("pp.schedule=my.csv, row 2", "1B1", "1I1", "1W1", "missing", allowed=("0 to 1",)),
            id="no backward",
        ),
        pytest.param(
            GOOD.replace("0F1", "0F7").replace("0B1", "0B7"),
            Told("pp.schedule=my.csv, row 1", "0F1", "missing", allowed=("0 to 7",)),
            id="a microbatch left out",
        ),
        pytest.param(
            "0F0,0B0,0F1,0B1\n1F0,1F1,1I1,1W1,1I0,1W0\n",
            Told("pp.schedule=my.csv, row 1, column 2: 0B0", "1I0", "no rank can go on"),
            id="deadlock",
        ),
    ],
)
def test_a_wrong_file(text: str, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.csv").write_text(text)
    errors = check_schedule(PipelineParallel("own", "microbatch", "my.csv"), 2, None)
    assert_only_told(ConfigErrors(errors), told)


@pytest.mark.parametrize(
    ("changes", "microbatches", "told"),
    [
        pytest.param({}, 2, [], id="the same number"),
        pytest.param({"virtual_stages": 1}, None, [], id="the same stages"),
        pytest.param(
            {},
            4,
            Told(
                "pp.microbatches=4 with pp.schedule=my.csv",
                "2 microbatches",
                allowed=("pp.microbatches=2",),
                write="pp.microbatches=null",
            ),
            id="other microbatches",
        ),
        pytest.param(
            {"virtual_stages": 2},
            None,
            Told(
                "pp.virtual_stages=2 with pp.schedule=my.csv",
                "1 stage",
                allowed=("pp.virtual_stages=1",),
                write="pp.virtual_stages=null",
            ),
            id="other stages",
        ),
        pytest.param(
            {"schedule": "no.csv"},
            None,
            Told("pp.schedule=no.csv", "no such file", allowed=(NAMES,)),
            id="no file",
        ),
    ],
)
def test_numbers_of_a_file(
    changes: dict[str, Any],
    microbatches: int | None,
    told: Told | list[Told],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.csv").write_text(GOOD)
    pp = PipelineParallel(**{"name": "own", "loss": "microbatch", "schedule": "my.csv"} | changes)
    assert_only_told(ConfigErrors(check_schedule(pp, 2, microbatches)), told)


def test_a_file_of_every_table_is_the_table(tmp_path: Path) -> None:
    for name in SCHEDULES:
        built = build_schedule(name, 2, 4)
        file = tmp_path / f"{name}.csv"
        with file.open("w", newline="") as out:
            csv.writer(out).writerows(built.actions)
        assert build_schedule(str(file), 2, 4) == Schedule(
            str(file), 2, built.virtual_stages, 4, built.rank_of_stage, built.actions
        )


# --- rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "ranks", "microbatches", "told"),
    [
        pytest.param({"loss": "exact", "schedule": "gpipe"}, 4, 1, [], id="exact"),
        pytest.param({"schedule": "dualpipev"}, 4, None, [], id="chosen"),
        pytest.param({"schedule": "interleaved_1f1b", "virtual_stages": 3}, 4, 10, [], id="equal rounds"),
        pytest.param(
            {"schedule": "1f1"},
            4,
            None,
            [Told("pp.schedule=1f1", "1f1b", allowed=(NAMES, "CSV file"), write="pp.schedule=1f1b")],
            id="typo",
        ),
        pytest.param(
            {"schedule": "qqq"},
            4,
            None,
            [Told("pp.schedule=qqq", "no such schedule", allowed=(NAMES, "CSV file"))],
            id="unknown",
        ),
        pytest.param(
            {"loss": "exact", "schedule": "1f1b"},
            4,
            2,
            [
                Told(
                    "pp.loss=exact with pp.schedule=1f1b",
                    "exact",
                    "gpipe",
                    allowed=("pp.schedule=gpipe", "pp.loss=microbatch"),
                    write="pp.loss=microbatch",
                )
            ],
            id="exact with another schedule",
        ),
        pytest.param(
            {"loss": "exact", "virtual_stages": 2},
            4,
            None,
            [
                Told(
                    "pp.loss=exact with pp.virtual_stages=2",
                    "gpipe",
                    "one stage",
                    allowed=("pp.virtual_stages=1", "pp.loss=microbatch"),
                    write="pp.virtual_stages=1",
                )
            ],
            id="exact with virtual stages",
        ),
        pytest.param(
            {"schedule": "1f1b", "virtual_stages": 2},
            4,
            3,
            [
                Told(
                    "pp.virtual_stages=2 with pp.schedule=1f1b",
                    "1f1b",
                    "exactly 1 stage",
                    allowed="pp.virtual_stages=1",
                    write="pp.virtual_stages=1",
                ),
                Told(
                    "pp.microbatches=3 with pp.schedule=1f1b",
                    "1f1b",
                    "stages",
                    "4",
                    allowed="pp.microbatches of 4 or more",
                    write="pp.microbatches=4",
                ),
            ],
            id="two at once",
        ),
        pytest.param(
            {"schedule": "zbv_zero_bubble", "virtual_stages": 4},
            4,
            1,
            [
                Told(
                    "pp.virtual_stages=4 with pp.schedule=zbv_zero_bubble",
                    "zbv_zero_bubble",
                    "exactly 2 stages",
                    allowed="pp.virtual_stages=2",
                    write="pp.virtual_stages=2",
                )
            ],
            id="zbv",
        ),
        pytest.param(
            {"schedule": "looped_bfs", "virtual_stages": 1},
            4,
            1,
            [
                Told(
                    "pp.virtual_stages=1 with pp.schedule=looped_bfs",
                    "looped_bfs",
                    "at least 2 stages",
                    allowed="pp.virtual_stages of 2 or more",
                    write="pp.virtual_stages=2",
                )
            ],
            id="looped",
        ),
        pytest.param(
            {"schedule": "interleaved_zero_bubble"},
            4,
            11,
            [
                Told(
                    "pp.microbatches=11 with pp.schedule=interleaved_zero_bubble",
                    "interleaved_zero_bubble",
                    "rounds of 4 microbatches",
                    "11",
                    "2 such rounds",
                    allowed=("1 to 7", "multiples of 4", "10 and 12"),
                    write="pp.microbatches=12",
                )
            ],
            id="rounds",
        ),
        pytest.param(
            {"schedule": "dualpipev"},
            4,
            7,
            [
                Told(
                    "pp.microbatches=7 with pp.schedule=dualpipev",
                    "dualpipev",
                    "stages",
                    "8",
                    allowed="pp.microbatches of 8 or more",
                    write="pp.microbatches=8",
                )
            ],
            id="dualpipev",
        ),
    ],
)
def test_rules(pp: dict[str, Any], ranks: int, microbatches: int | None, told: list[Told]) -> None:
    found = check_schedule(PipelineParallel(**{"loss": "microbatch"} | pp), ranks, microbatches)
    assert_only_told(ConfigErrors(found), told)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("gpipe", "1f1b")])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_rules_are_those_of_torch(name: str, ranks: int) -> None:
    from autolaunch_strategies.torch_private.pipeline_orders import pipeline_order

    torch_class = SCHEDULE_SPECS[name].torch_class
    assert torch_class is not None

    def torch_accepts(microbatches: int) -> bool:
        try:
            return bool(pipeline_order(torch_class, ranks, microbatches, 2))
        except ValueError:
            return False

    pp = PipelineParallel(name, "microbatch", name)
    ours = [not check_schedule(pp, ranks, microbatches) for microbatches in range(1, 14)]
    assert ours == [torch_accepts(microbatches) for microbatches in range(1, 14)]


@pytest.mark.parametrize(
    ("name", "ranks", "wanted", "batch", "cut"),
    [
        pytest.param("gpipe", 2, None, 32, 8, id="four per rank"),
        pytest.param("gpipe", 2, None, 5, 5, id="one sample each"),
        pytest.param("gpipe", 2, 4, 6, 3, id="equal parts"),
        pytest.param("gpipe", 2, 4, 7, 4, id="no equal parts"),
        pytest.param("gpipe", 4, 8, 9, 8, id="equal parts would be too few"),
        pytest.param("gpipe", 4, 2, 6, 2, id="fewer than ranks were asked for"),
        pytest.param("gpipe", 4, None, 1, 1, id="one sample"),
        pytest.param("1f1b", 4, None, 3, 0, id="1f1b with too few"),
        pytest.param("1f1b", 4, 8, 12, 6, id="1f1b"),
        pytest.param("dualpipev", 2, 8, 3, 0, id="dualpipev with too few"),
        pytest.param("dualpipev", 2, 8, 6, 6, id="dualpipev"),
        pytest.param("interleaved_1f1b", 4, 16, 11, 10, id="equal rounds in unequal parts"),
        pytest.param("interleaved_1f1b", 4, 16, 14, 7, id="equal rounds in equal parts"),
        pytest.param("interleaved_zero_bubble", 2, 8, 3, 3, id="one round"),
        pytest.param("zbv_zero_bubble", 2, None, 64, 8, id="zbv"),
    ],
)
def test_how_a_batch_is_cut(name: str, ranks: int, wanted: int | None, batch: int, cut: int) -> None:
    assert fitting_microbatches(name, ranks, None, wanted, batch) == cut


def test_a_schedule_that_is_refused_is_not_built() -> None:
    with pytest.raises(ConfigError) as error:
        build_schedule("dualpipev", 2, 3)
    key = "pp.microbatches=3 with pp.schedule=dualpipev"
    assert_told(error.value, key, "dualpipev", "stages", "4", write="pp.microbatches=4")


def test_rules_need_no_torch() -> None:
    code = (
        "import sys; from autolaunch_strategies.schedules.schedule import *; "
        "from autolaunch_strategies.config import PipelineParallel; "
        "check_schedule(PipelineParallel(loss='microbatch', schedule='dualpipev'), 2, 4); "
        "timeline(build_schedule('1f1b', 2, 4)); assert 'torch' not in sys.modules"
    )
    roots = [str(ROOT / "strategies")]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(roots)})


# --- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 24])
def test_idle_time_of_known_schedules(ranks: int, microbatches: int) -> None:
    def idle(name: str, virtual: int | None = None) -> float:
        return timeline(build_schedule(name, ranks, microbatches, virtual)).idle_share

    p, m = ranks, microbatches
    assert idle("gpipe") == idle("1f1b") == pytest.approx((p - 1) / (m + p - 1))  # Huang 2019, Narayanan 2021
    for virtual in (2, 3):
        assert idle("interleaved_1f1b", virtual) == pytest.approx((p - 1) / (virtual * m + p - 1))  # Narayanan 2021
        assert idle("looped_bfs", virtual) == pytest.approx((p - 1) / (virtual * m + p - 1))  # Lamy-Poirier 2022
    if m >= 2 * p:  # F, I and W take equal time: half a forward is lost per further rank
        assert idle("zbv_zero_bubble") == pytest.approx((p - 1) / 2 / (3 * m + (p - 1) / 2))  # Qi 2024


def test_durations() -> None:
    bars = timeline(build_schedule("1f1b", 2, 2), forward=1, backward=3, transfer=0.5).bars
    times = {f"{bar.rank}:{bar.action}": (bar.start, bar.end) for bar in bars}
    assert times == {
        "0:0F0": (0, 1),
        "0:0F1": (1, 2),
        "1:1F0": (1.5, 2.5),
        "1:1B0": (2.5, 5.5),
        "1:1F1": (5.5, 6.5),
        "0:0B0": (6, 9),
        "1:1B1": (6.5, 9.5),
        "0:0B1": (10, 13),
    }
    line = timeline(build_schedule("zbv_zero_bubble", 2, 4), forward=2, backward=4, input_share=0.25)
    assert {(bar.action.kind, bar.end - bar.start) for bar in line.bars} == {(Kind.F, 1), (Kind.I, 0.5), (Kind.W, 1.5)}
    assert line.length == max(bar.end for bar in line.bars)
    assert line.idle_share == pytest.approx(1 - 2 * 4 * 6 / (2 * line.length))
    assert sum(line.idle_shares) / 2 == pytest.approx(line.idle_share)
