"""A plan's choice as one page that needs nothing else, and its pictures as files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from autolaunch.report.choice_pictures import memory_svg, pareto_svg, time_svg
from autolaunch.report.choice_words import (
    TimeUnit,
    command_of,
    decision_rows,
    difference,
    fits_within,
    is_number,
    mesh_name,
    mfu_convention,
    option_differences,
    option_words,
    pareto_front,
    plateau_words,
    ranked_rows,
    rejected_rows,
    searched,
    thinned,
)
from autolaunch.report.readable import readable_bytes

MOST_OF_FRONT = 12
MOST_RULES = 40

_CHOSEN = ' class="chosen"'

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 50rem; background: #fff; color: #222;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; margin: 0; }
dt { color: #555; }
dd { margin: 0; }
.note { color: #555; font-size: .9rem; }
.warning { border-left: .25rem solid #b35900; padding: .1rem 0 .1rem .75rem; margin: .5rem 0; }
pre { background: #f4f4f1; padding: .75rem 1rem; margin: 0; white-space: pre-wrap; font-size: .9rem;
  font-family: ui-monospace, "Cascadia Mono", Menlo, "DejaVu Sans Mono", monospace; }
.wide { overflow-x: auto; }
figure { margin: 2rem -1.25rem 0; }
figure svg { display: block; width: 100%; min-width: 24rem; max-width: 45rem; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #ddd; }
th { color: #555; font-weight: 400; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.options { min-width: 12rem; overflow-wrap: anywhere; }
tr.chosen td { font-weight: 600; background: #f4f4f1; }
.tight { color: #8a4b00; } .no { color: #b00020; } .yes { color: #1b6b3a; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  figure, tr, dl { break-inside: avoid; }
  h2 { break-after: avoid; }
  figure svg { min-width: 0; max-width: 13cm; }
  figure { margin: 1rem 0 0; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def write_choice(output_dir: str | os.PathLike[str], choice: Mapping[str, Any]) -> list[Path]:
    """Write a choice's pictures and its page into a directory and return their paths, the page last.

    `time.svg`, `memory.svg`, `pareto.svg` (those of which there is something to draw) and `plan.html`; each is written
    beside its place and renamed, and the same choice gives the same bytes.

    Args:
        choice: `planner.document`.
    """
    directory = Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    pictures = {"time.svg": time_svg(choice), "memory.svg": memory_svg(choice), "pareto.svg": pareto_svg(choice)}
    for name in (name for name, text in pictures.items() if not text):
        (directory / name).unlink(missing_ok=True)  # of another choice
    page = choice_page(choice, list(pictures.values()))
    return [_write(directory / name, text) for name, text in {**pictures, "plan.html": page}.items() if text]


def choice_page(choice: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The page: decision, reasons, pictures, alternatives, what was rejected, and the command.

    Args:
        choice: `planner.document`.
        pictures: SVG texts; empty ones are left out.
    """
    chosen = choice.get("chosen")
    model = str((choice.get("model") or {}).get("name") or "")
    title = f"Plan for {model}" if model else "Plan"
    ranking = "The choice and its alternatives" if chosen else "What comes closest"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>{_STYLE}</style></head>",
            "<body>",
            f"<h1>{_text(title if chosen else f'{title}: nothing fits')}</h1>",
            *(f'<p class="warning">{_text(warning)}</p>' for warning in choice.get("warnings") or ()),
            *_decision(choice),
            *_list("Why", (chosen or {}).get("reasons") or ()),
            *_command(choice),
            *(f'<figure class="wide">{picture.strip()}</figure>' for picture in pictures if picture),
            *_ranking(ranking, ranked_rows(choice), choice),
            *_front(choice),
            *_looked_at(choice),
            *_notes(choice),
            "</body></html>\n",
        ]
    )


def _decision(choice: Mapping[str, Any]) -> list[str]:
    rows = [f"<dt>{_text(label)}</dt><dd>{_text(text)}</dd>" for label, text in decision_rows(choice)]
    return ["<dl>", *rows, "</dl>"] if rows else []


def _list(title: str, sentences: Iterable[str]) -> list[str]:
    items = [f"<li>{_text(sentence)}</li>" for sentence in sentences]
    return [f"<h2>{title}</h2>", "<ul>", *items, "</ul>"] if items else []


def _command(choice: Mapping[str, Any]) -> list[str]:
    words = command_of(choice, "plan.yaml")
    if not words:
        return []
    settings = " ".join(command_of(choice)[1:])
    return [
        "<h2>Run it</h2>",
        f"<pre>{_text(' '.join(words))}</pre>",
        f'<p class="note">from the directory of this page; what was chosen is: <code>{_text(settings)}</code></p>',
    ]


def _ranking(title: str, rows: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> list[str]:
    """Ways to run it as a table; of all but the chosen one, the options that are other than there."""
    if len(rows) < 2 and choice.get("chosen"):
        return []
    chosen = choice.get("chosen") or {}
    unit = TimeUnit.of(chosen.get("seconds", rows[0].get("seconds")))
    lines = [
        f"<h2>{title}</h2>",
        '<div class="wide"><table>',
        f"<thead><tr><th>mesh</th><th>{'what differs' if chosen else 'options'}</th>"
        '<th class="number">time</th><th class="number">slower</th><th class="number">memory</th><th>fits</th></tr>',
        "</thead><tbody>",
    ]
    for row in rows:
        first = bool(chosen) and row.get("note") == "chosen"
        if first or not chosen:
            options = option_words(row["overrides"])
        else:
            options = option_differences(row["overrides"], chosen["overrides"])
        note = f'<span class="note">{_text(row["note"])}</span>' if row.get("note") else ""
        size: Any = row.get("memory_bytes")
        fits = fits_within(row, chosen.get("memory_limit_bytes"))
        lines.append(
            f"<tr{_CHOSEN if first else ''}>"
            f"<td>{_text(mesh_name(row['mesh']))}</td>"
            f'<td class="options">{"<br>".join(filter(None, (_text(", ".join(options)), note)))}</td>'
            f'<td class="number">{unit.write(row.get("seconds"))}</td>'
            f'<td class="number">{difference(row.get("slower_by")) if chosen and not first else ""}</td>'
            f'<td class="number">{readable_bytes(size) if is_number(size) else "?"}</td>'
            f'<td class="{fits if fits in ("yes", "tight", "no") else ""}">{_text(fits)}</td></tr>'
        )
    return [*lines, "</tbody></table></div>"]


def _front(choice: Mapping[str, Any]) -> list[str]:
    """The ways that nothing beats in both time and memory."""
    chosen = choice.get("chosen")
    if not chosen or not is_number(chosen.get("seconds")) or not chosen["seconds"]:
        return []
    rows = [
        {**point, "slower_by": point["seconds"] / chosen["seconds"] - 1}
        for point in thinned(pareto_front(choice), MOST_OF_FRONT)
    ]
    return _ranking("Ways that nothing beats in both time and memory", rows, choice)


def _looked_at(choice: Mapping[str, Any]) -> list[str]:
    counts = choice.get("counts")
    found = "; ".join(filter(None, (searched(counts), plateau_words(choice.get("plateau")))))
    rejected = rejected_rows(counts, MOST_RULES)
    lines = [f"<p>{_text(found[:1].upper() + found[1:])}.</p>"] if found else []
    if rejected:
        lines += [
            '<div class="wide"><table>',
            '<thead><tr><th class="number">rejected</th><th>because of</th></tr></thead><tbody>',
            *(f'<tr><td class="number">{number}</td><td>{_text(rule)}</td></tr>' for number, rule in rejected),
            "</tbody></table></div>",
        ]
    return ["<h2>What was looked at</h2>", *lines] if lines else []


def _notes(choice: Mapping[str, Any]) -> list[str]:
    notes = [
        "Times and memory are predictions; nothing of this was run.",
        mfu_convention(choice),
    ]
    return [f'<p class="note">{_text(note)}</p>' for note in notes if note]


def _text(text: Any) -> str:
    """As HTML, without signs that it forbids."""
    return escape("".join(sign if sign >= " " or sign in "\t\n" else "\N{REPLACEMENT CHARACTER}" for sign in str(text)))


def _write(path: Path, text: str) -> Path:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    return beside.replace(path)
