"""The axis dp."""

from __future__ import annotations

from dataclasses import dataclass

from autolaunch_strategies.config.errors import ConfigError
from autolaunch_strategies.config.options import as_yaml, option


@dataclass
class DataParallel:
    """How the ranks of the dp axis share the work and the state."""

    sharding_level: int = option(
        "What is sharded over dp: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
        3,
        choices=(0, 1, 2, 3),
    )
    replicate: int | None = option("Hybrid sharding: how many replicas of the sharded model.", None, ge=1)
    shard: int | None = option("Hybrid sharding: over how many ranks each replica is sharded.", None, ge=1)
    param_dtype: str | None = option(
        "Type in which sharded parameters are gathered and computed with (null: the type they are stored in; with "
        "precision=bf16-mixed, bf16 for weights of linear layers, which are multiplied in it anyway).",
        None,
        choices=("fp32", "bf16", "fp16", None),
    )
    reduce_dtype: str | None = option(
        "Type in which gradients are summed over dp (null: the type they are computed in).",
        None,
        choices=("fp32", "bf16", "fp16", None),
    )
    cpu_offload: bool = option("Keep sharded parameters, gradients and optimizer state in host memory.", False)

    @property
    def follows_autocast(self) -> bool:
        """Whether weights that autocast would cast are gathered in its type: no other type was asked for."""
        return self.sharding_level > 0 and self.param_dtype is None and self.reduce_dtype in (None, "fp32")

    @property
    def acts_on_one_rank(self) -> bool:
        """Whether it has an effect on a single rank, too: where state is kept, or in which type is computed."""
        return self.cpu_offload or (self.sharding_level > 0 and bool(self.param_dtype or self.reduce_dtype))

    def split(self, dp: int) -> tuple[int, int]:
        """(replicas, shards): into how many copies and shards the `dp` ranks of the axis hold the state.

        Raises:
            ConfigError: `replicate * shard` is not `dp`, or is set where nothing is sharded.
        """
        if self.sharding_level == 0:
            if (self.shard or 1) != 1 or (self.replicate or dp) != dp:
                raise ConfigError(
                    f"dp.sharding_level=0 with dp.replicate={as_yaml(self.replicate)} dp.shard={as_yaml(self.shard)}",
                    "level 0 shards nothing",
                    "levels 1, 2 and 3 with dp.replicate and dp.shard",
                    "dp=hsdp dp.replicate=...",
                )
            return dp, 1
        replicate, shard = self.replicate, self.shard
        if replicate is None and shard is None:
            return 1, dp
        if replicate is None:
            replicate = dp // shard if shard and dp % shard == 0 else -1
        if shard is None:
            shard = dp // replicate if replicate > 0 and dp % replicate == 0 else -1
        if replicate * shard != dp or min(replicate, shard) < 1:
            pairs = ", ".join(f"{r} x {dp // r}" for r in range(1, dp + 1) if dp % r == 0)
            raise ConfigError(
                f"dp.replicate={as_yaml(self.replicate)} dp.shard={as_yaml(self.shard)}",
                f"their product must be the size of the dp axis, {dp}",
                f"replicate x shard = {pairs}",
            )
        return replicate, shard


DP_NAMES: dict[str, DataParallel] = {
    "ddp": DataParallel(0),
    "zero1": DataParallel(1),
    "zero2": DataParallel(2),
    "fsdp": DataParallel(3),
    "hsdp": DataParallel(3, replicate=2),
}
"""What the names of the group dp mean."""
