"""Why something else was not chosen: where the best such way stands and what it costs, or which rules refuse it.
Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from autolaunch_strategies.config import (
    AXES,
    AXIS_SPELLINGS,
    CP_BACKENDS,
    ConfigError,
    cp_backend,
    nearest,
    parse_mesh,
    parse_recompute,
)
from autolaunch_strategies.planner.candidate import PIPELINES, Candidate, recompute_code
from autolaunch_strategies.planner.choose import look, pick
from autolaunch_strategies.planner.document import rounded
from autolaunch_strategies.planner.enumerate import several_replicas
from autolaunch_strategies.planner.plan import Looked, Plan
from autolaunch_strategies.planner.reasons import PART_WORDS, in_bytes, in_seconds
from autolaunch_strategies.planner.settings import LEVELS, overrides
from autolaunch_strategies.planner.time import step_time

KEYS = (
    "mesh",
    *AXES,
    "tp",
    "ep",
    "level",
    "replicas",
    "pipeline",
    "virtual_stages",
    "split",
    "backend",
    "ulysses",
    "recompute",
    "compile",
    "microbatches",
)
"""What may be asked for; longer spellings are in `_SPELLINGS`."""

_SPELLINGS = {
    "dp.sharding_level": "level",
    "sharding_level": "level",
    "dp.replicate": "replicas",
    "replicate": "replicas",
    "schedule": "pipeline",
    "pp.schedule": "pipeline",
    "pp.virtual_stages": "virtual_stages",
    "pp.split": "split",
    "cp.backend": "backend",
    "cp.ulysses": "ulysses",
    "pp.microbatches": "microbatches",
    "data.microbatches": "microbatches",
    "mesh.dp": "dp",
    "mesh.mp": "mp",
    "mesh.pp": "pp",
    "mesh.cp": "cp",
}


@dataclass(frozen=True)
class Explanation:
    """The answer to why something was not chosen."""

    asked: str
    plan: Plan
    candidate: Candidate | None
    """The best configuration with the settings that were asked for; None if there is none."""
    sentences: tuple[str, ...]
    rank: int | None = None
    """Its place among all that fit for sure, the fastest first, from 1; None if it does not."""
    of: int = 0
    seconds: float | None = None
    memory_bytes: float | None = None
    parts_difference: Mapping[str, float] | None = None
    """Part of the time -> how many seconds more than with the chosen way."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(rule, reason) of what refuses it."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data: asked, found, rank, of, overrides, seconds, chosen_seconds, parts_difference, memory_bytes,
        memory_limit_bytes, rejected ({rule, reason}), sentences."""
        plan = self.plan
        ways = overrides(self.candidate, plan.profile, plan.recipe) if self.candidate is not None else None
        return rounded(
            {
                "asked": self.asked,
                "found": self.candidate is not None,
                "rank": self.rank,
                "of": self.of,
                "overrides": ways,
                "seconds": self.seconds,
                "chosen_seconds": plan.seconds,
                "parts_difference": self.parts_difference,
                "memory_bytes": self.memory_bytes,
                "memory_limit_bytes": plan.looked.limit,
                "rejected": [{"rule": rule, "reason": reason} for rule, reason in self.rejected],
                "sentences": list(self.sentences),
            }
        )


def asked_of(text: str) -> list[tuple[str, str]]:
    """Read ``pp=2,pp=1f1b`` (spaces do as well as commas) as people type it; what the keys mean is left to `why`.

    Raises:
        ConfigError: a part of it is not ``key=value``.
    """
    asked: list[tuple[str, str]] = []
    for item in re.split(r"[,\s]+", text.strip()):
        key, sign, value = item.partition("=")
        if not (key and sign and value):
            raise ConfigError(f"why={text}", f"{item or 'nothing'} is no key=value", _ALLOWED, "why='mp=4,pp=2'")
        asked.append((key, value))
    return asked


SEVERAL: Final = "several"
"""Of replicas: more than one, however many. No number, as -1 is a value of another field."""

_ALLOWED = "mesh=4x2, mp=4, pp=2, dp=zero1, pp=1f1b, cp=ring, recompute=full, microbatches=8, ..."


def why(plan: Plan, asked: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Explanation:
    """Why the plan did not choose a configuration with the settings in `asked`: the best one of these is explained.

    It is searched among all configurations, also those that the plan did not keep, or had no reason to propose.

    Args:
        asked: as people type it: sizes of axes (``mp`` or ``tp``, ``dp``, ``pp``, ``cp``, ``mesh``: ``4x2``), options
            (``dp``: ``zero1``, ``pp``: ``1f1b``, ``cp``: ``ring``, ``mp``: ``seq_parallel``), ``ep``, ``recompute``,
            ``compile``, ``microbatches``, ``level``, ``replicas``, ``virtual_stages``, ``split``. As pairs, where an
            axis has both a size and an option.

    Raises:
        ConfigError: an unknown key or value.
    """
    pairs = list(asked.items()) if isinstance(asked, Mapping) else list(asked)
    fields = fields_of(pairs)
    text = " ".join(f"{key}={value}" for key, value in pairs)
    several = several_replicas(plan.hardware.devices)
    values = {name: several if value == SEVERAL else (int(value),) for name, value in fields.items()}
    wanted = {**plan.wanted, **values}
    rejections, looked = look(plan.profile, plan.recipe, plan.hardware, wanted, plan.memory_share)
    meant = looked.select(_meant(looked, fields))
    if not len(meant):
        # Other rules have refused values of other fields, as they do in any case.
        about = [item for item in rejections if set(item.rule.fields) & set(fields)] or list(rejections)
        refused = tuple((item.rule.words, item.reason) for item in about)
        if len(looked) or not refused:
            refused = (("", "no mesh has this together: an axis of size 1 has no options"),)
        return Explanation(text, plan, None, tuple(f"{_capital(reason)}." for _, reason in refused), rejected=refused)
    looked = meant
    if not looked.may_fit.any():
        return _too_large(plan, text, looked)
    index = pick(looked, plan.noise)
    candidate, seconds = looked.candidates[index], float(looked.seconds[index])
    times = step_time(plan.profile, plan.recipe, plan.hardware, looked.candidates.select([index]))
    differences = {name: float(values[0]) - plan.parts[name] for name, values in times.parts.items()}
    pool = plan.looked.seconds[plan.looked.fits]
    fits = bool(looked.fits[index])
    return Explanation(
        text,
        plan,
        candidate,
        _sentences(plan, candidate, seconds, differences, looked, index),
        int((pool < seconds).sum()) + 1 if fits else None,
        len(pool),
        seconds,
        float(looked.memory_bytes[index]),
        differences,
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def fields_of(asked: Sequence[tuple[str, Any]]) -> dict[str, int | str]:
    """Fields of `Candidate` for what people type, `SEVERAL` for some number of replicas; see `why`.

    Raises:
        ConfigError: an unknown key or value, or one thing said in two ways.
    """
    fields: dict[str, int | str] = {}
    for key, value in asked:
        name = _SPELLINGS.get(key, key)
        if name not in KEYS:
            close = nearest(key, (*KEYS, *_SPELLINGS), cutoff=0.6)
            raise ConfigError(
                f"why={key}={value}",
                "no such key" + (f"; did you mean {close}?" if close else ""),
                ", ".join(KEYS),
                f"why={close}={value}" if close and _is_one(_SPELLINGS.get(close, close), str(value)) else "",
            )
        meant = _field(name, str(value))
        for field, number in meant.items():
            if fields.get(field, number) not in (number, SEVERAL) and number != SEVERAL:
                raise ConfigError(f"why={key}={value}", "another value of it stands beside it", "one value of each")
        fields |= {field: number for field, number in meant.items() if number != SEVERAL or field not in fields}
    return fields


def _is_one(name: str, value: str) -> bool:
    try:
        _field(name, value)
    except ConfigError:
        return False
    return True


def _field(name: str, value: str) -> Mapping[str, int | str]:
    if name == "mesh":
        sizes = parse_mesh(value).sizes
        return {axis: size for axis, size in sizes.items() if size != -1}
    axis = AXIS_SPELLINGS.get(name)
    if axis and not value.lstrip("-").isdigit():
        return _option(axis, value)
    if name == "recompute":
        return {"recompute": recompute_code(parse_recompute(value).mode)}
    if name in ("pipeline", "backend") and not value.isdigit():
        return _option({"pipeline": "pp", "backend": "cp"}[name], value)
    if name == "compile":
        return {"compile": _one_of("compile", value.lower(), {"true": 1, "false": 0})}
    if name == "split":
        return {"split": _one_of("split", value, {"even": 0, "balanced": 1, "0": 0, "1": 1})}
    if not value.isdigit() or (int(value) < 1 and name != "level"):
        raise ConfigError(f"why={name}={value}", "not a size", "a number of 1 or more", f"why={name}=2")
    if name == "level":
        return {"level": _one_of("level", value, {str(level): level for level in range(4)})}
    return {{"replicas": "replicate"}.get(name, axis or name): int(value)}


def _option(axis: str, value: str) -> Mapping[str, int | str]:
    if value == "none" and axis != "dp":
        return {axis: 1}
    if axis == "dp":
        levels = {name: level for level, name in enumerate(LEVELS)} | {"hsdp": 3}
        level = _one_of("dp", value, levels)
        return {"level": level, **({"replicate": SEVERAL} if value == "hsdp" else {})}
    if axis == "mp":
        return {"sequence_parallel": _one_of("mp", value, {"seq_parallel": 1, "tensor_parallel": 0, "auto": 0})}
    if axis == "pp":
        known = {name: number for number, name in enumerate(PIPELINES) if number}
        return {"pipeline": _one_of("pp", value, known)}
    return {"backend": CP_BACKENDS.index(cp_backend(value, "why=cp"))}


def _one_of(key: str, value: str, known: Mapping[str, int]) -> int:
    if value in known:
        return known[value]
    close = nearest(value, known)
    raise ConfigError(
        f"why={key}={value}",
        "not known" + (f"; did you mean {close}?" if close else ""),
        ", ".join(known),
        f"why={key}={close}" if close else "",
    )


def _meant(looked: Looked, fields: Mapping[str, int | str]) -> Any:
    """[n]: those that are as asked for, where a field that means nothing for a candidate is not what was asked for."""
    meant = np.ones(len(looked), dtype=bool)
    for name, value in fields.items():
        found = getattr(looked.candidates, name)
        meant &= found > 1 if value == SEVERAL else found == value
    c = looked.candidates
    for name, axis in (("sequence_parallel", c.mp), ("backend", c.cp), ("virtual_stages", c.pp), ("split", c.pp)):
        if name in fields:
            meant &= axis > 1
    return meant


def _too_large(plan: Plan, text: str, looked: Looked) -> Explanation:
    index = int(looked.memory_bytes.argmin())
    need = float(looked.memory_bytes[index])
    reason = f"at least {in_bytes(need)} are needed, and a device has {in_bytes(looked.limit)}"
    return Explanation(
        text,
        plan,
        looked.candidates[index],
        (f"Nothing like this fits: {reason}.",),
        memory_bytes=need,
        rejected=(("memory", reason),),
    )


def _sentences(
    plan: Plan, candidate: Candidate, seconds: float, differences: Mapping[str, float], looked: Looked, index: int
) -> tuple[str, ...]:
    if candidate == plan.chosen:
        return ("This is what was chosen.",)
    sentences = []
    difference = seconds / plan.seconds - 1
    if not looked.fits[index]:
        need, room = float(looked.memory_bytes[index]), looked.share * looked.limit
        sentences.append(f"It may not fit: {in_bytes(need)} are predicted, and {in_bytes(room)} are sure to be there.")
    speed = f"{abs(difference):.1%} {'more' if difference > 0 else 'less'} time"
    if abs(difference) <= plan.noise:
        sentences.append(f"It takes {speed}, which is within the noise of {plan.noise:.0%}.")
        other = int(looked.simplicity[index])
        if other > plan.simplicity:
            sentences.append("What was chosen is simpler.")
        elif other == plan.simplicity and looked.memory_bytes[index] > plan.memory_bytes:
            sentences.append("What was chosen is as simple and needs less memory.")
    else:
        sentences.append(f"It takes {speed}.")
    most = sorted(differences.items(), key=lambda item: -abs(item[1]))[:4]
    parts = [
        f"{'+' if value > 0 else '-'}{in_seconds(abs(value))} {PART_WORDS.get(name, name)}"
        for name, value in most
        if abs(value) >= 0.002 * plan.seconds
    ]
    if parts:
        sentences.append(f"Against what was chosen: {', '.join(parts)}.")
    return tuple(sentences)
