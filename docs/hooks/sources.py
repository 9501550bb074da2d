"""Pages that stand elsewhere in the repository (README, examples, ...), and links to them from any page.

Every file keeps links that are right where it stands; here they are turned into those of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FILES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "about/contributing.md",
    "CHANGELOG.md": "about/changelog.md",
    "LICENSE": "about/license.md",
}
"""Path in the repository -> page of the site. Of examples/, each file or directory is a page (`_examples`)."""

_HOMES = {page: path for path, page in FILES.items()}
_SOURCES = (".py", ".yaml")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in FILES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if not path.endswith(".md"):
            text = f"# {path.capitalize()}\n\n```text\n{text}\n```\n"
        files.append(File.generated(config, page, content=text))
    for page, text in _examples().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    home = _HOMES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(match: re.Match[str]) -> str:
        target, _, heading = match[1].partition("#")
        if not target or "://" in target:
            return match[0]
        found = _page_of(posixpath.normpath(posixpath.join(posixpath.dirname(home), target)))
        if files.get_file_from_path(found) is None:
            return match[0]  # mkdocs says what is wrong with it
        link = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
        return f"]({link}{'#' + heading if heading else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", rewritten, markdown)


def _page_of(path: str) -> str:
    """The page of the site that a file or directory of the repository is."""
    if path in FILES:
        return FILES[path]
    if path.startswith("examples/"):
        parts = path.split("/")
        return f"{'/'.join(parts[:2])}.md"
    return path.removeprefix("docs/")


def _examples() -> dict[str, str]:
    """Page -> its text: the source of an example, or all sources of a directory."""
    pages = {}
    for entry in sorted((ROOT / "examples").iterdir()):
        sources = sorted(file for file in [entry, *entry.rglob("*")] if file.suffix in _SOURCES and file.is_file())
        text = [f"# examples/{entry.name}\n"]
        for file in sources:
            language = "python" if file.suffix == ".py" else "yaml"
            if file != entry:
                text.append(f"## {file.relative_to(entry).as_posix()}\n")
            text.append(f"```{language}\n{file.read_text(encoding='utf-8').rstrip()}\n```\n")
        if sources:
            pages[f"examples/{entry.name}.md"] = "\n".join(text)
    return pages
