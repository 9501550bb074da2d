"""What was typed: the task, the flags and the overrides, before Hydra sees them."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from autolaunch.config.against_schema import field_types
from autolaunch.config.schema import GROUPS, SEVERAL_OPTIONS, TASKS, Job
from autolaunch.config.slips import OFF, foreign_line, shape_meant, slip
from autolaunch_strategies.config import ConfigError, looks_like_mesh, nearest, quoted

HYDRA_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""What `--info` of Hydra takes; any other word is a key of the config."""


@dataclass
class CommandLine:
    """One call of the command, taken apart."""

    overrides: list[str]
    """`key=value` items as Hydra reads them; the task is the first of them if it was given."""
    multirun: bool = False
    cfg: str | None = None
    """`--cfg`: job, hydra or all."""
    info: str | None = None
    """`--info`: one of `HYDRA_INFO` or a key of the config."""
    help: bool = False
    task: str = ""
    """Of `--help`: the task whose page is asked for, if it is one's."""
    version: bool = False
    package: str | None = None
    """`--package`: the key of the part that `--cfg` prints."""
    resolve: bool = False
    """`--resolve`: print `--cfg` with every `${...}` replaced."""
    hydra_flags: list[str] = field(default_factory=list)
    """Flags of a page that only Hydra prints."""
    config_dir: Path | None = None
    config_path: Path | None = None
    config_name: str = "config"

    @property
    def runs(self) -> bool:
        """Whether jobs are to be run, and not something printed."""
        return self.cfg is None and self.info is None and not self.hydra_flags

    @property
    def asks_for_a_plan(self) -> bool:
        """Whether a planner may have to choose for one job."""
        plans = "task=plan" in self.overrides and "cluster" in typed_keys(self.overrides)
        return self.runs and not self.multirun and (plans or "mesh=auto" in self.overrides)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag = re.match(r"argument (\S+): (.*)", message)
        if flag:
            raise ConfigError(flag[1].split("/")[0], flag[2], write="autolaunch --help")
        raise ConfigError("autolaunch", message, write="autolaunch --help")


def _parser() -> _Parser:
    parser = _Parser(prog="autolaunch", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("overrides", nargs="*")
    add("--help", "-h", action="store_true")
    add("--version", action="store_true")
    add("--info", "-i", nargs="?", const="all")
    add("--cfg", "-c")
    add("--package", "-p")
    add("--resolve", action="store_true")
    add("--multirun", "-m", action="store_true")
    add("--run", "-r", action="store_true")
    add("--config-dir", "-cd", type=Path)
    add("--config-path", "-cp", type=Path)
    add("--config-name", "-cn")
    add("--why")
    add("--full", action="store_true")
    add("--hydra-help", action="store_true")
    add("--shell-completion", "-sc", action="store_true")
    return parser


def parse(argv: Sequence[str]) -> CommandLine:
    """Take a command line (without the program's name) apart.

    Raises:
        ConfigError: an unknown flag or task, or a word that is neither.
    """
    parser = _parser()
    argv = _help_as_a_flag(argv)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    switches = [flag for action in parser._actions if action.nargs == 0 for flag in action.option_strings]
    _refuse_typographic_dashes(argv)
    _refuse_flag_without_dashes(argv, flags)
    _refuse_value_of_a_switch(argv, switches)
    if word := _long_flag_with_one_dash(argv, flags):
        raise _unknown_flag(word, argv, flags)
    known, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise _unknown_flag(unknown[0], argv, flags)
    for flag in ("config_dir", "config_path"):
        directory = getattr(known, flag)
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"--{flag.replace('_', '-')} {directory}", "no such directory")
    if known.cfg and known.cfg not in ("job", "hydra", "all"):
        raise ConfigError(f"--cfg {known.cfg}", "there is no such part of the config", "job, hydra, all")
    if known.multirun and (known.cfg or known.run):
        raise ConfigError("--multirun", f"cannot go together with {'--cfg' if known.cfg else '--run'}")
    if known.resolve and not known.cfg:
        raise ConfigError("--resolve", "needs --cfg", write="autolaunch --cfg job --resolve")
    if known.package and not known.cfg:
        raise ConfigError(f"--package {known.package}", "needs --cfg", write=f"autolaunch --cfg job -p {known.package}")
    hydra_flags = ["--hydra-help"] * known.hydra_help + ["--shell-completion"] * known.shell_completion
    if known.info in HYDRA_INFO:
        hydra_flags += ["--info", known.info]
    if known.help:
        return _asked_for_help(known)
    overrides = known.overrides if known.shell_completion else _overrides(known.overrides)
    _refuse_two_options(overrides)
    if known.why is not None:
        overrides.append(f"why={quoted(known.why)}")
    if known.full:
        overrides.append("full=true")
    pages = known.cfg or known.info or hydra_flags or known.help or known.version
    return CommandLine(
        overrides=overrides,
        multirun=known.multirun or ("task=compare" in overrides and not pages),  # it runs several jobs
        cfg=known.cfg,
        info=known.info,
        help=known.help,
        version=known.version,
        package=known.package,
        resolve=known.resolve,
        hydra_flags=hydra_flags,
        config_dir=known.config_dir.resolve() if known.config_dir else None,
        config_path=known.config_path.resolve() if known.config_path else None,
        config_name=known.config_name or "config",
    )


def _help_as_a_flag(argv: Sequence[str]) -> list[str]:
    """The words with `help`, which may stand in front or behind a task, as the flag that it means."""
    at = next((at for at, word in enumerate(argv[:2]) if word == "help"), None)
    if at is None or (at == 1 and argv[0] not in TASKS):
        return list(argv)
    return ["--help", *argv[:at], *argv[at + 1 :]]


_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""What word processors make of one dash, or of two."""


def _refuse_typographic_dashes(argv: Sequence[str]) -> None:
    plain = [_with_plain_dashes(word) for word in argv]
    for word, meant in zip(argv, plain, strict=True):
        if word != meant:
            raise ConfigError(word, f"begins with {word[0]!r}, and flags with -", write=line_of(plain))


def _with_plain_dashes(word: str) -> str:
    rest = word.lstrip(_DASHES + "-")
    if not rest or word[0] not in _DASHES:
        return word
    return rest if "=" in rest else f"-{rest}" if len(rest) == 1 else f"--{rest}"


def _refuse_flag_without_dashes(argv: Sequence[str], flags: Sequence[str]) -> None:
    if argv and f"--{argv[0]}" in flags and argv[0] not in _OTHER_WORDS:
        line = line_of([f"--{argv[0]}", *argv[1:]])
        raise ConfigError(f"autolaunch {argv[0]}", "is a flag and no task, and flags begin with --", write=line)


def _refuse_value_of_a_switch(argv: Sequence[str], switches: Sequence[str]) -> None:
    """`--help=trainer` or `--full=true`, of which argparse says that it ignores an explicit argument."""
    for at, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if not equals or flag not in switches:
            continue
        is_word = value and (flag in ("--help", "-h") or "=" in value)  # -m=mesh=1,2
        meant = [flag, value] if is_word else [] if value.lower() in OFF else [flag]
        raise ConfigError(word, f"{flag} has no = behind it", write=line_of([*argv[:at], *meant, *argv[at + 1 :]]))


def line_of(words: Sequence[str]) -> str:
    """A whole line to write."""
    return shlex.join(["autolaunch", *words])


def _long_flag_with_one_dash(argv: Sequence[str], flags: Sequence[str]) -> str:
    """`-multirun` or `-mesh=2`, which argparse takes for `-m` with something behind it; empty if there is none."""
    single = (word for word in argv if re.match(r"-\w", word) and word not in flags)
    return next((word for word in single if word[1] in "hmr" or f"-{word.partition('=')[0]}" in flags), "")


def _asked_for_help(known: argparse.Namespace) -> CommandLine:
    """`--help`, `--help trainer`, which asks for the page of a key, or `--help plan`, for that of a task."""
    words = [word for word in known.overrides if word not in (*TASKS, *HYDRA_INFO)]
    task = known.overrides[0] if known.overrides and known.overrides[0] in TASKS else ""
    is_key = len(words) == 1 and not (task and "=" in words[0])
    return CommandLine(
        overrides=[],
        info=words[0] if is_key else None,
        help=not is_key,
        task=task,
        config_dir=known.config_dir.resolve() if known.config_dir else None,
        config_path=known.config_path.resolve() if known.config_path else None,
    )


def typed_keys(overrides: Iterable[str]) -> dict[str, str]:
    """Key -> value of the overrides of a command line, without Hydra's signs."""
    pairs = (item.lstrip("+~").partition("=") for item in overrides)
    return {key: value for key, _, value in pairs}


def compares_runs(argv: Sequence[str]) -> bool:
    """Whether a command line compares finished runs: flags have words behind them, and go with jobs alone."""
    words = argv[1:]
    return argv[:1] == ["compare"] and any(map(names_a_run, words)) and not any(word.startswith("-") for word in words)


def names_a_run(word: str) -> bool:
    """Whether a word behind `compare` is the directory of a finished run (`outputs/lr=0.1` may be one), and no key."""
    return "=" not in word or ("/" in word and Path(word).is_dir())


def _word_behind(flag: str, argv: Sequence[str]) -> str:
    """The value that was meant for a flag that nobody knows: the word behind it, unless that is something else."""
    behind = argv[argv.index(flag) + 1 :][:1]
    return behind[0] if behind and not behind[0].startswith("--") and "=" not in behind[0] else ""


def _unknown_flag(typed: str, argv: Sequence[str], flags: Sequence[str]) -> ConfigError:
    name, _, value = typed.partition("=")
    behind = _word_behind(typed, argv)
    bare = name.lstrip("-")
    key, value = bare.replace("-", "_"), value or behind
    shown = typed if "=" in typed or not behind else f"{typed} {behind}"
    if meant := slip(shown, key, value or "true", {"task": argv[0]}):
        return ConfigError(shown, "settings are written key=value, without dashes", meant.allowed, meant.write)
    if flag := _flag_meant(bare, flags):
        problem = f"no such flag; did you mean {flag}?"
        return ConfigError(
            typed, problem, write=line_of([typed.replace(name, flag) if w == typed else w for w in argv])
        )
    if value:
        return ConfigError(shown, "keys are written without dashes", write=line_of([f"{key}={value}"]))
    return ConfigError(typed, "no such flag", write="autolaunch --help")


def _flag_meant(bare: str, flags: Sequence[str]) -> str:
    """The flag that was meant by a name without its dashes; empty if it is like none."""
    if f"-{bare}" in flags:
        return f"-{bare}"
    long = [flag for flag in flags if flag.startswith("--")]
    return next(iter(difflib.get_close_matches(f"--{bare}", long, n=1, cutoff=0.8)), "")


def _key_apart(words: Sequence[str], position: int) -> ConfigError | None:
    """A key whose value stands apart from it (`trainer.max_steps 3`, `mesh = 2`, `mesh:2`), or a file of keys."""
    word, behind = words[position], [other for other in words[position + 1 :] if other != "="]
    if word.endswith((".yaml", ".yml")):
        return ConfigError(word, "neither a task nor key=value", write=f"experiment={word}")
    key, colon, value = word.partition(":")
    if "." not in key and key not in field_types(Job):
        return None
    value = value.strip() or (behind[0] if behind and "=" not in behind[0] else "...")
    problem = "a colon stands in files; here it is =" if colon else "key and value are one word"
    return ConfigError(word, problem, write=shlex.quote(f"{key}={value}"))


_OTHER_WORDS = {"train": "fit", "run": "fit", "evaluate": "validate", "infer": "predict"}
"""What other tools call our tasks."""


def _overrides(words: list[str]) -> list[str]:
    overrides = []
    for position, word in enumerate(words):
        if word.removeprefix("+").startswith("plan="):
            overrides.append(f"experiment={word.partition('=')[2]}")
        elif word.lstrip("+").startswith("trainer.callbacks"):
            raise ConfigError(
                word, "callbacks stand by themselves", "callbacks", word.lstrip("+").removeprefix("trainer.")
            )
        elif "=" in word or word.startswith("~"):
            overrides.append(into_open_group(quoted_mesh(word)))
        elif position == 0 and word in TASKS:
            overrides.append(f"task={word}")
        elif line := foreign_line(word, "true"):  # bf16
            raise ConfigError(word, "neither a task nor key=value", write=line)
        elif shape := word if looks_like_mesh(word) else shape_meant(word):
            raise ConfigError(word, "a mesh is given by its key", write=f"mesh={shape}")
        elif apart := _key_apart(words, position):
            raise apart
        elif position == 0:
            close = _OTHER_WORDS.get(nearest(word, [*TASKS, *_OTHER_WORDS])) or nearest(word, TASKS)
            raise ConfigError(
                f"autolaunch {word}",
                "no such task" + (f"; did you mean {close}?" if close else ""),
                ", ".join(TASKS),
                shlex.join(["autolaunch", close or "fit", *words[1:]]),
            )
        elif word in TASKS and words[0] in TASKS:
            others = [other for other in words[1:] if other is not word]
            problem = f"one run has one task, and {words[0]} stands before it"
            raise ConfigError(word, problem, write=shlex.join(["autolaunch", word, *others]))
        elif word in TASKS:
            others = [other for other in words if other is not word]
            raise ConfigError(word, "the task is the first word", write=shlex.join(["autolaunch", word, *others]))
        else:
            raise ConfigError(word, "neither a task nor key=value", write=f"{word}=...")
    return overrides


def _refuse_two_options(overrides: Sequence[str]) -> None:
    """Refuse a group that is chosen twice, of which Hydra would take the last without a word.

    Only what was typed is looked at: the program itself adds to a line what is to win over it.
    """
    chosen: dict[str, str] = {}
    for override in overrides:
        group = override.partition("=")[0]
        if group not in GROUPS:
            continue
        before = chosen.setdefault(group, override)
        if before != override:
            allowed = "one of the two" + (f", or both in a list: {group}=[...]" if group in SEVERAL_OPTIONS else "")
            raise ConfigError(f"{unquoted(before)} {unquoted(override)}", f"{group} is chosen twice", allowed)


def quoted_mesh(override: str) -> str:
    """Quote bare numbers in `mesh=8` and `mesh=1,2`: Hydra reads them as numbers, but options of groups are texts."""
    if not override.startswith("mesh="):
        return override
    return re.sub(r"(?<=[=,(\[])\s*(-?\d+(?:\.\d*)?(?:e\d+)?)\s*(?=$|[,)\]])", r"'\1'", override)


OPEN_GROUPS = (
    *("model.config.", "model.mp_plans.", "mp.plan.", "cp.plan.", "callbacks.", "logger.", "module."),
    "cluster.constants.",
    "data.columns.",
)
"""Keys below which anything may stand: what is typed there may be new."""


def into_open_group(override: str) -> str:
    """Let `model.config.n_layer=2` set a key that is not there yet, without Hydra's `+` in front of it."""
    return f"++{override}" if _is_open(override) else override


def _is_open(override: str) -> bool:
    key = override.partition("=")[0]
    # `logger=csv` chooses an option; `mp.plan={...}` sets keys below it.
    return f"{key}.".startswith(OPEN_GROUPS) and key not in ("callbacks", "logger")


def unquoted(override: str) -> str:
    """The override as it was typed before `quoted_mesh` and `into_open_group`."""
    if override.startswith("mesh="):
        return override.replace("'", "")
    return override.removeprefix("++") if _is_open(override[2:]) else override


def users_want_tracebacks() -> bool:
    """Whether the person asked Hydra for tracebacks instead of messages."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"
