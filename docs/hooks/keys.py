"""The page of every key: groups, options, types, defaults and limits, from the schema and the files of conf/."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from autolaunch.config.against_schema import field_types, help_of, schemas_of
from autolaunch.config.help import OF_CLASSES, default_text, keys_below, keys_in_files, options, type_text, what_it_is
from autolaunch.config.schema import GROUPS, TASKS, Job
from autolaunch.config.task_pages import TASK_PAGES
from autolaunch.directories import CONF
from autolaunch_strategies.config.values import limits_text, written

_INTRODUCTION = """# Every key

Made from the schema when this site is built; `autolaunch --help`, `autolaunch --info trainer` and
`autolaunch --info trainer.max_steps` say the same in a terminal. A key of another name is refused.

A *group* is a directory of YAML files, of which `group=option` chooses one; `group.key=value` then changes single keys.
Your own files stand beside them with `--config-dir`. The rules of overrides (lists, quotes, `+key=`, `~key`) are
[Hydra's](https://hydra.cc/docs/advanced/override_grammar/basic/).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "reference/keys.md", content="\n".join(_page())))
    return files


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    yield "## Tasks\n\nThe first word of the command line.\n"
    yield "| task | | writes |\n|---|---|---|"
    for name, text in TASKS.items():
        yield f"| `{name}` | {escaped(text)} | {escaped(TASK_PAGES[name].writes)} |"
    yield "\n## Keys in no group\n"
    schemas = {item.name: schemas_of(item.name) for item in dataclasses.fields(Job)}
    yield from _table("", Job, lambda name: name not in GROUPS and not schemas[name])
    for name, text in GROUPS.items():
        yield f"\n## {name}\n\n{escaped(text[:1].upper() + text[1:])}{'.' if text else ''}\n"
        yield from _options(name)
        yield from _keys_of(name)
    for name in schemas:
        if name not in GROUPS and schemas[name]:
            yield f"\n## {name}\n"
            yield from _keys_of(name)


def _options(group: str) -> Iterator[str]:
    yield "| option | |\n|---|---|"
    for option in options(group, [CONF]):
        yield f"| `{group}={option}` | {escaped(what_it_is(group, option, [CONF]))} |"
    yield ""


def _keys_of(group: str) -> Iterator[str]:
    if group in OF_CLASSES:
        yield "| key | in the file | meaning |\n|---|---|---|"
        for key, value, comment in keys_in_files(group, [CONF]):
            shown = "must be given" if value == "???" else f"`{value}`"
            yield f'| <span class="key">`{key}`</span> | {shown} | {escaped(comment)} |'
        yield ""
    schemas = schemas_of(group)
    for schema in schemas.values():
        if len(schemas) > 1:
            yield f"\n### {(schema.__doc__ or '').split(':')[0].split(' (')[0]}\n"
        yield f"{escaped(' '.join((schema.__doc__ or '').split()))}\n"
        yield from _table(group, schema, lambda name: True)


def _table(group: str, schema: type, chosen: Callable[[str], bool]) -> Iterator[str]:
    yield "| key | default | meaning | values |\n|---|---|---|---|"
    fields = keys_below(group, schema) if group else ((it.name, schema, it) for it in dataclasses.fields(schema))
    for key, parent, item in fields:
        if not chosen(item.name):
            continue
        hint = field_types(parent)[item.name]
        choices = item.metadata.get("choices")
        values = ", ".join(f"`{written(choice)}`" for choice in choices) if choices else escaped(type_text(hint))
        limits = limits_text(item.metadata)
        default = default_text(item)
        shown = f"`{default}`".replace("|", "\\|") if default and len(default) <= 60 else "see `--info`" * bool(default)
        values = f"{values}, {limits}" if limits else values
        yield f'| <span class="key">`{key}`</span> | {shown} | {escaped(help_of(item))} | {values} |'
    yield ""


def escaped(text: str) -> str:
    """A sentence of the help as Markdown in a table: code stays code, everything else is no markup."""
    parts = re.split(r"(`[^`]*`)", text)
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([*_\\\[\]])", r"\\\1", parts[number]).replace("<", "&lt;")
    return "".join(parts).replace("|", "\\|").replace("\n", " ")
