"""The degree `ep`: over how many ranks the experts of a mixture are shared out."""

from __future__ import annotations

from autolaunch_strategies.config.errors import ConfigError


def check_experts(ep: int, experts: int, whose: str, ranks: int) -> None:
    """Raise ConfigError unless `ep` of these ranks can have equal numbers of so many experts; `whose` they are."""
    if experts == 0:
        raise ConfigError(
            f"ep={ep} with {whose}", "it has no mixture of experts", "ep=1, or a model with experts", "ep=1"
        )
    if experts % ep:
        fitting = [size for size in range(1, experts + 1) if experts % size == 0 and ranks % size == 0]
        raise ConfigError(
            f"ep={ep} with {whose}",
            f"{experts} experts can't be shared out evenly over {ep} ranks",
            f"what divides the experts and the {ranks} ranks of dp x cp x mp: {', '.join(map(str, fitting))}",
            f"ep={max(size for size in fitting if size <= ep)}",
        )
