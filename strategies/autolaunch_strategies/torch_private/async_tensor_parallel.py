"""Matrix multiplications that overlap with the collectives before and after them, which inductor puts together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._inductor import list_mode_options
from torch.distributed._symmetric_memory import enable_symm_mem_for_group


def options_to_overlap(mode: str) -> dict[str, Any]:
    """`options` for torch.compile: those of a mode, and the pass that joins collectives to multiplications."""
    return {**list_mode_options(mode), "_micro_pipeline_tp": True}


def let_ranks_reach_memory(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group read each other's memory, without which nothing that they exchange is overlapped."""
    enable_symm_mem_for_group(group.group_name)
