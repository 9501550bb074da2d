"""conf/ and the overrides, composed once before anything is run, so that a mistake costs a message and no more.

What is then run or printed is that very config; Hydra does not compose it again. Hydra stops at the first override that
it cannot apply and speaks of its own workings. Here the override is set aside, the rest composed again, and every
mistake told in the words of the command line.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import run_and_report
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from autolaunch.config.against_schema import alike, field_types, is_list, keys_text, node_schema, schemas_of
from autolaunch.config.command_line import (
    CommandLine,
    into_open_group,
    quoted_mesh,
    unquoted,
    users_want_tracebacks,
)
from autolaunch.config.origin import Origin
from autolaunch.config.schema import FAMILIES, GROUPS, MISSING, SEVERAL_OPTIONS, TASKS, Job
from autolaunch.config.slips import line_for_name, line_for_option, near_option, shape_meant, slip
from autolaunch.config.sources import (
    GROUPS_OF_FILES,
    ExperimentFileSource,
    MeshSearchPath,
    cluster_kinds,
    cluster_meant,
    register,
)
from autolaunch.directories import CONF, shown
from autolaunch.garbage import no_garbage_collection
from autolaunch_strategies.config import AXES, CP_BACKEND_SPECS, ConfigError, as_typed, nearest, quoted, raise_all

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
"""Hydra 1.3 warns if it is absent, 1.4 if it is present."""

JOB_NAME = "autolaunch"


@dataclass
class Composed:
    """What a command line composes to."""

    config: DictConfig
    """The whole config with its `hydra` node; of a sweep, its first job."""
    multirun: bool
    errors: list[ConfigError]
    """Overrides that could not be applied; `config` is composed without them."""
    origin: Origin


class _Composed(ConfigLoaderImpl):
    """A loader that has its config already: Hydra does with it what it does with one that it composes."""

    def __init__(self, config: DictConfig, loader: ConfigLoader) -> None:
        super().__init__(loader.get_search_path())
        self._config = config

    def load_configuration(self, *_: Any, **options: Any) -> DictConfig:
        config = copy.deepcopy(self._config)  # Hydra takes apart what it prints
        OmegaConf.set_readonly(config.hydra, False)
        return config

    _load_configuration = load_configuration
    """What Hydra 1.4 calls in its place."""


@contextmanager
def _search_path(line: CommandLine) -> Iterator[str]:
    """Have Hydra look where this command line says; yields the directory of the primary config."""
    register()
    MeshSearchPath.config_dir = line.config_dir
    ExperimentFileSource.chosen = dict(item.partition("=")[::2] for item in line.overrides)
    try:
        yield str(line.config_path or CONF)
    finally:
        MeshSearchPath.config_dir = None
        ExperimentFileSource.chosen = {}


@contextmanager
def _initialized(line: CommandLine) -> Iterator[ConfigLoader]:
    """Have Hydra at hand for this command line, as its own main function has; yields what composes."""
    with _search_path(line) as directory, hydra.initialize_config_dir(directory, JOB_NAME, **VERSION_BASE):
        yield GlobalHydra.instance().config_loader()


@no_garbage_collection()
def compose(line: CommandLine) -> Composed:
    """Compose a command line; for a sweep, every combination of its config groups.

    Raises:
        ConfigError, ConfigErrors: nothing can be composed, be it without the overrides that are wrong.
    """
    with _initialized(line) as loader:
        multirun = line.multirun or _wants_multirun(line.overrides)
        errors: list[ConfigError] = []
        parsed = _parse(line.overrides, loader, errors)
        if not multirun and (line.runs or line.cfg is not None):
            errors += [_sweep_without_m(item, loader, line) for item in parsed if item.is_sweep_override()]
            parsed = [item for item in parsed if not item.is_sweep_override()]
        composed = None
        for overrides in _combinations(parsed, loader, errors):
            config = _compose(overrides, loader, line, errors)
            composed = composed or config
        errors = list({str(error): error for error in errors}.values())  # a combination repeats those of another
        if composed is None:
            raise_all(errors)
        assert composed is not None
        mode, origin = composed.hydra.mode, Origin(composed.hydra, loader)
        if composed.hydra.job.chdir:
            errors.append(_chdir(origin))
        return Composed(composed, multirun or (mode is not None and mode.name == "MULTIRUN"), errors, origin)


def check_option(line: CommandLine) -> None:
    """Check that there is the option that a page is asked for by `--info group=option`.

    Raises:
        ConfigError, ConfigErrors: what a run with it would be told.
    """
    assert line.info is not None
    run = replace(line, info=None, cfg="job", overrides=[into_open_group(quoted_mesh(line.info))])
    errors = []
    for error in compose(run).errors:
        is_option = re.fullmatch(r"\S+", error.write)  # and not several keys
        write = f"autolaunch --info {error.write}" if is_option else error.write
        errors.append(ConfigError(f"--info {error.where}", error.problem, error.allowed, write))
    raise_all(errors)


def _chdir(origin: Origin) -> ConfigError:
    return ConfigError(
        origin("hydra.job.chdir", True),
        "the relative paths of a config are those of the directory in which the command was typed",
        "hydra.job.chdir=false; output_dir says where a run writes",
        "hydra.job.chdir=false",
    )


def run_once(line: CommandLine, config: DictConfig, directory: Path, task: Callable[[DictConfig], Any]) -> int:
    """Have Hydra run the config that a line was composed to, in a directory, by a task; returns the exit code."""
    with read_write(config.hydra):
        config.hydra.run.dir = str(directory)
    with _initialized(line) as loader:
        composed = Hydra(JOB_NAME, _Composed(config, loader))
        return _exit_code(lambda: run_and_report(lambda: composed.run(line.config_name, task, line.overrides)))


def run_sweep(line: CommandLine, directory: Path, task: Callable[[DictConfig], Any]) -> int:
    """Have Hydra's sweeper run the jobs of a line, in a directory, each by a task; returns the exit code."""
    overrides = [*line.overrides, f"hydra.sweep.dir={quoted(str(directory))}", "hydra.mode=MULTIRUN"]
    with _initialized(line):
        sweeping = GlobalHydra.instance().hydra
        assert sweeping is not None
        return _exit_code(lambda: run_and_report(lambda: sweeping.multirun(line.config_name, task, overrides)))


def jobs_of_sweep(line: CommandLine) -> list[list[str]]:
    """The overrides of every job that Hydra's own sweeper makes of a line."""
    with _initialized(line) as loader:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(line.overrides)
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
        return jobs


def print_config(line: CommandLine, config: DictConfig) -> int:
    """Print what `--cfg` asks for of the config that a line was composed to; returns the exit code.

    Raises:
        ConfigError: `--package` names nothing of it.
    """
    assert line.cfg is not None
    if line.package not in (None, "_global_") and (value := _empty_package(line, config)):
        print(value)  # of which Hydra says that it is not there
        return 0
    with _initialized(line) as loader:
        composed = Hydra(JOB_NAME, _Composed(config, loader))
        options = (line.config_name, line.overrides, line.cfg, line.package, line.resolve)
        return _exit_code(lambda: run_and_report(lambda: composed.show_cfg(*options)))


def _empty_package(line: CommandLine, config: DictConfig) -> str:
    """What `--package` names, if it is null or has no value yet; else empty."""
    assert line.package is not None and line.cfg is not None
    values: Any = OmegaConf.to_container(config, resolve=False)
    parts = {"job": [key for key in values if key != "hydra"], "hydra": ["hydra"], "all": list(values)}
    has_it = line.package.partition(".")[0].partition("[")[0] in parts[line.cfg]
    try:
        if has_it and OmegaConf.select(OmegaConf.masked_copy(config, parts[line.cfg]), line.package) is not None:
            return ""
    except OmegaConfBaseException as error:  # what a value refers to
        raise ConfigError(f"--package {line.package}", _first_line(error), "--cfg all, which has every key") from None
    value = _select(values, line.package) if has_it else _ABSENT
    if value is not _ABSENT:
        return "null" if value is None else str(value)
    close = alike(line.package, [*parts[line.cfg], *_dotted(_without_hydra(config))])
    raise ConfigError(
        f"--package {line.package}",
        f"no such key in --cfg {line.cfg}" + (f"; did you mean {close}?" if close else ""),
        "a group or a key, as --cfg prints them without --package",
        f"autolaunch --cfg {line.cfg} --package {close}" if close else f"autolaunch --cfg {line.cfg}",
    )


def print_page(line: CommandLine) -> int:
    """Let Hydra print a page of its own: `--info`, `--hydra-help` or a completion; returns the exit code."""
    typed = sys.argv
    # Hydra reads sys.argv itself. Its own flags first: Hydra 1.3 does not take overrides in two groups.
    sys.argv = [typed[0], *line.hydra_flags, *line.overrides]
    try:
        with _search_path(line) as directory:
            return _exit_code(hydra.main(config_path=directory, config_name=line.config_name, **VERSION_BASE)(_nothing))
    finally:
        sys.argv = typed


def _nothing(config: DictConfig) -> None:
    raise AssertionError("Hydra was asked for a page and ran a job")


def _exit_code(call: Callable[[], Any]) -> int:
    """The exit code with which a call ends: Hydra ends the process where something failed."""
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _wants_multirun(overrides: Sequence[str]) -> bool:
    return "hydra.mode=MULTIRUN" in overrides


def _parse(overrides: Sequence[str], loader: ConfigLoader, errors: list[ConfigError]) -> list[Override]:
    parser = OverridesParser.create(config_loader=loader)
    parsed = []
    for override in overrides:
        try:
            (item,) = parser.parse_overrides([override])
            if not item.key_or_group:
                errors.append(ConfigError(unquoted(override), "has no key in front", "key=value"))
            elif item.key_or_group == "experiment" and str(item.value()).endswith(".yml"):
                errors.append(_no_such_option(override, f"experiment/{item.value()}", loader))
            elif isinstance(item.value(), int | float) and _is_group(loader, item.key_or_group):
                errors.append(_no_such_option(override, f"{item.key_or_group}/{item.value()}", loader))
            elif _is_list_or_null(chosen := item.value()) and item.key_or_group in GROUPS and not item.is_delete():
                problem = _no_one_option(override, item.key_or_group, chosen, loader)
                errors += [] if problem is None else [problem]
                parsed += [item] if problem is None else []
            else:
                parsed.append(item)
        except OverrideParseException as error:
            if users_want_tracebacks():
                raise
            errors.append(_unreadable(override, error))
    return parsed


def _is_list_or_null(value: Any) -> TypeGuard[list[Any] | None]:
    return value is None or isinstance(value, list)


def _no_one_option(override: str, group: str, chosen: list[Any] | None, loader: ConfigLoader) -> ConfigError | None:
    """What is wrong with a list of options, or with null, in place of the one option of a group."""
    options = loader.get_group_options(group, ObjectType.CONFIG)
    if chosen is None:
        is_optional = group in (*_USUAL_OPTIONS, *SEVERAL_OPTIONS, "cluster")
        allowed = _options_text(group, options) + ("; or nothing, which chooses none" if is_optional else "")
        return ConfigError(unquoted(override), "null is no option of a group", allowed)
    names = [str(item) for item in chosen]
    if group in SEVERAL_OPTIONS and all(isinstance(item, str) for item in chosen):
        return None
    is_shape = group == "mesh" and bool(names) and all(re.fullmatch(r"-?\d+", name) for name in names)
    first = "x".join(names) if is_shape else next((name for name in names if name in options), "")
    return ConfigError(
        unquoted(override),
        f"a list of names is needed, as {group} has options" if group in SEVERAL_OPTIONS else f"{group} is one option",
        _options_text(group, options),
        f"{group}={first}" if first else "",
    )


def _unreadable(override: str, error: OverrideParseException) -> ConfigError:
    position = re.search(r"\n( *)\^", str(error))
    at = len(position[1]) if position else None
    spoilt = f": {override[at]!r} has a meaning of its own" if at is not None and at < len(override) else ""
    override = unquoted(override)
    if meant := _with_plain_quotes(override):
        return ConfigError(override, "has quotes of a word processor", "' and \"", shlex.quote(meant))
    key, _, value = override.partition("=")
    if not re.fullmatch(r"[+~]{0,2}[A-Za-z_$][\w.$/@:-]*", key):
        return ConfigError(
            override, f"{key!r} cannot be the name of a key", "names of keys joined by dots", "key=value"
        )
    if key == "mesh" and (shape := shape_meant(value)):
        return ConfigError(override, "not a mesh shape", write=f"mesh={shape}")
    # Patterns over names of modules are keys of a mapping, and keys have no quotes.
    escaped = re.sub(r"(?<=[{,])[^{},:]*(?=:)", lambda name: _key_of_mapping(name[0]), value)
    if escaped != value and _readable(f"{key}={escaped}"):
        return ConfigError(
            override,
            f"Hydra cannot read this value{spoilt}",
            "names of keys without quotes, a backslash before each bracket in them",
            shlex.quote(f"{key}={escaped}"),
        )
    if value[:1] == "[" and value[-1:] == "]":
        listed = ",".join(f'"{item.strip()}"' for item in value[1:-1].split(","))
        if '"' not in value and _readable(f"{key}=[{listed}]"):
            problem = f"Hydra cannot read this value{spoilt}"
            return ConfigError(override, problem, "a list of texts in quotes", shlex.quote(f"{key}=[{listed}]"))
    if is_list(key):
        return ConfigError(override, "must be a list of texts", write=shlex.quote(f"{key}=[{quoted(value)}]"))
    return ConfigError(override, f"Hydra cannot read this value{spoilt}", "a text in quotes", as_typed(key, value))


def _key_of_mapping(name: str) -> str:
    """The name of a key as Hydra reads it."""
    return re.sub(r"[][()]", r"\\\g<0>", name.strip(" '\""))


_PLAIN_QUOTES = str.maketrans("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2018\u2019\u201a\u201b", '""""""\'\'\'\'')
"""What word processors make of quotes -> those of a shell."""


def _with_plain_quotes(override: str) -> str:
    """What was meant by an override with quotes of a word processor, without those that do nothing; empty if none."""
    plain = override.translate(_PLAIN_QUOTES)
    bare = re.sub(r"""(["'])([\w./=-]+)\1""", r"\2", plain)
    return next((line for line in (bare, plain.strip("'\""), plain) if line != override and _readable(line)), "")


def _readable(override: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([override])
    except OverrideParseException:
        return False
    return True


def _sweep_without_m(item: Override, loader: ConfigLoader, line: CommandLine) -> ConfigError:
    override = unquoted(str(item.input_line))
    key, _, value = override.partition("=")
    if key == "mesh" and (shape := shape_meant(value)):
        problem = "several meshes, one for each run: the axes of one mesh are joined by x"
        return ConfigError(override, problem, "one mesh; or -m, and one run after the other", f"mesh={shape}")
    listable, listed = "(" not in value and not _is_group(loader, item.key_or_group), shlex.quote(f"{key}=[{value}]")
    words = [unquoted(typed).removeprefix("task=") for typed in line.overrides]
    return ConfigError(
        override,
        "several values, but no -m to run them one after the other",
        f"one value, or a list: {listed}" if listable else "one value",
        " ".join(["autolaunch", *(listed if word == override else shlex.quote(word) for word in words)])
        if listable and is_list(key)
        else shlex.join(["autolaunch", "-m", *words]),
    )


def _combinations(parsed: list[Override], loader: ConfigLoader, errors: list[ConfigError]) -> Iterator[list[str]]:
    """The overrides of every combination of swept groups, each with the first value of every other swept key."""
    choices: list[list[str]] = []
    for item in parsed:
        if not item.is_sweep_override():
            choices.append([str(item.input_line)])
        elif item.is_discrete_sweep():
            try:
                values = [f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()]
            except Exception as error:
                errors.append(ConfigError(str(item.input_line), _first_line(error)))
                continue
            if not values:
                errors.append(ConfigError(str(item.input_line), "stands for no value at all"))
                continue
            choices.append(values if _is_group(loader, item.key_or_group) else values[:1])
        # An interval is drawn from by its sweeper only, so that there is no value to try here.
    yield from (list(combination) for combination in itertools.product(*choices))


def _is_group(loader: ConfigLoader, name: str) -> bool:
    return bool(name) and any(source.is_group(name) for source in loader.get_sources())


def _compose(
    overrides: list[str], loader: ConfigLoader, line: CommandLine, errors: list[ConfigError]
) -> DictConfig | None:
    """Compose; each override that cannot be applied is set aside with an error. None if the YAML itself is at fault."""
    rest = list(overrides)
    refused: list[tuple[str, Exception]] = []
    while True:
        try:
            config = hydra.compose(line.config_name, rest, return_hydra_config=True)
            break
        except Exception as error:
            if users_want_tracebacks():
                raise
            culprit = next((item for item in rest if _is_about(item, error)), None)
            if culprit is None:
                errors.extend(_refusal(item, problem, {}, loader) for item, problem in refused)
                errors.append(_yaml_at_fault(error, line))
                return None
            rest.remove(culprit)
            refused.append((culprit, error))
    told = [(item, problem) for item, problem in refused if not _is_key_of_refused_cluster(item, refused)]
    errors.extend(_refusal(item, problem, _without_hydra(config), loader) for item, problem in told)
    HydraConfig.instance().set_config(config)
    return config


def _is_key_of_refused_cluster(override: str, refused: Sequence[tuple[str, Exception]]) -> bool:
    """Whether only the name of the cluster is wrong: its keys are there once that is mended."""
    return override.startswith("cluster.") and any(item.startswith("cluster=") for item, _ in refused)


def _without_hydra(config: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(config, resolve=False)
    del values["hydra"]
    return dict(values)


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_about(override: str, error: Exception) -> bool:
    """Whether Hydra's refusal is about this override: it quotes it, its key, or the option that is not there."""
    key, _, value = override.partition("=")
    key, value = key.lstrip("+~"), value.strip("'\"")
    for link in _chain(error):
        if isinstance(link, MissingConfigException):
            options = [part.strip(" '\"") for part in value.strip("[]").split(",")]
            return any(link.missing_cfg_file == f"{key.split('@')[0]}/{option}" for option in options)
        if isinstance(link, ConfigError):
            return link.where == f"{key}={value}"
    text = str(error)
    if text.startswith("Could not append"):  # what has no + in front of the same key is not to blame
        return override.startswith("+") and f"'{key}'" in text
    return any(f"'{quoted}'" in text for quoted in (key, override)) or override in text.split("\n")[0]


def _refusal(override: str, error: Exception, config: Mapping[str, Any], loader: ConfigLoader) -> ConfigError:
    """Why an override cannot be applied, told by what the rest of the config holds."""
    for link in _chain(error):
        if isinstance(link, ConfigError):
            return link
        if isinstance(link, MissingConfigException):
            return _no_such_option(override, str(link.missing_cfg_file), loader)
    sign = "".join(itertools.takewhile(lambda letter: letter in "+~", override))
    typed, _, value = override[len(sign) :].partition("=")
    if sign.startswith("~"):
        return ConfigError(override, "there is no such key to delete", write=f"autolaunch --info {typed.split('.')[0]}")
    if sign == "+" and _select(config, typed) is not _ABSENT:
        return ConfigError(override, "the key is there already; + adds new keys", write=f"{typed}={value}")
    if _is_group(loader, typed) and _select(config, typed) is _ABSENT:
        return ConfigError(override, "this group is not in the defaults list", write=f"+{override}")
    if "/" in typed or "@" in typed:
        groups = _groups(loader)
        close = nearest(typed, groups)
        return ConfigError(
            override,
            "no such config group" + (f"; did you mean {close}?" if close else ""),
            ", ".join(groups),
            f"{close}={value}" if close else "",
        )
    if typed.startswith("hydra."):
        return ConfigError(override, _first_line(error.__cause__ or error))
    group, _, name = typed.rpartition(".")
    # A key of ours, where another option of its group is chosen or none, or one of the config of transformers.
    is_ours = any(name in field_types(schema) for schema in schemas_of(group).values())
    is_known = is_ours or _has_foreign_config(config.get(group))
    meant = None if is_known else slip(override, typed, value, config)
    return meant or _no_such_key(override, typed, value, config, loader)


_OTHER_NAMES = {
    **{"dp/zero3": "fsdp", "dp/fsdp2": "fsdp", "dp/zero0": "ddp", "dp/full_shard": "fsdp", "dp/no_shard": "ddp"},
    **{"dp/shard_grad_op": "zero2", "dp/hybrid_shard": "hsdp", "mp/tp": "tensor_parallel", "mp/sp": "seq_parallel"},
    **{
        f"cp/{name}": spec.name for spec in CP_BACKEND_SPECS.values() for name in (*spec.spellings, *spec.foreign_names)
    },
}
"""What other tools call our options."""

_PLUGINS = {
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
}
"""Options that a package of its own brings."""


def _absent_plugin(where: str, path: str) -> ConfigError | None:
    if path not in _PLUGINS:
        return None
    return ConfigError(where, f"the package {_PLUGINS[path]} is not installed", write=f"pip install {_PLUGINS[path]}")


def _no_such_option(override: str, path: str, loader: ConfigLoader) -> ConfigError:
    """`path`: the config file that Hydra looked for, `group/option`."""
    override = unquoted(override)
    key, _, typed = override.partition("=")
    group = key.lstrip("+").split("@")[0]
    option = path.removeprefix(f"{group}/")
    if group in GROUPS_OF_FILES and re.search(r"/|\.ya?ml$", option):
        misnamed = option.endswith(".yml") and Path(option).is_file()
        return ConfigError(
            override,
            "config files end in .yaml" if misnamed else "no such file",
            f"a name of conf/{group} or of --config-dir, or the path of a .yaml file",
        )
    if absent := _absent_plugin(override, path):
        return absent
    if meant := slip(override, group, typed):  # pp=2
        return meant
    options = loader.get_group_options(group, ObjectType.CONFIG)
    named = _OTHER_NAMES.get(path)
    elsewhere = "" if named else line_for_option(group, option, _names_of_options(loader))
    close = "" if elsewhere else named or _option_meant(group, option, options)
    own = f"{key}={typed.replace(option, close) if typed.startswith('[') else close}" if close else ""
    return ConfigError(
        override,
        f"{group} has no option {option!r}" + (f"; did you mean {close}?" if close else ""),
        _options_text(group, options),
        elsewhere or own or line_for_name(group, option),
    )


def _names_of_options(loader: ConfigLoader) -> dict[str, dict[str, str]]:
    """Group -> what its options are called, by us and by other tools -> the option."""
    names = {group: {name: name for name in loader.get_group_options(group, ObjectType.CONFIG)} for group in GROUPS}
    for path, option in _OTHER_NAMES.items():
        group, _, name = path.partition("/")
        names[group][name] = option
    return names


def _option_meant(group: str, option: str, options: Sequence[str]) -> str:
    return cluster_meant(option, options) if group == "cluster" else near_option(group, option, options)


def _options_text(group: str, options: Sequence[str]) -> str:
    if group == "cluster":
        return f"{', '.join(cluster_kinds(options))}, each also with a number, as h100xN with N devices"
    return ", ".join(sorted(options)) + (", or any other shape" if group == "mesh" else "")


_USUAL_OPTIONS = {"search": "search=auto", "adapter": "adapter=lora"}
"""Of groups of which nothing is chosen unless it is typed, the option that most mean."""


def _no_such_key(override: str, key: str, value: str, config: Mapping[str, Any], loader: ConfigLoader) -> ConfigError:
    if config and key.startswith("cluster.") and config.get("cluster") is None:
        return _no_cluster(override, config)
    group = key.partition(".")[0]
    if config and group in _USUAL_OPTIONS and config.get(group) is None:
        option = _USUAL_OPTIONS[group]
        start = "autolaunch -m " if group == "search" else ""
        return ConfigError(
            override,
            f"is a key of {group}, and there is no {group}",
            f"{option} beside it",
            f"{start}{option} {override}",
        )
    parent, node = _deepest(config, key)
    names = [*_dotted(config), *(name for name in field_types(Job) if name not in config)]  # cluster, if none is chosen
    known = sorted(names, key=lambda item: item.partition(".")[0] in TASKS)  # keys of one task come last
    rest = key[len(parent) + 1 :] if parent else key
    if parent and not isinstance(node, Mapping) and node is not None:
        return ConfigError(override, f"{parent} is a value, it has no keys of its own", write=f"{parent}=...")
    schema, is_open = node_schema(parent, node)
    in_schema = schema is not None and "." not in rest and rest in field_types(schema)
    if parent and (in_schema or is_open):
        reason = "the key is not in the YAML file of this group" if in_schema else f"{parent} has no such key yet"
        return ConfigError(override, reason, "a + in front of a new key", f"+{override}")
    name = key.rsplit(".", 1)[-1]
    siblings = [item for item in known if item.rpartition(".")[0] == parent]
    elsewhere = [item for item in known if item.rsplit(".", 1)[-1] == name]
    siblings_by_name = {item.rsplit(".", 1)[-1]: item for item in siblings}
    everywhere = {item.rsplit(".", 1)[-1]: item for item in reversed(known)}
    close = siblings_by_name.get(alike(rest, siblings_by_name), "")
    close = close or (elsewhere[0] if elsewhere else everywhere.get(alike(name, everywhere, cutoff=0.8), ""))
    if not close and _has_foreign_config(node):
        problem = "no such key; those of the config of transformers are keys of model.config"
        return ConfigError(override, problem, write=f"{parent}.config.{rest}={value}")
    if not close and (option := _option_with(parent, rest, config)):
        problem = f"it is a key of {option}, and this is {parent}={config[parent]['name']}"
        return ConfigError(override, problem, write=f"{option} {override}")
    if not close:
        return ConfigError(override, "no such key", *keys_text(parent, siblings_by_name))
    return ConfigError(override, f"no such key; did you mean {close}?", write=f"{close}={value}")


def _has_foreign_config(node: Any) -> bool:
    """Whether a part of the config has a config of another library in it, as `model=hf` has."""
    return isinstance(node, Mapping) and isinstance(node.get("config"), Mapping)


def _no_cluster(override: str, config: Mapping[str, Any]) -> ConfigError:
    """A number of a cluster where none is chosen; the line to write has as many devices as the mesh has ranks."""
    sizes = [(config.get("mesh") or {}).get(axis) for axis in AXES]
    ranks = math.prod(size if isinstance(size, int) else 0 for size in sizes)
    return ConfigError(
        override,
        "is a key of a cluster, and there is no cluster",
        "`plan` with a cluster beside it: cluster=local, or cluster=h100xN with N devices",
        f"cluster=h100x{ranks if ranks > 1 else 8} {override}",
    )


def _option_with(group: str, key: str, config: Mapping[str, Any]) -> str:
    """The option of a group, as `group=option`, that has a key which the chosen one has not; empty if none has."""
    schemas = FAMILIES.get(group, {}) if "name" in (config.get(group) or {}) else {}
    return next((f"{group}={name}" for name, schema in schemas.items() if key in field_types(schema)), "")


_ABSENT = object()


def _select(config: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return _ABSENT
        config = config[part]
    return config


def _deepest(config: Mapping[str, Any], key: str) -> tuple[str, Any]:
    """The longest beginning of a dotted key that the config has, and what is there."""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        parent = ".".join(parts[:length])
        if (node := _select(config, parent)) is not _ABSENT:
            return parent, node
    return "", config


def _dotted(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every dotted key of a config; of an empty one, of the schema."""
    if not config and not prefix:
        return list(field_types(Job))
    keys = []
    for name, value in config.items():
        keys.append(f"{prefix}{name}")
        if isinstance(value, Mapping):
            keys += _dotted(value, f"{prefix}{name}.")
    return keys


def _groups(loader: ConfigLoader) -> list[str]:
    return sorted(group for group in loader.list_groups("") if group not in ("hydra", "__pycache__"))


def _first_line(error: BaseException) -> str:
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).strip())
    return (text.splitlines() or [type(error).__name__])[0].strip('."')


def _yaml_at_fault(error: Exception, line: CommandLine) -> ConfigError:
    """An error that no override caused: a primary config or an experiment that is absent, or a broken YAML file."""
    for link in _chain(error):
        if isinstance(link, ConfigError):
            group, _, option = link.where.partition("=")
            where = f"{link.where}{_file_naming(group, option, line)}"
            return ConfigError(where, link.problem, link.allowed, link.write)
        if isinstance(link, yaml.MarkedYAMLError) and link.problem_mark is not None:
            mark = link.problem_mark
            where = f"{_shown(mark.name)}, line {mark.line + 1}"
            reason = f": {link.problem}" if link.problem else ""
            return ConfigError(where, f"not YAML{reason}; the mistake is here or just above")
        if isinstance(link, UnicodeDecodeError):
            return ConfigError(_place_of(link, line), "this file is not UTF-8, as YAML has to be", "a file in UTF-8")
        if isinstance(link, MissingConfigException):
            return _missing_file(link, line)
    if strange := re.search(r"Could not override '([^'@]+)", str(error)):
        return _no_group_to_override(strange[1], line)
    if "ListConfig" in str(error) and (file := next((item for item in _files(line) if _holds_a_list(item)), None)):
        return ConfigError(shown(file), "holds a list", "keys of a config, as `seed: 3`")
    for link in _chain(error):
        if isinstance(link, GrammarParseError | OmegaConfBaseException):
            key = getattr(link, "full_key", None)
            return ConfigError(key or "config", _first_line(link))
    return ConfigError("config", " ".join(str(error).split()))


def _no_group_to_override(group: str, line: CommandLine) -> ConfigError:
    """A defaults list that overrides what the primary config does not choose."""
    close = nearest(group, GROUPS)
    meant = f"; did you mean {close}?" if close else ""
    file = _file_with(rf"^\s*-\s*override\s+/?{re.escape(group)}\b|\[.*override\s+/?{re.escape(group)}\b", line)
    return ConfigError(f"override /{group}{file}", f"no such config group{meant}", ", ".join(GROUPS))


def _holds_a_list(file: Path) -> bool:
    try:
        return isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), list)
    except (OSError, ValueError, yaml.YAMLError):
        return False


def _missing_file(error: MissingConfigException, line: CommandLine) -> ConfigError:
    path, name = str(error.missing_cfg_file), line.config_name
    if path == name:
        directories = [directory for directory in (line.config_path or CONF, line.config_dir) if directory]
        names = sorted({file.stem for directory in directories for file in directory.glob("*.yaml")})
        close = nearest(name, names)
        return ConfigError(
            f"--config-name {name}",
            "no such primary config" + (f"; did you mean {close}?" if close else ""),
            ", ".join(names),
        )
    group, _, option = path.rpartition("/")
    if absent := _absent_plugin(f"{group}: {option}{_file_naming(group, option, line)}", path):
        return absent
    close = _option_meant(group, option, error.options or ())
    return ConfigError(
        f"{group}: {option}{_file_naming(group, option, line)}",
        f"{group} has no option {option!r}" + (f"; did you mean {close}?" if close else ""),
        _options_text(group, error.options or ()),
    )


def _file_naming(group: str, option: str, line: CommandLine) -> str:
    """` (file)` if a YAML file's defaults list names this option; Hydra only says who included that file."""
    choice = rf"{re.escape(group)}\s*:\s*['\"]?{re.escape(option)}['\"]?"
    return _file_with(rf"^\s*-\s*(override\s+)?/?{choice}\s*$", line)


def _file_with(pattern: str, line: CommandLine) -> str:
    """` (file)` of the first YAML file with a line like this; empty if there is none."""
    entry = re.compile(pattern, re.MULTILINE)
    texts = ((file, file.read_text(encoding="utf-8", errors="replace")) for file in _files(line))
    return next((f" ({shown(file)})" for file, text in texts if entry.search(text)), "")


def _place_of(error: UnicodeDecodeError, line: CommandLine) -> str:
    """The file, and the line in it, that could not be read; the error has the part of its bytes that was."""
    for file in _files(line):
        content = file.read_bytes()
        if error.object in content:
            before = content[: content.index(error.object) + error.start]
            return f"{shown(file)}, line {before.count(10) + 1}"
    return "config"


def _files(line: CommandLine) -> Iterator[Path]:
    """The YAML files that a command line may have named: by their paths, and of its directories of configs."""
    named = (Path(item.partition("=")[2].strip("'\"")) for item in line.overrides)
    yield from (file for file in named if file.suffix == ".yaml" and file.is_file())
    for directory in (line.config_dir, line.config_path or CONF):
        yield from sorted(file for file in directory.rglob("*.yaml") if file.is_file()) if directory else ()


def _shown(name: str) -> str:
    return shown(Path(name)) if Path(name).is_file() else name


def unresolvable(config: DictConfig, origin: Origin) -> list[ConfigError]:
    """A problem for each `${...}` of a composed config that stands for nothing."""
    errors = []
    for key, text in _interpolations(config):
        try:
            OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            errors.append(ConfigError(origin(key, text), _first_line(error)))
    return errors


def resolved(config: DictConfig) -> dict[str, Any]:
    """The job's part of a composed config as plain data, every `${...}` replaced."""
    values: dict[str, Any] = {}
    for key in map(str, config):
        if key != "hydra":
            value: Any = MISSING if OmegaConf.is_missing(config, key) else config[key]
            values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return values


def _interpolations(config: DictConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every value outside the hydra node that holds a `${...}`."""
    raw: Any = OmegaConf.to_container(config, resolve=False)
    raw.pop("hydra", None)

    def walk(values: Any, key: str) -> Iterator[tuple[str, str]]:
        if isinstance(values, Mapping):
            for name, value in values.items():
                yield from walk(value, f"{key}.{name}" if key else str(name))
        elif isinstance(values, list):
            for index, value in enumerate(values):
                yield from walk(value, f"{key}[{index}]")
        elif isinstance(values, str) and "${" in values:
            yield key, values

    yield from walk(raw, "")


def from_environment(config: DictConfig) -> list[str]:
    """The dotted keys of a composed config whose values come from variables of the environment, directly or not."""
    texts = dict(_interpolations(config))
    keys = {key for key, text in texts.items() if re.search(r"\$\{\s*(oc\.)?env:", text)}
    while True:
        names = {key.partition("[")[0] for key in keys}
        # What a key stands for is written as its whole name or, from beside it, as the end of that.
        parts = names | {name.rpartition(".")[2] for name in names}
        more = {key for key, text in texts.items() if any(re.search(rf"\b{re.escape(p)}\b", text) for p in parts)}
        if more <= keys:
            return sorted(keys)
        keys |= more
