"""What is told of a checkpoint that a quota or a limit of file sizes has cut off."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from autolaunch.launch.output_lost import output_lost
from autolaunch_strategies.checkpoint.sharded import not_written


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EFBIG])
def test_a_quota_is_told_as_one(code: int, tmp_path: Path) -> None:
    """A write that fails has no path, and comes wrapped for every rank."""
    failed = CheckpointException("write", {1: (OSError(code, os.strerror(code)), None)})  # type: ignore[dict-item]  # the traceback is not looked at
    error = not_written(tmp_path / "step_1.ckpt", failed)
    assert str(error) == f"rank 1 could not write {tmp_path}/step_1.ckpt: OSError: [Errno {code}] {os.strerror(code)}"
    told = output_lost(tmp_path, error)
    assert told is not None and told.startswith(f"output_dir={tmp_path}: ") and "quota" in told
