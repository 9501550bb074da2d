"""`autolaunch --help` and `autolaunch --info KEY`: pages made from the schema and from the files of conf/."""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autolaunch.config.against_schema import field_types, group_schema, help_of, schemas_of
from autolaunch.config.arithmetic import KEYS_BY_DEVICE, with_arithmetic
from autolaunch.config.command_line import HYDRA_INFO
from autolaunch.config.schema import FAMILIES, GROUPS, TASKS, Job, default_of, defaults_of
from autolaunch.config.slips import own_key
from autolaunch.config.sources import SHAPES
from autolaunch.config.task_pages import TASK_PAGES
from autolaunch.directories import CONF
from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.config.values import limits_text, written
from autolaunch_strategies.plan.context import CONTEXT_STYLES
from autolaunch_strategies.plan.rules import STYLES

_TYPED_KEYS = (
    "model.size", "data.path", "data.seq_len", "data.batch_size", "data.microbatches", "optimizer.lr",
    "trainer.max_steps", "precision", "recompute", "compile", "seed", "ckpt_path", "output_dir",
    "checkpoint.every_n_steps",
)  # fmt: skip

_EXAMPLES = (
    ("autolaunch model=llama mesh=2 trainer.max_steps=200", "train on two ranks"),
    ("autolaunch plan model=llama model.size=8b mesh=8 dp=fsdp precision=bf16-mixed", "show what a run would do"),
    ("autolaunch -m dp=fsdp,zero1 mesh=1,2", "four runs, one after the other, and a table"),
)

_NARROW = 70
"""Columns of a terminal below which three side by side leave no room for text."""

_STYLES_OF = {"mp.plan": tuple(STYLES), "cp.plan": CONTEXT_STYLES}

_FLAGS = (
    ("help TASK", "its page: the keys that matter to it, lines to type, where it writes"),
    ("help KEY, --info KEY", "what a group or key means: --info trainer, --info trainer.max_steps"),
    ("--cfg job", "the whole config, without running anything (--package KEY for a part of it)"),
    ("-m", "run every combination of the values separated by commas"),
    ("--why MP=4,PP=2", "plan cluster=...: why these values were not chosen"),
    ("--full", "plan cluster=...: every figure, pictures, and what the plan does to each part of the model"),
    ("--config-dir DIR", "use your own files beside conf/: DIR/model/mine.yaml, DIR/experiment/e1.yaml"),
    ("--config-name NAME", "begin with your own NAME.yaml instead of config.yaml"),
    (
        "-sc install=bash",
        """complete tasks, groups and keys with Tab: eval "$(autolaunch -sc install=bash)"; zsh, fish""",
    ),
    ("--version, --hydra-help", ""),
)


def print_help(directories: Sequence[Path], console: Console) -> None:
    """Print the page of `--help`, with the options that these config directories offer."""
    console.print("Train a single-device PyTorch model on many devices, from YAML.\n", highlight=False)
    console.print("[bold]autolaunch[/] \\[task] \\[group=option] \\[key=value] ...\n", highlight=False)
    tasks = [(name, text + (" (default)" if name == "fit" else "")) for name, text in TASKS.items()]
    commands = [
        ("checkpoint verify PATH", "say whether checkpoints are what was written"),
        ("data show key=value ...", "show what of documents and chats is trained on, and what is left out"),
    ]
    _section("Tasks", [*tasks, *commands], console)
    rows = [(f"{name}=", _options_line(name, text, directories)) for name, text in _groups(directories)]
    _section("Groups and their options", rows, console)
    _section("Keys people type", [(f"{key}=", _help_of(key)) for key in _TYPED_KEYS], console)
    _section("Flags", _FLAGS, console)
    _print_examples(_EXAMPLES, console)
    console.print(
        "\nMore: the files in conf/, `autolaunch --info all`, and https://hydra.cc for the rules of overrides."
    )


def print_task(task: str, directories: Sequence[Path], console: Console) -> None:
    """Print the page of one task: what it does, the keys that matter to it, lines to type, where it writes."""
    page = TASK_PAGES[task]
    console.print(Text(f"autolaunch {task}: {TASKS[task]}\n", style="bold"))
    rows = [(f"{key}=", "", _options_line(key, GROUPS[key], directories)) for key in page.keys if key in GROUPS]
    for key in (key for key in page.keys if key not in GROUPS):
        schemas = schemas_of(key)
        if schemas:
            found = [item for schema in schemas.values() for item in keys_below(key, schema)]
        else:
            parent, item = next(_fields(key))
            found = [(key, parent, item)]
        rows += [_key_row(*item) for item in found]
    _print_keys(rows, console)
    _print_examples(page.examples, console)
    where = "Writes, to output_dir (null: outputs/<name>/<date>_<time>) unless another place is named"
    console.print(Text(f"\n{where}: {page.writes}."))
    console.print(Text("All other keys: autolaunch --help, autolaunch --info KEY."))


def _print_examples(examples: Sequence[tuple[str, str]], console: Console) -> None:
    _section("Examples", [], console)
    for line, text in examples:
        console.print(Text(f"  {line}", style="cyan"), soft_wrap=True)
        console.print(Text(f"      {text}"))


def _section(title: str, rows: Sequence[tuple[str, str]], console: Console) -> None:
    if title:
        console.print(Text(title, style="bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, text in rows:
        table.add_row(f"  {name}", Text(text))
    console.print(table)
    if rows:
        console.print()


def _groups(directories: Sequence[Path]) -> Iterator[tuple[str, str]]:
    yield from GROUPS.items()
    folders = {
        entry.name for path in directories for entry in path.iterdir() if entry.is_dir() and any(entry.glob("*.yaml"))
    }
    for name in sorted(folders - set(GROUPS) - {"hydra"}):
        yield name, ""


def options(group: str, directories: Sequence[Path]) -> list[str]:
    """The YAML files of a config group in these directories, by name."""
    return sorted({file.stem for directory in directories for file in (directory / group).glob("*.yaml")})


def is_option(choice: str, directories: Sequence[Path]) -> bool:
    """Whether `group=option` names a file of the group; true of all that is no choice of one option."""
    group, _, option = choice.partition("=")
    is_one = option and group in GROUPS and "," not in option and choice != "mesh=auto"
    return not is_one or option in options(group, directories)


def _options_line(group: str, text: str, directories: Sequence[Path]) -> str:
    names = options(group, directories)
    if group == "mesh":
        names += SHAPES
    return ", ".join(names) + (f"  ({text})" if text else "")


def _fields(key: str) -> Iterator[tuple[type, dataclasses.Field[Any]]]:
    """(schema, field) of a dotted key; several where models or data of different names share the key."""
    parents: list[type] = [Job]
    *groups, name = key.split(".")
    for depth, group in enumerate(groups):
        if depth == 0 and group in FAMILIES:
            parents = list(FAMILIES[group].values())
        else:
            hints = [field_types(parent).get(group) for parent in parents]
            parents = [schema for hint in hints if (schema := group_schema(hint)) is not None]
    for parent in parents:
        yield from ((parent, item) for item in dataclasses.fields(parent) if item.name == name)


def _help_of(key: str) -> str:
    return next(help_of(item) for _, item in _fields(key))


def keys_below(group: str, schema: type) -> Iterator[tuple[str, type, dataclasses.Field[Any]]]:
    """(key, schema that has it, field) of every key below `group`, of nested schemas what can be typed."""
    for item in dataclasses.fields(schema):
        inner = group_schema(field_types(schema)[item.name])
        if inner is None:
            yield f"{group}.{item.name}", schema, item
        else:
            yield from keys_below(f"{group}.{item.name}", inner)


def known_keys(directories: Sequence[Path] = (CONF,)) -> list[str]:
    """Every group and dotted key that the schema or a file of an option describes."""
    keys = list(GROUPS)
    for item in dataclasses.fields(Job):
        if item.name not in keys:
            keys.append(item.name)
        for schema in schemas_of(item.name).values():
            keys += [f"{item.name}.{inner.name}" for inner in dataclasses.fields(schema)]
            keys += [key for key, _, _ in keys_below(item.name, schema)]
    for group in OF_CLASSES:
        keys += [f"{group}.{option}" for option in options(group, directories)]
        keys += [key for key, _, _ in keys_in_files(group, directories)]
    return list(dict.fromkeys(keys))


OF_CLASSES = ("callbacks", "logger")
"""Groups whose options name a class: which keys there are, the file of the option says."""


def keys_in_files(group: str, directories: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """(key, value, comment) of what the files of a group's options hand to their classes, as it stands there."""
    for option in options(group, directories):
        lines = _file_of(group, option, directories).read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if written_key := re.fullmatch(r"  (?!_target_)(\w+): (.*?)(?:\s+# (.*))?", line):
                key, value, comment = written_key.groups()
                yield f"{group}.{option}.{key}", value, comment or ""


def print_info(key: str, directories: Sequence[Path], console: Console) -> None:
    """Print the page of `--info KEY`.

    Raises:
        ConfigError: no group or key of this name.
    """
    key = key.rstrip("=").removesuffix(".")
    key, _, chosen = key.partition("=")
    known = known_keys(directories)
    own = options(key, directories)
    if key not in known and not own:
        close = nearest(key, [*TASKS, *known, *HYDRA_INFO]) or next((k for k in known if k.endswith(f".{key}")), "")
        same_name = [name for name in known if name.rsplit(".", 1)[-1] == key]
        close = same_name[0] if same_name else own_key(key) or close
        raise ConfigError(
            f"--info {key}",
            "no such group or key" + (f"; did you mean {close}?" if close else ""),
            f"a group ({', '.join(GROUPS)}), any key, or {', '.join(HYDRA_INFO)}",
            (f"autolaunch help {close}" if close in TASKS else f"autolaunch --info {close}") if close else "",
        )
    if key in GROUPS or own:
        _print_group(key, chosen, directories, console)
    group, _, rest = key.partition(".")
    if group in OF_CLASSES and rest:
        _print_file(group, key, directories, console)
        return
    schemas = schemas_of(key)
    if schemas:
        for name, schema in schemas.items():
            if chosen in schemas and name != chosen:
                continue
            _print_schema(key, schema, console)
    else:
        for parent, item in _fields(key):
            inner = group_schema(field_types(parent)[item.name])
            if inner is None:
                _print_key(key, parent, item, console)
            else:
                _print_schema(key, inner, console)


def _print_group(key: str, chosen: str, directories: Sequence[Path], console: Console) -> None:
    console.print(Text(f"{key}=  {GROUPS.get(key, '')}".rstrip(), style="bold"))
    console.print(Text(f"  options: {_options_line(key, '', directories)}"))
    if chosen:
        console.print(Text(f"  for the keys of one option: autolaunch {key}={chosen} --cfg job --package {key}"))
    console.print()
    described = [
        (f"{key}={name}", what_it_is(key, name, directories))
        for name in options(key, directories)
        if chosen in ("", name)
    ]
    if len(options(key, directories)) > 1 and any(text for _, text in described):
        _section("", described, console)


def what_it_is(group: str, option: str, directories: Sequence[Path]) -> str:
    """The comment at the beginning of an option's YAML file."""
    lines = _file_of(group, option, directories).read_text(encoding="utf-8", errors="replace").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("# ") for line in comments if not line.startswith("# @package"))


def _file_of(group: str, option: str, directories: Sequence[Path]) -> Path:
    return next(file for directory in directories if (file := directory / group / f"{option}.yaml").is_file())


def _print_file(group: str, key: str, directories: Sequence[Path], console: Console) -> None:
    """What the file of an option says of itself and of its keys, or of one."""
    option = key.split(".")[1]
    console.print(Text(what_it_is(group, option, directories), style="bold"))
    rows = [
        (name, "must be given" if value == "???" else value, comment)
        for name, value, comment in keys_in_files(group, directories)
        if name == key or (name.startswith(f"{key}.") and key.count(".") == 1)
    ]
    _print_keys(rows, console)


def _print_schema(key: str, schema: type, console: Console) -> None:
    console.print(Text((schema.__doc__ or "").strip(), style="bold"))
    _print_keys([_key_row(*found) for found in keys_below(key, schema)], console)


def _key_row(name: str, parent: type, item: dataclasses.Field[Any]) -> tuple[str, str, str]:
    return name, default_text(item), _sentence(item, field_types(parent)[item.name])


def _print_keys(rows: Sequence[tuple[str, str, str]], console: Console) -> None:
    """Print (key, value, text) of each row: side by side, or on a narrow terminal the text below the key."""
    if console.width < _NARROW:
        for name, value, text in rows:
            console.print(Text(f"  {name}  ", "cyan").append(value, "dim"))
            if text:
                console.print(Padding(Text(text), (0, 0, 0, 6)))
    else:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(style="dim")
        table.add_column()
        for name, value, text in rows:
            table.add_row(f"  {name}", Text(value), Text(text))
        console.print(table)
    console.print()


def _print_key(key: str, parent: type, item: dataclasses.Field[Any], console: Console) -> None:
    hint = field_types(parent)[item.name]
    of = f"  ({(parent.__doc__ or '').split(':')[0]})" if key.split(".")[0] in FAMILIES else ""
    console.print(Text(f"{key}{of}", style="bold"))
    rows = [("", help_of(item)), ("type", type_text(hint)), ("default", default_text(item))]
    if item.metadata.get("choices"):
        rows.append(("choices", ", ".join(map(written, item.metadata["choices"]))))
    if limits := limits_text(item.metadata):
        rows.append(("limits", limits))
    if key in KEYS_BY_DEVICE:
        values, reasons = with_arithmetic(defaults_of(Job))
        rows.append(("here", f"{written(values[key])} ({reasons.get(key, 'no effect on a CPU')})"))
    if key in _STYLES_OF:
        rows.append(("styles", ", ".join(_STYLES_OF[key])))
    for name, text in rows:
        console.print(Text(f"  {name + ': ' if name else ''}{text}"))
    console.print()


def _sentence(item: dataclasses.Field[Any], hint: Any) -> str:
    choices = item.metadata.get("choices")
    if choices:
        return f"{help_of(item)} [{', '.join(map(written, choices))}]"
    return f"{help_of(item)} [{type_text(hint)}{', ' + limits if (limits := limits_text(item.metadata)) else ''}]"


def default_text(item: dataclasses.Field[Any]) -> str:
    return "" if dataclasses.is_dataclass(item.default_factory) else written(default_of(item))


def type_text(hint: Any) -> str:
    """A type as one would say it in YAML: `int or null`, `list of float`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(type_text(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {type_text(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict or hint is dict:
        return "mapping"
    if hint is types.NoneType:
        return "null"
    return "any" if hint is Any else str(getattr(hint, "__name__", hint))
