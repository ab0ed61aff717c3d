"""Hooks of the documentation site (mkdocs.yml), which turn links out of docs/ into links to pages.

In a checkout, docs/ links to sources by relative paths. The repository has no known public address,
so the site includes the targets of these links: a page that shows the source file or lists the
folder, a copy of the picture, and CHANGELOG.md and CONTRIBUTING.md as pages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
TARGET = re.compile(r'(\]\(|<img src=")((?!https?:|#|mailto:)[^)#"\s]+)')
LANGUAGES = {".h": "cpp", ".cu": "cpp", ".cpp": "cpp", ".py": "python", ".json": "json"}


def _origin(page: str) -> Path:
    """Returns the repository file from which a page of the site is made."""
    return ROOT / page if page in PAGES else DOCS / page


def _page_of(path: Path) -> str | None:
    """Returns the page or picture of the site, relative to its root, for a repository file."""
    if path.is_relative_to(DOCS):
        return None  # mkdocs finds it
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES or path.suffix == ".png":
        return name
    return f"source/{name}.md"


def _source_page(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        listed = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if p.name[0] not in "._")
        return "\n".join([f"# {name}/", "", "```text", *listed, "```", ""])
    language = LANGUAGES.get(path.suffix, "text")
    return f'# {name}\n\n````{language} linenums="1"\n{path.read_text()}\n````\n'


def _targets(text: str, origin: Path) -> set[Path]:
    """Returns the files of the repository outside of docs/ that a page links to."""
    found = {Path(os.path.normpath(origin.parent / m[2])) for m in TARGET.finditer(text)}
    return {path for path in found if _page_of(path) and path.exists()}


def on_files(files: Files, config: Any) -> Files:
    """Adds the link targets of the pages, and the pages that are outside of docs/."""
    for name in PAGES:
        if (ROOT / name).exists():
            files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    targets: set[Path] = set()
    for file in files.documentation_pages():
        targets |= _targets(file.content_string, _origin(file.src_uri))
    for path in sorted(targets):
        page = _page_of(path)
        if page is None or page in PAGES:
            continue
        content = path.read_bytes() if path.suffix == ".png" else _source_page(path)
        added = File.generated(config, page, content=content)
        added.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page to the pages that `on_files` has added."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    origin = _origin(page.file.src_uri)
    here = os.path.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(origin.parent / match[2]))
        if not path.exists():
            return match[0]  # mkdocs reports that it is missing
        name = _page_of(path) or path.relative_to(DOCS).as_posix()
        return match[1] + os.path.relpath(name, here or ".")

    return TARGET.sub(lead, markdown)
