"""`metrics.csv`: a row for every logged step."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from lightning.pytorch.loggers import Logger


@dataclass(frozen=True)
class StepRecord:
    """The values of one optimizer step; the fields are the first columns of `metrics.csv`, in this order."""

    step: int
    """Optimizer steps done, the first one is 1."""
    loss: float | None
    """Of the step: the mean over all of its labels, or samples, in all microbatches and on all ranks."""
    grad_norm: float | None
    """Norm over all parameters before clipping; None if the strategy does not measure it."""
    lr: float | None
    """Learning rate that the step used (of the first parameter group)."""
    tokens: int
    """Tokens seen since the start of training, by all ranks; samples if batches hold no tokens."""
    step_time_s: float
    """Mean wall time per optimizer step since the last record, without validation and checkpoints."""


COLUMNS = tuple(field.name for field in fields(StepRecord))


class MetricsCsv(Logger):
    """`<output_dir>/metrics.csv`: one row per logged step, written by rank 0 as soon as the step is complete.

    `StepMetrics` opens it and fills `COLUMNS`. Whatever else is logged at that step (by the LightningModule, by
    validation) joins its row; a name seen for the first time adds a column, for which the file is written anew and
    renamed into place (`tail -F` follows that). Floats are written in full, so that two runs can be compared line by
    line.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(output_dir) / "metrics.csv"
        self._columns: list[str] = list(COLUMNS)
        self._file: IO[bytes] | None = None
        self._row: dict[str, Any] = {}
        self._row_start = 0
        self._unwritten = False
        self._told: list[str] = []

    # Empty, so that lightning's default place for checkpoints is <output_dir>/checkpoints.
    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def open(self, step: int) -> None:
        """Start the file, or go on with the one that is there after dropping its rows beyond `step`."""
        self._columns, rows = _read(self.path)
        rows = [row for row in rows if int(row["step"]) <= step]
        self._replace(rows)
        assert self._file is not None
        self._row, self._row_start, self._unwritten = {"step": step}, self._file.seek(0, os.SEEK_END), False
        if rows and int(rows[-1]["step"]) == step:  # an interrupted validation may still add to it
            self._row_start -= len(_line(rows[-1], self._columns))
            self._row |= {name: value for name, value in rows[-1].items() if value and name != "step"}

    def begin_row(self, step: int) -> None:
        """From now on values belong to the row of `step`, which is written only if there are any."""
        if self._file is not None and self._row.get("step") != step:
            self.write_row()
            self._row, self._row_start = {"step": step}, self._file.seek(0, os.SEEK_END)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values to the current row; ones that are None stay empty."""
        values = {name: value for name, value in values.items() if value is not None}
        if self._file is not None and values:
            self._row.update(values)
            self._unwritten = True

    def write_row(self) -> None:
        """Write the current row if it holds anything new; a row that was written before is extended in place."""
        if self._file is None or not self._unwritten:
            return
        self._unwritten = False
        if new := [name for name in self._row if name not in self._columns]:
            rows = _read(self.path)[1]
            if rows and rows[-1]["step"] == str(self._row["step"]):
                rows.pop()
            self._columns += new
            self._replace(rows)
            self._row_start = self._file.seek(0, os.SEEK_END)
        if os.fstat(self._file.fileno()).st_nlink == 0:  # somebody has deleted it: what comes is still worth having
            self._replace([])
            self._row_start = self._file.seek(0, os.SEEK_END)
        self._file.seek(self._row_start)
        self._file.write(_line(self._row, self._columns))
        self._file.truncate()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add what the LightningModule logged; `step` is lightning's own count and not used."""
        taken = [name for name in metrics if name in COLUMNS and name not in (*self._told, "step", "loss")]
        if taken:
            self._told += taken
            warnings.warn(
                f"metrics.csv has columns of autolaunch's own by these names: {', '.join(taken)}; what the module logs "
                "by them is not in it: log it by another name",
                stacklevel=2,
            )
        self.add({k: v for k, v in metrics.items() if k not in (*COLUMNS, "epoch") and isinstance(v, int | float)})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Hyperparameters are in plan.yaml."""

    def finalize(self, status: str) -> None:
        """Write the last row and close the file."""
        self.write_row()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _replace(self, rows: list[dict[str, str]]) -> None:
        if self._file is not None:
            self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".new")
        header = dict(zip(self._columns, self._columns, strict=True))
        beside.write_bytes(b"".join(_line(row, self._columns) for row in (header, *rows)))
        beside.replace(self.path)
        self._file = self.path.open("r+b", buffering=0)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """(columns, complete rows) of a metrics.csv; the default columns and no rows if there is none."""
    if path.exists():
        with path.open(newline="") as file:
            lines = list(csv.reader(file))
        if lines and tuple(lines[0][: len(COLUMNS)]) == COLUMNS:
            columns = lines[0]
            # A process that was killed while writing leaves half a row behind.
            complete = [line for line in lines[1:] if len(line) == len(columns) and line[0].isdecimal()]
            return columns, [dict(zip(columns, line, strict=True)) for line in complete]
    return list(COLUMNS), []


def _line(row: Mapping[str, Any], columns: list[str]) -> bytes:
    text = io.StringIO()
    values = (row.get(name, "") for name in columns)
    csv.writer(text, lineterminator="\n").writerow([repr(v) if isinstance(v, float) else v for v in values])
    return text.getvalue().encode()
