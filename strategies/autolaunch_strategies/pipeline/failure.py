"""What a stage raises when another one failed."""

from __future__ import annotations


class StageFailedError(RuntimeError):
    """User code raised on another stage; the error itself is raised there."""
