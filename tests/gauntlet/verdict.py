"""What became of a cell: right, refused, wrong, crash or hang."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

CLASSES = ("right", "refused", "wrong", "crash", "hang")
LOSS, NORM, WEIGHT = 1e-4, 1e-3, 2e-3
"""Relative differences of losses, gradient norms, and of what training added to a weight."""
_REFUSALS = re.compile(r"^(ConfigErrors?): ")
_DELIBERATE = re.compile(r'File "[^"]*autolaunch_strategies[^"]*", line \d+, in \S+\n\s+raise (Runtime|Value|NotImpl)')


@dataclass(frozen=True)
class Verdict:
    """The class of a cell; `where` says how far it came, `message` what it said, `share` what a rank holds at most."""

    cell: str
    verdict: str
    where: str = ""
    message: str = ""
    share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", None)}


def judge(
    cell: str, alone: Mapping[str, Any], written: Mapping[int, Mapping[str, Any]], count: int, phase: str
) -> Verdict:
    """Compare what the ranks of a cell wrote with what one process gave.

    Args:
        alone: `losses`, `norms`, `initial` and `weights` of one process.
        written: of each rank that came to an end, its `result`, or its `error` and `traceback`.
        count: how many ranks there are.
        phase: what the line of a traceback begins with that says how far the rank came.
    """
    errors = {rank: item for rank, item in written.items() if "error" in item}
    if errors:
        first = errors[min(errors)]
        told = [rank for rank, item in errors.items() if is_refusal(item)]
        where = "".join(line.removeprefix(phase) for line in first["traceback"].splitlines() if line.startswith(phase))
        message = first["error"].strip()
        if len(told) == count:
            return Verdict(cell, "refused", where, message)
        crashed = next((item for rank, item in errors.items() if rank not in told), None)
        if crashed is not None:
            return Verdict(cell, "crash", where, crashed["error"].strip() + _frame(crashed["traceback"]))
        return Verdict(cell, "hang", where, f"only rank {told} of {count} refuses: {message}")
    if len(written) < count:
        return Verdict(cell, "hang", "", f"{len(written)} of {count} ranks came to an end")
    results = [written[rank]["result"] for rank in range(count)]
    share = max(result["share"] for result in results)
    problems = differences(alone, results)
    return Verdict(cell, "wrong" if problems else "right", "", "; ".join(problems[:4]), round(share, 3))


def is_refusal(item: Mapping[str, Any]) -> bool:
    """Whether an error is one that we raise for users."""
    if _REFUSALS.match(item["error"]):
        return True
    frames = list(re.finditer(r'^  File "', item["traceback"], re.MULTILINE))
    return bool(frames and _DELIBERATE.search(item["traceback"], frames[-1].start()))


def _frame(traceback: str) -> str:
    """Where it was raised, and the last place of ours that it came through."""
    frames = re.findall(r'File "([^"]*)", line (\d+), in (\S+)', traceback)
    ours = [frame for frame in frames if "autolaunch_strategies" in frame[0]]
    places = [frames[-1:], [] if frames[-1:] == ours[-1:] else ours[-1:]]
    return "".join(f" [{'/'.join(file.split('/')[-2:])}:{line} {name}]" for part in places for file, line, name in part)


def differences(alone: Mapping[str, Any], results: list[Mapping[str, Any]]) -> list[str]:
    """Where ranks differ from one process."""
    problems = []
    for rank, result in enumerate(results):
        for name, tolerance in (("losses", LOSS), ("norms", NORM)):
            expected, found = alone[name], result[name]
            if len(expected) != len(found) or not all(
                math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-6)
                for one, other in zip(expected, found, strict=True)
            ):
                problems.append(f"{name} on rank {rank} {_short(found)}, alone {_short(expected)}")
    weights = results[0]["weights"]
    missing, more = alone["weights"].keys() - weights.keys(), weights.keys() - alone["weights"].keys()
    problems += [f"no {name}" for name in sorted(missing)] + [f"also {name}" for name in sorted(more)]
    changes = {name: alone["weights"][name] - alone["initial"][name] for name in alone["weights"]}
    largest = max((float(change.abs().max()) for change in changes.values() if change.numel()), default=0.0)
    for name, change in changes.items():
        if name in missing or not change.numel():
            continue
        if weights[name].shape != change.shape:
            problems.append(f"{name} has shape {list(weights[name].shape)}, alone {list(change.shape)}")
            continue
        off = float((weights[name] - alone["weights"][name]).abs().max())
        if not off <= WEIGHT * float(change.abs().max()) + 1e-5 * largest + 2e-7 * _size(alone["weights"][name]):
            problems.append(f"{name} is off by {off:.1e} where training added {float(change.abs().max()):.1e}")
    if not any(torch.any(change != 0) for change in changes.values()):
        problems.append("nothing was trained in one process")
    return problems


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def _short(numbers: list[float]) -> str:
    return "[" + ", ".join(f"{number:.6g}" for number in numbers) + "]"
