"""A plan's choice as one page that needs nothing else, and its pictures as files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autolaunch.job import write_beside
from autolaunch.report.choice_pictures import memory_svg, time_svg
from autolaunch.report.choice_words import (
    WayWords,
    command_of,
    decision_rows,
    looked_at,
    mfu_convention,
    pareto_front,
    ranked_rows,
    rejected_rows,
    thinned,
)
from autolaunch.report.pareto_picture import pareto_svg
from autolaunch.report.svg import escaped

MOST_OF_FRONT = 12
MOST_RULES = 40

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
td.options { min-width: 14rem; overflow-wrap: anywhere; }
tr.chosen td { font-weight: 600; background: #f4f4f1; }
.tight { color: #8a4b00; } .over, .no { color: #b00020; } .yes { color: #1b6b3a; }
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

    `time.svg`, `memory.svg`, `pareto.svg` (those of which there is something to draw) and `plan.html`; the same choice
    gives the same bytes.

    Args:
        choice: `planner.document`.
    """
    directory = Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    pictures = {"time.svg": time_svg(choice), "memory.svg": memory_svg(choice), "pareto.svg": pareto_svg(choice)}
    files = {**pictures, "plan.html": choice_page(choice, list(pictures.values()))}
    for name, text in files.items():
        if text:
            write_beside(directory / name, text)
        else:
            (directory / name).unlink(missing_ok=True)  # of another choice
    return [directory / name for name, text in files.items() if text]


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
            f"<title>{escaped(title)}</title>",
            f"<style>{_STYLE}</style></head>",
            "<body>",
            f"<h1>{escaped(title if chosen else f'{title}: nothing fits')}</h1>",
            *(f'<p class="warning">{escaped(warning)}</p>' for warning in choice.get("warnings") or ()),
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
    rows = [f"<dt>{escaped(label)}</dt><dd>{escaped(text)}</dd>" for label, text in decision_rows(choice)]
    return ["<dl>", *rows, "</dl>"] if rows else []


def _list(title: str, sentences: Iterable[str]) -> list[str]:
    items = [f"<li>{escaped(sentence)}</li>" for sentence in sentences]
    return [f"<h2>{title}</h2>", "<ul>", *items, "</ul>"] if items else []


def _command(choice: Mapping[str, Any]) -> list[str]:
    words = command_of(choice, "plan.yaml")
    if not words:
        return []
    settings = " ".join(command_of(choice)[1:])
    return [
        "<h2>Run it</h2>",
        f"<pre>{escaped(' '.join(words))}</pre>",
        f'<p class="note">from the directory of this page; what was chosen is: <code>{escaped(settings)}</code></p>',
    ]


def _ranking(title: str, rows: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> list[str]:
    """Ways to run it as a table; of all but the chosen one, the options that are other than there."""
    chosen = bool(choice.get("chosen"))
    if len(rows) < 2 and chosen:
        return []
    lines = [
        f"<h2>{title}</h2>",
        '<div class="wide"><table>',
        f"<thead><tr><th>mesh</th><th>{'what differs' if chosen else 'options'}</th>"
        '<th class="number">time</th><th class="number">vs chosen</th><th class="number">memory</th><th>fits</th></tr>',
        "</thead><tbody>",
    ]
    for way in WayWords.of(rows, choice):
        note = f'<span class="note">{escaped(way.note)}</span>' if way.note else ""
        options = "<br>".join(filter(None, (escaped(", ".join(way.options)), note)))
        lines.append(
            ('<tr class="chosen">' if way.chosen else "<tr>") + f"<td>{escaped(way.mesh)}</td>"
            f'<td class="options">{options}</td>'
            f'<td class="number">{way.time}</td>'
            f'<td class="number">{way.slower}</td>'
            f'<td class="number">{way.memory}</td>'
            f'<td class="{escaped(way.fits)}">{escaped(way.fits)}</td></tr>'
        )
    return [*lines, "</tbody></table></div>"]


def _front(choice: Mapping[str, Any]) -> list[str]:
    """The ways that nothing beats in both time and memory."""
    if not choice.get("chosen"):
        return []
    rows = thinned(pareto_front(choice), MOST_OF_FRONT)
    return _ranking("Ways that nothing beats in both time and memory", rows, choice)


def _looked_at(choice: Mapping[str, Any]) -> list[str]:
    sentence, rejected = looked_at(choice), rejected_rows(choice.get("counts"), MOST_RULES)
    lines = [f"<p>{escaped(sentence[:1].upper() + sentence[1:])}.</p>"] if sentence else []
    if rejected:
        lines += [
            '<div class="wide"><table>',
            '<thead><tr><th class="number">not considered</th><th>because of</th></tr></thead><tbody>',
            *(f'<tr><td class="number">{number}</td><td>{escaped(rule)}</td></tr>' for number, rule in rejected),
            "</tbody></table></div>",
        ]
    return ["<h2>What was looked at</h2>", *lines] if lines else []


def _notes(choice: Mapping[str, Any]) -> list[str]:
    notes = [
        "Times and memory are predictions; nothing of this was run.",
        mfu_convention(choice),
    ]
    return [f'<p class="note">{escaped(note)}</p>' for note in notes if note]
