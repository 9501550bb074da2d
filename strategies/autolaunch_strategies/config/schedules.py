"""Which pipeline schedules there are, and what is true of each: data that checks, runs and predictions read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleSpec:
    """One schedule. Its order of work is a table of torch's, or ours: a forward and a backward in turn."""

    name: str
    torch_class: str | None = None
    """The class in torch.distributed.pipelining.schedules whose order table it has; None: ours."""
    least_stages: int = 2
    """Stages per rank that it has at least, and if nothing else is asked for."""
    most_stages: int | None = None
    """Stages per rank that it has at most; None: any number."""
    v_shaped: bool = False
    """The second stages of the ranks come on the way back: the first rank has the first and the last stage."""
    equal_rounds: bool = False
    """Microbatches have to make equal rounds of as many as there are ranks, or more."""
    least_microbatches: int = 0
    """It needs at least so many for each rank; 0: one is enough for all."""
    all_forward_first: bool = False
    """Every forward pass comes before every backward pass, so all microbatches are in memory at once."""
    splits_backward: bool = False
    """Gradients of weights are computed apart from those of inputs."""
    pairs_passes: bool = False
    """A forward pass of one microbatch and a backward pass of another are one step."""
    waits: tuple[tuple[float, float, float], ...] = ((1, 1, 1),)
    """How long the busiest rank waits in a step of many microbatches: the longest of these sums of the other ranks'
    forward passes, backward passes for inputs, and for weights, of one microbatch, over its number of stages."""
    any_loss: bool = False
    """The loss may see the whole batch (pp.loss=exact)."""
    complexity: int = 6
    """Of schedules that are as fast the least is chosen."""
    better: str = ""
    """Another one that waits as long and holds fewer microbatches in memory; if it can run, this one has no point."""
    first_look: bool = False
    """A plan looks at it even where there are too many ways to look at all."""

    def accepts(self, ranks: int, microbatches: int) -> bool:
        """Whether it can run so many; the rules of torch 2.11 to 2.13 (torch/distributed/pipelining/schedules.py)."""
        if self.equal_rounds:
            return microbatches % max(1, microbatches // ranks) == 0
        return microbatches >= max(1, self.least_microbatches * ranks)


_FILLED = ((1, 1, -1), (1, 0, 0))
"""`waits` where gradients of weights fill a part (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, table 2)."""

SCHEDULE_SPECS = {
    spec.name: spec
    for spec in (
        ScheduleSpec(
            "gpipe",
            least_stages=1,
            most_stages=1,
            all_forward_first=True,
            any_loss=True,
            complexity=2,
            better="1f1b",
        ),
        ScheduleSpec("1f1b", least_stages=1, most_stages=1, least_microbatches=1, complexity=2, first_look=True),
        ScheduleSpec(
            "looped_bfs", "ScheduleLoopedBFS", all_forward_first=True, complexity=4, better="interleaved_1f1b"
        ),
        ScheduleSpec("interleaved_1f1b", "ScheduleInterleaved1F1B", equal_rounds=True, complexity=4, first_look=True),
        ScheduleSpec(
            "interleaved_zero_bubble",
            "ScheduleInterleavedZeroBubble",
            equal_rounds=True,
            splits_backward=True,
            waits=_FILLED,
        ),
        ScheduleSpec(
            "zbv_zero_bubble",
            "ScheduleZBVZeroBubble",
            most_stages=2,
            v_shaped=True,
            splits_backward=True,
            waits=((1, 0, 0), (0, 1, 0)),  # fitted to torch's tables: a step ends on all ranks together
            first_look=True,
        ),
        ScheduleSpec(
            "dualpipev",
            "ScheduleDualPipeV",
            most_stages=2,
            v_shaped=True,
            least_microbatches=2,
            splits_backward=True,
            pairs_passes=True,
            waits=_FILLED,
        ),
    )
}
"""By name. A new one is an entry here, and a file of its name in conf/pp."""

SCHEDULES = tuple(SCHEDULE_SPECS)
"""Their names; the path of a CSV file is a schedule, too."""
