"""The resolved job: what the parent composed, written once, read by every worker."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARALLEL_KEYS = (
    *("mesh", "dp", "mp", "pp", "cp", "ep"),
    *("recompute", "recompute_save", "recompute_budget", "compile", "random_numbers"),
)
"""Keys of a job that `parallel_config` and `MeshStrategy` take as they are."""


@dataclass(frozen=True)
class ResolvedJob:
    """A run as plain data: nothing is left to compose, to interpolate or to guess."""

    config: dict[str, Any]
    """The composed and resolved config (keys of `autolaunch.config.schema.Job`)."""
    output_dir: Path
    """Where everything is written; absolute, the same on every rank."""
    world_size: int
    """How many ranks run it."""
    overrides: list[str]
    """What was typed after the command, for people who read the job file."""
    version: str
    """The autolaunch version that composed it."""
    choices: dict[str, str] = field(default_factory=dict)
    """Config group to the option that was chosen, to write the run down as an experiment file."""
    choice: dict[str, Any] | None = None
    """What the planner chose for a cluster, and why (`planner.document`); None where the person said everything."""
    resumes_last: bool = False
    """Whether `ckpt_path` was `last`: a damaged checkpoint then gives way to an earlier one."""
    restarts: int = 0
    """How often the run was started again by itself (`launch.max_restarts`)."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """What checkpoints say about it, to compare runs that go on from them; only of a training."""

    by_device: dict[str, str] = field(default_factory=dict)
    """Keys that were left open and have the value that suits the device -> why."""

    taken_from: str | None = None
    """The checkpoint from whose job model, adapter and data were taken, as far as they were not typed."""

    from_environment: list[str] = field(default_factory=list)
    """Dotted keys whose values come from variables of the environment: loggers are not given them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_dir", Path(self.output_dir))
        assert self.output_dir.is_absolute(), f"the output directory must be absolute: {self.output_dir}"
        assert self.world_size >= 1, f"a job has at least one rank, not {self.world_size}"

    @property
    def path(self) -> Path:
        """Where `write` puts it: `<output_dir>/.hydra/job.json`, or beside it in a file of its task.

        What evaluates or exports a run in its own directory leaves the job that trained it alone: the checkpoints there
        are explained by it.
        """
        task = self.config.get("task", "fit")
        return self.output_dir / ".hydra" / f"{'job' if task == 'fit' or not task.isidentifier() else task}.json"

    @property
    def logs(self) -> Path:
        """The directory of the ranks' logs and of what they report to the parent."""
        return self.output_dir / "logs"

    def to_json(self) -> str:
        """The job as text; `from_json` reads it back."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return json.dumps(fields | {"output_dir": str(self.output_dir)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> ResolvedJob:
        """The job that `to_json` wrote."""
        return cls(**json.loads(text))

    def write(self) -> Path:
        """Write it to `path`, complete or not at all, and return that."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(self.path, self.to_json())
        return self.path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ResolvedJob:
        """The job in the file that `write` left."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def write_beside(path: Path, text: str) -> None:
    """Write `text` to a file beside `path` and rename it into place: a reader sees all of it or none.

    Its directory is made if it has been deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:  # a full disk has better uses for half a file
        beside.unlink(missing_ok=True)
        raise
