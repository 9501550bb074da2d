"""`summary.json`, written without torch: how a run ended, in a few figures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autolaunch.job import write_beside


def write_summary(output_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Write `<output_dir>/summary.json` and return its path; NaN and infinity, which JSON lacks, become null."""
    path = Path(output_dir) / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_beside(path, json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
