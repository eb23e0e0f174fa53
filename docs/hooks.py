"""MkDocs hooks that add the Markdown files outside of docs/ to the site and rewrite the links to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "src/mrconv/ops/README.md": "ops.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every page outside of docs/, and every file outside of docs/ that a page links to."""
    sources = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
    sources |= {name: ROOT / name for name in PAGES}
    for source, path in sources.items():
        text = path.read_text()
        for match in LINK.finditer(text):
            target = _target(source, match[2])
            if target and not target.startswith("docs/") and target not in PAGES:
                _add(files, File.generated(config, target, content=(ROOT / target).read_bytes()))
        if source in PAGES:
            _add(files, File.generated(config, PAGES[source], content=_relink(source, text)))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of the pages in docs/ that leave docs/."""
    source = page.file.src_uri  # type: ignore[attr-defined]
    return markdown if source in PAGES.values() else _relink(f"docs/{source}", markdown)


def _add(files: Files, file: File) -> None:
    if files.get_file_from_path(file.src_uri) is None:
        files.append(file)


def _target(source: str, link: str) -> str | None:
    """Return the link's target relative to the repository, None for an external link."""
    if "://" in link:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _relink(source: str, text: str) -> str:
    """Return the text with links that hold in the site instead of in the repository."""
    here = posixpath.dirname(_place(source))

    def replace(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        return match[1] + posixpath.relpath(_place(target), here or ".") + match[3]

    return LINK.sub(replace, text)


def _place(name: str) -> str:
    """Return where a file of the repository stands in the site."""
    return PAGES.get(name) or name.removeprefix("docs/")
