"""A row of data=classification as texts and a label. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autolaunch.data.rows import BadRow
from autolaunch_strategies.config import nearest

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
"""What labels mean, by the names that `transformers` has for it."""

_SHOWN = 5


class Labelled(NamedTuple):
    """A row: one text or two, and the number of its class, a number, or a list of these."""

    text: str
    pair: str | None
    label: float | list[float]


@dataclass(frozen=True)
class Labels:
    """What labels have to be."""

    count: int
    """Outputs of the model."""
    problem: str
    """`SINGLE`, `MULTI` or `REGRESSION`."""
    names: Sequence[str] | None
    """Of the classes, in the order of their numbers."""

    def value(self, label: Any) -> float | list[float]:
        """A label as the number of its class, the numbers to predict, or 1 for every class that it names and 0 else.

        Raises:
            BadRow: it is no such label.
        """
        if self.problem == SINGLE:
            return self._class(label)
        if self.problem == REGRESSION and self.count == 1 and not isinstance(label, list):
            return self._number(label)
        if not isinstance(label, list):
            raise BadRow(f"the label {label!r} is no list", f"a list of {self._kind()}")
        if self.problem == MULTI and all(isinstance(name, str) for name in label):
            classes = {self._class(name) for name in label}
            return [float(number in classes) for number in range(self.count)]
        if len(label) != self.count:
            raise BadRow(f"{len(label)} labels instead of {self.count}", f"a list of {self._kind()}")
        return [self._number(number) for number in label]

    def _kind(self) -> str:
        return f"{self.count} numbers" + (", 0 or 1" if self.problem == MULTI else "")

    def _class(self, label: Any) -> int:
        if self.names is not None and isinstance(label, str):
            if label in self.names:
                return list(self.names).index(label)
            close = nearest(label, self.names)
            raise BadRow(
                f"no class is called {label!r}" + (f"; did you mean {close}?" if close else ""), ", ".join(self.names)
            )
        if isinstance(label, bool) or not isinstance(label, int):
            names = isinstance(label, str) and self.names is None
            raise BadRow(
                f"the label {label!r} is not the number of a class",
                f"0 to {self.count - 1}" + (", or names of classes, with data.classes" if names else ""),
                f"data.classes=[{label},...]" if names else "",
            )
        if not 0 <= label < self.count:
            raise BadRow(
                f"the label {label}, but the model has {self.count} classes",
                f"0 to {self.count - 1}",
                f"model.num_labels={label + 1}" if label >= 0 else "",
            )
        return label

    def _number(self, label: Any) -> float:
        if isinstance(label, str) or not isinstance(label, int | float):
            raise BadRow(f"the label {label!r} is not a number", "a number")
        if self.problem == MULTI and label not in (0, 1):
            raise BadRow(f"the label {label!r} is neither 0 nor 1", f"a list of {self._kind()}")
        return float(label)


def check_labelled_columns(row: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Check what can be checked of a row without knowing which labels there are.

    Args:
        config: the fields of `autolaunch.config.schema.ClassificationData`.

    Raises:
        BadRow: a column is missing, or a text is none or empty.
    """
    for key in ("text_key", "pair_key", "label_key"):
        if config[key] is not None and config[key] not in row:
            columns = ", ".join(list(map(str, row))[:_SHOWN]) or "(none)"
            raise BadRow(f"no column {config[key]}; there are {columns}", f"data.{key}: the name of a column")
    for key in ("text_key", "pair_key"):
        value = None if config[key] is None else row[config[key]]
        if value is None and key == "pair_key":
            continue
        if not isinstance(value, str):
            raise BadRow(f"{config[key]} is a {type(value).__name__}, not text")
        if not value.strip():
            raise BadRow(f"{config[key]} is empty")


def labelled(row: Mapping[str, Any], config: Mapping[str, Any], labels: Labels) -> Labelled:
    """A row as texts and label.

    Args:
        config: the fields of `autolaunch.config.schema.ClassificationData`.

    Raises:
        BadRow: see `check_labelled_columns`; or the label does not fit.
    """
    check_labelled_columns(row, config)
    pair = None if config["pair_key"] is None else row[config["pair_key"]]
    return Labelled(row[config["text_key"]], pair, labels.value(row[config["label_key"]]))


def labels_of(config: Mapping[str, Any]) -> Labels:
    """What the labels of a resolved `ClassificationData` have to be: as its model has them."""
    count, problem, _ = config["of_model"]
    return Labels(count, problem, config["classes"])
