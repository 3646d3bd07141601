"""Jane Austen's six novels (public domain) out of the Debian package r-cran-janeaustenr.

The package holds each novel as an R character vector of lines in R's lazy-load database: blocks of a big-endian
length and a zlib stream, each one object in R's XDR serialization ("R Internals", section "Serialization Formats").
Only what these six vectors use is read here.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from demo_training.documents import Document

DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_STRING_VECTOR, _STRING = 16, 9
_CHAPTER = re.compile(r"^(chapter|volume)\s+[ivxl\d]+\.?$", re.IGNORECASE)


def read_novels(package: Path) -> list[Document]:
    """Return one document per chapter, in the order of the books; the heading is the book's title."""
    return [chapter for lines in _lazy_load_vectors(package / DATABASE) for chapter in _chapters(lines)]


def _lazy_load_vectors(database: Path) -> Iterator[list[str]]:
    data = database.read_bytes()
    while data:
        stream = zlib.decompressobj()
        serialized = stream.decompress(data[4:])
        data = stream.unused_data
        yield _string_vector(serialized, database)


def _string_vector(data: bytes, origin: Path) -> list[str]:
    version = struct.unpack_from(">i", data, 2)[0]
    position = 14
    if version == 3:  # names its native encoding
        position += 4 + struct.unpack_from(">i", data, position)[0]
    flags, count = struct.unpack_from(">ii", data, position)
    if data[:2] != b"X\n" or flags & 0xFF != _STRING_VECTOR:
        raise ValueError(f"{origin} holds something else than XDR-serialized character vectors.")
    position += 8
    lines = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", data, position)
        if flags & 0xFF != _STRING:
            raise ValueError(f"{origin}: item {len(lines)} of a character vector is no string.")
        position += 8
        lines.append(data[position : position + max(length, 0)].decode("utf-8"))
        position += max(length, 0)
    return lines


def _chapters(lines: list[str]) -> Iterator[Document]:
    title = lines[0].strip().title().replace(" And ", " and ")
    paragraphs: list[str] = []
    for block in "\n".join(lines[1:]).split("\n\n"):
        text = " ".join(block.split()).replace("_", "").replace("--", " - ")
        if _CHAPTER.match(text):
            if paragraphs:
                yield Document(title, title, tuple(paragraphs))
            paragraphs = []
        elif len(text) > 1 and not text.isupper() and not text.lower().startswith(("by jane", "(1", "the end")):
            paragraphs.append(text)
    if paragraphs:
        yield Document(title, title, tuple(paragraphs))
