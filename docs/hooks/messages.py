"""The page of every message about a config: what each `ConfigError` of the source says, as far as it is fixed."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_PARTS = ("where", "problem", "allowed", "write")
_OPEN = "…"

_INTRODUCTION = f"""# Every message

What autolaunch says when something is wrong with what was typed: exit code 2, nothing was started, or, where only the
model or the first batch can show it, every rank says the same before the first step. A message is the place, what is
wrong, what is allowed, and the line to write:

```text
data.batch_size=16: 16 sequences cannot be shared evenly by 3 data parallel ranks
  allowed: multiples of 3
  write:   data.batch_size=15 or data.batch_size=18
```

This list is made from the source when the site is built; `{_OPEN}` is what the run at hand puts there. Search the site
for words of the message you have. What happens later, in a run: [When things go wrong](../when_things_go_wrong.md).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "reference/messages.md", content="\n".join(_page())))
    return files


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    sections: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for message in _messages():
        key = re.match(r"(?:config\[')?(?:--)?([a-z][a-z_]*)(?=[.=\[' ]|$)", message[0])
        sections[key[1] if key else ""].add(message)
    small = [name for name, messages in sections.items() if len(messages) < 3]
    for name in small:
        sections[""] |= sections.pop(name) if name else set()
    for name in sorted(sections, key=lambda name: (not name, name)):
        yield f"\n## {name or 'Others'}\n"
        for where, problem, allowed, write in sorted(sections[name]):
            yield f"- {_code(where)}: {_text(problem)}"
            if allowed:
                yield f"    - allowed: {_text(allowed)}"
            if write.strip(_OPEN):
                yield f"    - write: {_code(write)}"


def _messages() -> Iterator[tuple[str, ...]]:
    """(where, problem, allowed, write) of every error, with `_OPEN` for what is not fixed."""
    for root in ("launcher", "strategies"):
        for file in sorted((ROOT / root).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            constants = {
                target.id: node.value.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                for target in node.targets
                if isinstance(target, ast.Name) and isinstance(node.value.value, str)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError":
                    given = dict(zip(_PARTS, node.args, strict=False))
                    given |= {item.arg: item.value for item in node.keywords if item.arg in _PARTS}
                    message = tuple(_fixed(given.get(part), constants) for part in _PARTS)
                    if re.search(r"[a-z]{3}", message[1]):
                        yield message


def _fixed(node: ast.expr | None, constants: dict[str, str]) -> str:
    """What of an expression stands in the source."""
    match node:
        case None:
            return ""
        case ast.Constant(value=value):
            return str(value)
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.JoinedStr(values=values):
            text = "".join(_fixed(value, constants) for value in values)
        case ast.FormattedValue(value=ast.Name() as value):
            text = _fixed(value, constants)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            text = _fixed(left, constants) + _fixed(right, constants)
        case _:
            text = _OPEN
    return re.sub(f"{_OPEN}+", _OPEN, text)


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`" if "`" not in text else f"`` {' '.join(text.split())} ``"


def _text(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([*_\\\[\]#])", r"\\\1", parts[number]).replace("<", "&lt;")
    return "".join(parts)
