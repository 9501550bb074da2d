"""What a stage raises when another one failed."""

from __future__ import annotations


class StageFailedError(RuntimeError):
    """User code raised on another stage; the error itself is raised there."""

    @classmethod
    def on_last_stage(cls, where: str, error: BaseException) -> StageFailedError:
        """What the other stages raise when `where` (a step, a hook) has raised `error` on the last one."""
        return cls(f"{where} failed on the last pipeline stage: {type(error).__name__}: {error}")
