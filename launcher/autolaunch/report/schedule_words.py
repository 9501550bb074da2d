"""What a pipeline's schedule is called, how its kinds of actions look, and what is counted of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autolaunch.report.readable import counted
from autolaunch_strategies.schedules.schedule import Kind, Schedule, Timeline


@dataclass(frozen=True)
class KindLook:
    """How one kind of action is shown."""

    sign: str
    """In the terminal."""
    colour: str
    deep: str
    """The colour of the last stage of a rank."""
    words: str

    def colour_of(self, chunk: int, chunks: int) -> str:
        """The colour of one of a rank's stages, later ones darker."""
        share = chunk / max(chunks - 1, 1)
        pairs = ((int(self.colour[at : at + 2], 16), int(self.deep[at : at + 2], 16)) for at in (1, 3, 5))
        return "#" + "".join(f"{round(one + share * (other - one)):02X}" for one, other in pairs)


# What comes together in a schedule differs in lightness or between blue and yellow, not only between red and green, so
# that colour-blind people can tell the kinds apart, and grey print can where I does not meet B.
LOOKS = {
    Kind.F: KindLook(">", "#B0D9F1", "#78B3DB", "forward"),
    Kind.B: KindLook("<", "#E67A38", "#BC4F10", "backward"),
    Kind.I: KindLook("(", "#DD9BC0", "#B5689A", "backward for inputs"),
    Kind.W: KindLook("=", "#2A7F6C", "#134E41", "backward for weights"),
}


def kinds_in(timeline: Timeline) -> list[Kind]:
    """The kinds of actions that there are, in the order in which they are shown."""
    kinds = {bar.action.kind for bar in timeline.bars}
    return [kind for kind in LOOKS if kind in kinds]


def stage_noun(schedule: Schedule) -> str:
    return "stage" if schedule.virtual_stages == 1 else "stages"


def schedule_title(schedule: Schedule) -> str:
    each = "" if schedule.virtual_stages == 1 else f", {schedule.virtual_stages} stages each"
    parts, ranks = counted(schedule.microbatches, "microbatch", "es"), counted(schedule.ranks, "rank")
    return f"{Path(schedule.name).name}: {parts} on {ranks}{each}"


def idle_line(timeline: Timeline) -> str:
    forward = sum(bar.end - bar.start for bar in timeline.bars if bar.action.kind is Kind.F)
    backward = sum(bar.end - bar.start for bar in timeline.bars if bar.action.kind is not Kind.F)
    ratio = f"{backward / forward:.3g}"
    forwards = "1 forward" if ratio == "1" else f"{ratio} forwards"
    return f"idle {timeline.idle_share:.1%} of all ranks' time, with a backward as long as {forwards}"


def forward_time(timeline: Timeline) -> float:
    """The forward of one microbatch on all stages of a rank, on average, in the timeline's unit of time."""
    forward = sum(bar.end - bar.start for bar in timeline.bars if bar.action.kind is Kind.F)
    return forward / (timeline.schedule.microbatches * timeline.schedule.ranks)


def shortest_bar(timeline: Timeline, kind: Kind | None = None) -> float:
    """The shortest bar (of a kind, 0 without one) that a picture shows whole; stages may have next to no work."""
    lengths = [bar.end - bar.start for bar in timeline.bars if kind in (None, bar.action.kind)]
    least = forward_time(timeline) / timeline.schedule.virtual_stages / 4
    return max(least, min(lengths)) if lengths else 0.0


def stage_names(schedule: Schedule, rank: int, most: int) -> str:
    stages = [str(stage) for stage in schedule.stages_of(rank)]
    return ", ".join(stages if len(stages) <= most else [stages[0], "...", stages[-1]])


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on `colour`."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "#FFFFFF"
