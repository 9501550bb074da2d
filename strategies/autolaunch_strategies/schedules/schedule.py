"""Pipeline schedules as data: who computes what in which order, with which transfers, and how long that takes.

Nothing here imports torch, except for asking it for a table of its own (`build_schedule`).
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from autolaunch_strategies.config import SCHEDULE_SPECS, SCHEDULES, ConfigError, PipelineParallel, nearest, raise_all


class Kind(StrEnum):
    """What is done with one microbatch at one stage."""

    F = "F"
    """Forward."""
    B = "B"
    """All of the backward."""
    I = "I"  # noqa: E741 - the letter that papers and torch use
    """The backward for inputs only."""
    W = "W"
    """The backward for weights only."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


@dataclass(frozen=True)
class Action:
    """One step of one rank.

    `stage` is the stage that computes; for SEND_F and SEND_B the one whose output or input gradient is sent; for
    RECV_F and RECV_B the one that receives its input or the gradient of its output.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order of work of every rank of a pipeline: `actions[pipe rank]` computes, without transfers."""

    name: str
    ranks: int
    virtual_stages: int
    microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """How many stages all ranks have together."""
        return len(self.rank_of_stage)

    @property
    def v_shaped(self) -> bool:
        """Whether the first and the last stage are on the same of several ranks."""
        return self.ranks > 1 and self.rank_of_stage[0] == self.rank_of_stage[-1]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a pipe rank, first stage first."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)


# --- rules -------------------------------------------------------------------------------------------------------


def default_virtual_stages(name: str) -> int:
    """Stages per rank of a schedule by name where nothing else is asked for."""
    return SCHEDULE_SPECS[name].least_stages


def check_schedule(pp: PipelineParallel, ranks: int, microbatches: int | None) -> list[ConfigError]:
    """Everything that is wrong with the schedule of `pp` on `ranks` pipe ranks; an empty list if nothing is.

    Args:
        microbatches: as it was asked for; None if it is to be chosen.
    """
    name = pp.schedule
    if not _is_file(name) and name not in SCHEDULES:
        close = nearest(name, SCHEDULES)
        return [
            ConfigError(
                f"pp.schedule={name}",
                "no such schedule" + (f"; did you mean {close}?" if close else ""),
                f"{', '.join(SCHEDULES)}, or the path of a CSV file",
                f"pp.schedule={close}" if close else "",
            )
        ]
    if pp.loss == "exact" and (_is_file(name) or not SCHEDULE_SPECS[name].any_loss):
        return [
            ConfigError(
                f"pp.loss=exact with pp.schedule={name}",
                "exact works with gpipe alone: "
                "the loss of the whole batch comes after all forwards and before all backwards",
                "pp.schedule=gpipe; or pp.loss=microbatch, if the loss is a mean over samples",
                "pp.loss=microbatch",
            )
        ]
    if pp.loss == "exact" and (pp.virtual_stages or 1) > 1:
        return [
            ConfigError(
                f"pp.loss=exact with pp.virtual_stages={pp.virtual_stages}",
                "the loss of the whole batch needs gpipe, which has one stage per rank",
                "pp.virtual_stages=1; or pp.loss=microbatch with another schedule, if the loss is a mean over samples",
                "pp.virtual_stages=1",
            )
        ]
    if _is_file(name):
        try:
            read_schedule(name, ranks, microbatches, pp.virtual_stages)
        except ConfigError as error:
            return [error]
        return []
    return _check_numbers(name, ranks, microbatches, pp.virtual_stages)


def fitting_microbatches(name: str, ranks: int, virtual_stages: int | None, wanted: int | None, batch: int) -> int:
    """Into how many microbatches a batch is cut; 0 if the schedule cannot run on so few samples.

    The most that the schedule accepts, of those that cut the batch into equal parts if that leaves no rank without
    work. The number of a CSV file is fixed.

    Args:
        wanted: at most so many; None for four per rank.
        batch: samples in the batch.
    """
    if _is_file(name):
        fixed = read_schedule(name, ranks, None, virtual_stages).microbatches
        return fixed if fixed <= batch else 0
    most = min(wanted or 4 * ranks, batch)
    accepted = [number for number in range(most, 0, -1) if SCHEDULE_SPECS[name].accepts(ranks, number)]
    if not accepted:
        return 0
    equal = next((number for number in accepted if batch % number == 0), 0)
    return equal if equal >= min(ranks, accepted[0]) else accepted[0]


def _is_file(name: str) -> bool:
    return name.endswith(".csv")


def _check_numbers(name: str, ranks: int, microbatches: int | None, virtual_stages: int | None) -> list[ConfigError]:
    errors = []
    spec = SCHEDULE_SPECS[name]
    usual, most = spec.least_stages, spec.most_stages
    if virtual_stages is not None and not (usual <= virtual_stages <= (most or virtual_stages)):
        errors.append(
            ConfigError(
                f"pp.virtual_stages={virtual_stages} with pp.schedule={name}",
                f"{name} has {'exactly' if most else 'at least'} {_count(usual, 'stage')} per rank",
                f"pp.virtual_stages={usual}" if most else f"pp.virtual_stages of {usual} or more",
                f"pp.virtual_stages={usual}",
            )
        )
    if microbatches is not None and not spec.accepts(ranks, microbatches):
        where = f"pp.microbatches={microbatches} with pp.schedule={name}"
        if spec.equal_rounds:
            below = next(n for n in range(microbatches, 0, -1) if spec.accepts(ranks, n))
            above = next(n for n in itertools.count(microbatches) if spec.accepts(ranks, n))
            errors.append(
                ConfigError(
                    where,
                    f"{name} works in equal rounds of {ranks} microbatches or more, "
                    f"and {microbatches} cannot be divided into {microbatches // ranks} such rounds",
                    f"1 to {2 * ranks - 1}, multiples of {ranks}, and others that make equal rounds; "
                    f"the nearest are {below} and {above}",
                    f"pp.microbatches={above}",
                )
            )
        else:
            least = spec.least_microbatches * ranks
            errors.append(
                ConfigError(
                    where,
                    f"{name} needs at least as many microbatches as there are stages, {least}",
                    f"pp.microbatches of {least} or more",
                    f"pp.microbatches={least}",
                )
            )
    return errors


# --- tables ------------------------------------------------------------------------------------------------------


def build_schedule(
    name: str, ranks: int, microbatches: int | None = None, virtual_stages: int | None = None
) -> Schedule:
    """The table of a schedule by name, or of a CSV file.

    Args:
        microbatches: None only for a CSV file, which has its own number.
        virtual_stages: stages per rank; None for what the schedule needs.

    Raises:
        ConfigError: the schedule does not exist or does not work with these numbers, or the file is wrong.
    """
    if _is_file(name):
        return read_schedule(name, ranks, microbatches, virtual_stages)
    assert microbatches is not None, f"{name} needs a number of microbatches"
    wanted = PipelineParallel(name, "microbatch", name, microbatches, virtual_stages)
    raise_all(check_schedule(wanted, ranks, microbatches))
    per_rank = virtual_stages or default_virtual_stages(name)
    spec = SCHEDULE_SPECS[name]
    if spec.torch_class is None:
        first = (microbatches if spec.all_forward_first else ranks - rank for rank in range(ranks))
        actions = tuple(_alternating(rank, forwards, microbatches) for rank, forwards in enumerate(first))
    else:
        from autolaunch_strategies.torch_private.pipeline_orders import pipeline_order

        actions = tuple(
            tuple(Action(Kind(kind), stage, microbatch) for stage, kind, microbatch in row)
            for row in pipeline_order(spec.torch_class, ranks, microbatches, per_rank)
        )
    return Schedule(name, ranks, per_rank, microbatches, _placed(name, ranks, per_rank), actions)


def _alternating(stage: int, first: int, microbatches: int) -> tuple[Action, ...]:
    """`first` forwards, then a backward and a forward in turn, then the backwards that are left."""
    actions = [Action(Kind.F, stage, microbatch) for microbatch in range(first)]
    for microbatch in range(microbatches):
        actions.append(Action(Kind.B, stage, microbatch))
        if first + microbatch < microbatches:
            actions.append(Action(Kind.F, stage, first + microbatch))
    return tuple(actions)


def schedule_for_batch(pp: PipelineParallel, rank_of_stage: Sequence[int], batch: int) -> Schedule:
    """The schedule of a batch of `batch` samples; where it has too few for it, all forward and then all backward.

    Args:
        rank_of_stage: the pipe rank of every stage.
    """
    ranks = max(rank_of_stage) + 1
    count = fitting_microbatches(pp.schedule, ranks, pp.virtual_stages, pp.microbatches, batch)
    if count:
        return build_schedule(pp.schedule, ranks, count, pp.virtual_stages)
    return forward_then_backward(rank_of_stage, min(batch, pp.microbatches or batch))


def placement(pp: PipelineParallel, ranks: int) -> tuple[int, ...]:
    """The pipe rank of every stage.

    Raises:
        ConfigError: the schedule is a CSV file that is wrong.
    """
    if pp.loss == "exact":
        return tuple(range(ranks))
    if _is_file(pp.schedule):
        return read_schedule(pp.schedule, ranks).rank_of_stage
    return _placed(pp.schedule, ranks, pp.virtual_stages or default_virtual_stages(pp.schedule))


def _placed(name: str, ranks: int, per_rank: int) -> tuple[int, ...]:
    stages = range(ranks * per_rank)
    if SCHEDULE_SPECS[name].v_shaped:
        return tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in stages)
    return tuple(stage % ranks for stage in stages)


def forward_then_backward(rank_of_stage: Sequence[int], microbatches: int) -> Schedule:
    """A schedule for any number of microbatches on any placement of stages: all forward, then all backward."""
    ranks = max(rank_of_stage) + 1
    actions = []
    for rank in range(ranks):
        own = [stage for stage, home in enumerate(rank_of_stage) if home == rank]
        order = range(microbatches)
        forward = [Action(Kind.F, stage, microbatch) for stage in own for microbatch in order]
        backward = [Action(Kind.B, stage, microbatch) for stage in reversed(own) for microbatch in order]
        actions.append((*forward, *backward))
    per_rank = len(rank_of_stage) // ranks
    return Schedule("forward_then_backward", ranks, per_rank, microbatches, tuple(rank_of_stage), tuple(actions))


Rows = tuple[tuple[Action, ...], ...]
"""Per pipe rank its actions, in order."""


@functools.lru_cache(maxsize=64)
def fill_and_drain(rank_of_stage: tuple[int, ...], microbatches: int) -> tuple[Rows, Rows]:
    """Per pipe rank all forward passes, and all backward passes, with their transfers.

    The first by itself is what evaluation does; something may happen to the output of the whole batch between them.
    """
    rows = with_transfers(forward_then_backward(rank_of_stage, microbatches))
    forward = (Kind.RECV_F, Kind.F, Kind.SEND_F)
    return (
        tuple(tuple(action for action in row if action.kind in forward) for row in rows),
        tuple(tuple(action for action in row if action.kind not in forward) for row in rows),
    )


_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_CELLS_ALLOWED = "stage, F, B, I or W, and microbatch: 0F0, 1B3; an empty cell is idle time"


@dataclass(frozen=True)
class _Cell:
    path: str
    row: int
    column: int
    text: str

    def error(self, problem: str, allowed: str = "") -> ConfigError:
        where = f"pp.schedule={self.path}, row {self.row + 1}, column {self.column + 1}: {self.text}"
        return ConfigError(where, problem, allowed)


def read_schedule(
    path: str, ranks: int, microbatches: int | None = None, virtual_stages: int | None = None
) -> Schedule:
    """A schedule from a CSV file as torch.distributed.pipelining writes them, one row per pipe rank.

    Raises:
        ConfigError: the file cannot be read, is not a schedule that can run, or has other numbers than the given ones;
            with row, column (both from 1) and cell where there is one.
    """
    cells = _read_cells(path, ranks)
    placement = _placement(path, cells, ranks)
    count = 1 + max(action.microbatch for row in cells for action, _ in row)
    _check_cells(path, cells, placement, count)
    actions = tuple(tuple(action for action, _ in row) for row in cells)
    schedule = Schedule(path, ranks, len(placement) // ranks, count, placement, actions)
    for key, asked, has in (
        ("microbatches", microbatches, count),
        ("virtual_stages", virtual_stages, schedule.virtual_stages),
    ):
        if asked is not None and asked != has:
            what = _count(has, "microbatch") if key == "microbatches" else f"{_count(has, 'stage')} per rank"
            raise ConfigError(
                f"pp.{key}={asked} with pp.schedule={path}",
                f"the file has {what}",
                f"pp.{key}={has}, or null for what the file has",
                f"pp.{key}=null",
            )
    try:
        _simulate(schedule, _durations(schedule))
    except _Stuck as stuck:
        raise cells[stuck.rank][stuck.index][1].error(
            f"waits for {stuck.missing}, and the row with that waits as well: no rank can go on",
            "an order in which everything comes after what it needs",
        ) from None
    return schedule


def _read_cells(path: str, ranks: int) -> list[list[tuple[Action, _Cell]]]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            table = list(csv.reader(file))
    except FileNotFoundError:
        raise ConfigError(
            f"pp.schedule={path}", "no such file", f"the path of a CSV file, or {', '.join(SCHEDULES)}"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"pp.schedule={path}", f"cannot be read as CSV: {error}") from error
    while table and not any(text.strip() for text in table[-1]):
        table.pop()
    rows: list[list[tuple[Action, _Cell]]] = []
    for row, texts in enumerate(table):
        rows.append([])
        for column, text in enumerate(texts):
            cell = _Cell(path, row, column, text.strip())
            pair = _PAIR.fullmatch(cell.text)
            for part in pair.groups() if pair else [cell.text] if cell.text else []:
                match = _CELL.fullmatch(part.strip())
                if not match:
                    raise cell.error("not a step of a schedule", _CELLS_ALLOWED)
                rows[-1].append((Action(Kind(match[2]), int(match[1]), int(match[3])), cell))
    if len(rows) != ranks:
        raise ConfigError(
            f"pp.schedule={path}",
            f"the file has {_count(len(rows), 'row')}, but the mesh has {_count(ranks, 'rank')} along pp",
            "one row per rank of pp",
        )
    return rows


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _placement(path: str, cells: list[list[tuple[Action, _Cell]]], ranks: int) -> tuple[int, ...]:
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(cells):
        for action, cell in row:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise cell.error(
                    f"stage {action.stage} is already in row {rank_of[action.stage] + 1}", "each stage in one row only"
                )
    missing = next(stage for stage in itertools.count() if stage not in rank_of)
    if missing < len(rank_of):
        raise ConfigError(f"pp.schedule={path}", f"there is a stage {max(rank_of)}, but no stage {missing}")
    counts = [list(rank_of.values()).count(rank) for rank in range(ranks)]
    if min(counts) != max(counts):
        fewest, most = counts.index(min(counts)), counts.index(max(counts))
        raise ConfigError(
            f"pp.schedule={path}",
            f"row {fewest + 1} has {_count(min(counts), 'stage')}, row {most + 1} has {max(counts)}",
            "as many stages in each row",
        )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def _check_cells(
    path: str, cells: list[list[tuple[Action, _Cell]]], placement: Sequence[int], microbatches: int
) -> None:
    for row in cells:
        done: set[Action] = set()
        for action, cell in row:
            stage, microbatch = action.stage, action.microbatch
            forward, full, inputs, weights = (
                Action(kind, stage, microbatch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            other = {Kind.B: (inputs, weights), Kind.I: (full,), Kind.W: (full,)}.get(action.kind, ())
            if action in done:
                raise cell.error("is there a second time", "every step once")
            if both := next((step for step in other if step in done), None):
                raise cell.error(
                    f"is there beside {both}", "either one B, or one I and one W, for each microbatch at each stage"
                )
            before = {Kind.B: forward, Kind.I: forward, Kind.W: inputs}.get(action.kind)
            if before and before not in done:
                raise cell.error(f"comes before {before}", "F first, then B or I, and W after I")
            done.add(action)
    for stage, rank in enumerate(placement):
        done = {action for action, _ in cells[rank]}
        for microbatch in range(microbatches):
            forward, full, inputs, weights = (
                Action(kind, stage, microbatch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            missing = ""
            if forward not in done:
                missing = str(forward)
            elif inputs in done and weights not in done:
                missing = str(weights)
            elif full not in done and inputs not in done:
                missing = f"{full} (or {inputs} and {weights})"
            if missing:
                raise ConfigError(
                    f"pp.schedule={path}, row {rank + 1}",
                    f"{missing} is missing",
                    f"all of microbatches 0 to {microbatches - 1} at each stage of the row",
                )


# --- time --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One action on one rank from `start` to `end`."""

    rank: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """When every rank does what, as far as the order of work and the durations say; bars in order of start."""

    schedule: Schedule
    bars: tuple[Bar, ...]

    @property
    def length(self) -> float:
        """From the first start to the last end, in the unit of the durations."""
        return max(bar.end for bar in self.bars) - min(bar.start for bar in self.bars)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which nothing is computed, from 0 to 1."""
        return sum(self.idle_shares) / self.schedule.ranks

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The same for each rank."""
        busy, length = [0.0] * self.schedule.ranks, self.length
        for bar in self.bars:
            busy[bar.rank] += bar.end - bar.start
        return tuple(1 - time / length for time in busy)


def timeline(
    schedule: Schedule,
    forward: float = 1.0,
    backward: float = 2.0,
    input_share: float = 0.5,
    transfer: float = 0.0,
    stage_costs: Sequence[float] | None = None,
) -> Timeline:
    """Simulate a schedule: every action starts when its rank is free and what it needs is there.

    Args:
        forward: time of one microbatch on all stages of a rank together (with two stages each takes half of it); with
            stages that take unequal times, on the average of the ranks.
        backward: the same for the backward.
        input_share: the part of the backward that I takes; W takes the rest.
        transfer: from the end of an action to the arrival of its output on another rank.
        stage_costs: the work of every stage, in any unit; None where all have as much.
    """
    durations = _durations(schedule, forward, backward, input_share)
    return Timeline(schedule, _simulate(schedule, durations, transfer, _relative(stage_costs, schedule.stages)))


def _relative(costs: Sequence[float] | None, stages: int) -> list[float]:
    """The work of every stage in units of their average."""
    average = 0.0 if costs is None else sum(costs) / stages
    return [1.0] * stages if costs is None or average <= 0 else [cost / average for cost in costs]


@functools.lru_cache(maxsize=16)
def with_transfers(schedule: Schedule) -> Rows:
    """Per pipe rank the actions of a schedule with every SEND and RECV between them.

    What is computed is sent at once. A RECV comes one pass before the one that needs it, so that something can arrive
    while that computes, and a rank holds what two or three passes need at most. Those from one rank come in the order
    in which it sends them: a GPU carries out what goes from one rank to another in order.

    Carried out in this order no rank waits for ever, if a pass waits for what it needs and nothing else waits for
    anything but the transfers before it from the same rank to the same rank. In one queue for several ranks, or for
    both ways between two, a RECV that comes early holds up a SEND on which it depends.

    Raises:
        ConfigError: the schedule cannot run to its end.
    """
    try:
        _simulate(schedule, _durations(schedule))
    except _Stuck as stuck:
        step = schedule.actions[stuck.rank][stuck.index]
        raise ConfigError(
            f"pp.schedule={schedule.name}",
            f"{step} on pipe rank {stuck.rank} waits for {stuck.missing}, which never comes",
        ) from None
    sent: dict[tuple[int, int], deque[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if pair := _transfer(action, schedule):
                sent.setdefault((rank, schedule.rank_of_stage[pair[1].stage]), deque()).append(pair[1])
    return tuple(_with_transfers(schedule, rank, sent) for rank in range(schedule.ranks))


def _with_transfers(schedule: Schedule, rank: int, sent: dict[tuple[int, int], deque[Action]]) -> tuple[Action, ...]:
    """The actions of a rank with transfers; takes what arrives at it out of `sent`, RECVs by (from, to)."""
    row: list[Action] = []
    begun: set[Action] = set()
    forward: set[Action] = set()  # passes that have been computed

    def receive(action: Action, needed: bool) -> None:
        receives = _received(action, schedule)
        if receives is None:
            return
        queue = sent[schedule.rank_of_stage[receives.stage + (-1 if receives.kind is Kind.RECV_F else 1)], rank]
        while receives not in begun:
            first = queue[0]
            # The shapes of gradients are known from what they are gradients of.
            if first.kind is Kind.RECV_B and Action(Kind.F, first.stage, first.microbatch) not in forward:
                assert not needed, "it is a gradient of what has not been computed"
                return
            row.append(queue.popleft())
            begun.add(first)

    actions = schedule.actions[rank]
    for action, following in itertools.zip_longest(actions, actions[1:]):
        receive(action, needed=True)
        if following is not None:
            receive(following, needed=False)
        row.append(action)
        if action.kind is Kind.F:
            forward.add(action)
        if pair := _transfer(action, schedule):
            row.append(pair[0])
    return tuple(row)


def routes(rank_of_stage: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(from, to) of pipe ranks, for all that send something to another one: activations, or gradients back."""
    forward = [pair for pair in itertools.pairwise(rank_of_stage) if pair[0] != pair[1]]
    return tuple(dict.fromkeys((*forward, *((to, source) for source, to in forward))))


def _received(action: Action, schedule: Schedule) -> Action | None:
    """How the input of an action comes from another rank, if it does."""
    stage, kind = (-1, Kind.RECV_F) if action.kind is Kind.F else (1, Kind.RECV_B)
    peer = action.stage + stage
    if action.kind is Kind.W or not 0 <= peer < schedule.stages:
        return None
    if schedule.rank_of_stage[peer] == schedule.rank_of_stage[action.stage]:
        return None
    return Action(kind, action.stage, action.microbatch)


def _transfer(action: Action, schedule: Schedule) -> tuple[Action, Action] | None:
    """How the output of an action gets to another rank, if it has to."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        peer, kinds = stage + 1, (Kind.SEND_F, Kind.RECV_F)
    elif action.kind in (Kind.B, Kind.I):
        peer, kinds = stage - 1, (Kind.SEND_B, Kind.RECV_B)
    else:
        return None
    if not 0 <= peer < schedule.stages or schedule.rank_of_stage[peer] == schedule.rank_of_stage[stage]:
        return None
    return Action(kinds[0], stage, microbatch), Action(kinds[1], peer, microbatch)


class _Stuck(Exception):
    """No rank can go on; `missing` is what the action `index` of `rank` waits for."""

    def __init__(self, rank: int, index: int, missing: Action) -> None:
        super().__init__(rank, index, missing)
        self.rank, self.index, self.missing = rank, index, missing


def _durations(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, input_share: float = 0.5
) -> dict[Kind, float]:
    of_rank = {
        Kind.F: forward,
        Kind.B: backward,
        Kind.I: backward * input_share,
        Kind.W: backward * (1 - input_share),
    }
    return {kind: time / schedule.virtual_stages for kind, time in of_rank.items()}


def _simulate(
    schedule: Schedule, durations: dict[Kind, float], transfer: float = 0.0, relative: Sequence[float] | None = None
) -> tuple[Bar, ...]:
    """Bars in order of start. Raises `_Stuck` if the order of work needs something that comes later.

    Args:
        relative: per stage by what durations are multiplied.
    """
    relative = relative or [1.0] * schedule.stages
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    at = [0] * schedule.ranks
    bars = []
    waiting: dict[Action, int] = {}  # what a rank waits for -> the rank
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(schedule.actions[rank]):
            action = schedule.actions[rank][at[rank]]
            needed = _needs(action, schedule.stages)
            done = [step for step in needed if step in ends]
            if needed and not done:
                for step in needed:
                    waiting[step] = rank
                break
            arrival = max(
                (ends[step] + (transfer if schedule.rank_of_stage[step.stage] != rank else 0.0) for step in done),
                default=0.0,
            )
            start = max(free[rank], arrival)
            free[rank] = ends[action] = start + durations[action.kind] * relative[action.stage]
            bars.append(Bar(rank, start, free[rank], action))
            at[rank] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    for rank, index in enumerate(at):
        if index < len(schedule.actions[rank]):
            needed = _needs(schedule.actions[rank][index], schedule.stages)
            planned = set(schedule.actions[schedule.rank_of_stage[needed[0].stage]])
            raise _Stuck(rank, index, next((step for step in needed if step in planned), needed[0]))
    return tuple(sorted(bars, key=lambda bar: (bar.start, bar.rank)))


def _needs(action: Action, stages: int) -> tuple[Action, ...]:
    """Actions any one of which must have ended before `action` starts; nothing for the first."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return (Action(Kind.F, stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.W:
        return (Action(Kind.I, stage, microbatch),)
    if stage == stages - 1:
        return (Action(Kind.F, stage, microbatch),)
    return Action(Kind.B, stage + 1, microbatch), Action(Kind.I, stage + 1, microbatch)
