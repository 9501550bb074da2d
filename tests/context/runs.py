"""What a model that was trained with cp shows of how its modules ran."""

from __future__ import annotations

from autolaunch_strategies.apply.order import Parallelized

Runs = dict[str, tuple[list[str], int, list[str]]]


def how_modules_run(applied: Parallelized) -> Runs:
    """Of each sharded module how its calls run; bytes gathered and what is repeated."""
    return {
        module.name: (
            sorted({getattr(how, "name", "PART") for how in module._shardings.values()}),
            module.gathered,
            module.repeats,
        )
        for module in applied.context_parallel.sharded
    }
