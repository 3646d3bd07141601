"""Prose of programs' manuals without their code, out of Debian's documentation packages (see `MANUALS`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from demo_training.documents import Document


@dataclass(frozen=True)
class Manual:
    """Where a Debian package has a manual; `main_part` is the attribute or tag that begins a page's text."""

    source: str
    license: str
    package: str
    folder: str
    pages: tuple[str, ...]
    main_part: str | tuple[str, str]


MANUALS = (
    Manual(
        source="The Rust book, the Rustonomicon and the edition guide",
        license="MIT or Apache-2.0",
        package="rust-doc",
        folder="usr/share/doc/rust-doc/html",
        pages=("book/ch*.html", "book/appendix-0*.html", "nomicon/*.html", "edition-guide/**/*.html"),
        main_part="main",
    ),
    Manual(
        source="The Python tutorial, HOWTOs, FAQ and What's New",
        license="PSF-2.0",
        package="python3.11-doc",
        folder="usr/share/doc/python3.11/html",
        pages=("tutorial/*.html", "howto/*.html", "faq/*.html", "whatsnew/*.html"),
        main_part=("role", "main"),
    ),
    Manual(
        source="The SQLite documentation",
        license="public domain",
        package="sqlite3-doc",
        folder="usr/share/doc/sqlite3",
        pages=("*.html",),
        main_part="body",
    ),
    Manual(
        source="The Apache HTTP Server documentation",
        license="Apache-2.0",
        package="apache2-doc",
        folder="usr/share/doc/apache2-doc/manual/en",
        pages=("*.html", "*/*.html"),
        main_part=("id", "page-content"),
    ),
)

_HEADINGS = frozenset({"h1", "h2", "h3", "h4"})
_BLOCKS = frozenset({"p", "li", "dt", "dd", "blockquote", "td", "th"})
_SKIPPED = frozenset({"pre", "nav", "script", "style", "table", "sup"})
_LETTERS = re.compile(r"[a-zA-Z ,.;:'’-]")


def read_manual(manual: Manual, package: Path) -> list[Document]:
    """Return one document per heading, in the order of the files' names; a paragraph seen before is left out.

    Raises:
        ValueError: the unpacked `package` has no such page.
    """
    folder = package / manual.folder
    pages = [page for pattern in manual.pages for page in sorted(folder.glob(pattern)) if page.name != "print.html"]
    if not pages:
        raise ValueError(f"{folder} has no page that matches {manual.pages}.")
    seen: set[str] = set()
    documents = []
    for page in pages:
        reader = _ProseReader(manual.main_part)
        reader.feed(page.read_text(encoding="utf-8", errors="replace"))
        reader.close()
        for heading, paragraphs in reader.sections:
            fresh = tuple(text for text in dict.fromkeys(paragraphs) if text not in seen)
            seen.update(fresh)
            if fresh:
                documents.append(Document(manual.source, heading, fresh))
    return documents


class _ProseReader(HTMLParser):
    """Collects (heading, paragraphs) from the main part of a page; what looks like code is left out."""

    def __init__(self, main_part: str | tuple[str, str]) -> None:
        super().__init__(convert_charrefs=True)
        self._main_part = main_part
        self.sections: list[tuple[str, list[str]]] = []
        self._in_main = False
        self._skip_depth = 0
        self._collected: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_main = self._in_main or tag == self._main_part or self._main_part in attrs
        if tag in _SKIPPED:
            self._flush(None)
            self._skip_depth += 1
        elif tag in _BLOCKS | _HEADINGS:
            self._flush(None)

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIPPED:
            self._skip_depth = max(0, self._skip_depth - 1)
        elif tag in _HEADINGS:
            self._flush("heading")
        elif tag in _BLOCKS:
            self._flush("paragraph")
        elif tag == self._main_part:
            self._flush(None)
            self._in_main = False

    def handle_data(self, data: str) -> None:
        if self._in_main and not self._skip_depth:
            self._collected.append(data)

    def _flush(self, kind: str | None) -> None:
        text = " ".join("".join(self._collected).replace("¶", "").split())
        self._collected.clear()
        if kind == "heading" and text:
            self.sections.append((re.sub(r"^[\d.]+\s*", "", text), []))
        elif kind == "paragraph" and self.sections and _is_prose(text):
            self.sections[-1][1].append(text)


def _is_prose(text: str) -> bool:
    long_enough = len(text) >= 60 and text.count(" ") >= 8
    return long_enough and text[-1] in '.!?:)”"' and len(_LETTERS.findall(text)) >= 0.93 * len(text)
