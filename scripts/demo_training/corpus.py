"""The training text as token streams: what `prepare` makes of the sources, and what `train` reads.

Kept out for measuring: every `HELD_OUT_EVERY`-th chapter, manual section and dictionary entry. The chat stream is
drawn from the same split, so a held-out conversation asks about words and quotes passages never trained on (small
talk and arithmetic apart, of which there is too little to split).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from demo_training.conversations import ChatSource, ConversationWriter, capital_sentence
from demo_training.debian import fetch_package, package_version
from demo_training.documents import Document, WordEntry
from demo_training.manuals import MANUALS, read_manual
from demo_training.novels import read_novels
from demo_training.small_talk import CAPITALS
from demo_training.vocabulary import render_chat, render_document, save_tokenizer, train_tokenizer
from demo_training.words import read_words

HELD_OUT_EVERY = 25
STREAMS = ("novels", "manuals", "chat", "repetition")
T = TypeVar("T")


@dataclass(frozen=True)
class SourceRecord:
    """What one source gave: `characters` of text after cleaning."""

    name: str
    license: str
    package: str
    version: str
    characters: int


@dataclass(frozen=True)
class Corpus:
    """Token streams by name (`STREAMS`), uint16, 1-D; documents and conversations follow one another."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]


def prepare_corpus(work: Path, max_length: int, conversations: int, seed: int) -> None:
    """Fetch the sources, train the tokenizer and write `corpus.npz`, `sources.json` and `tokenizer/` into `work`."""
    cache = work / "sources"
    novels = read_novels(fetch_package("r-cran-janeaustenr", cache))
    manuals = [(manual, read_manual(manual, fetch_package(manual.package, cache))) for manual in MANUALS]
    entries = read_words(fetch_package("wordnet-base", cache))
    records = [
        _record("Jane Austen's six novels", "public domain", "r-cran-janeaustenr", cache, _text_size(novels)),
        *(_record(m.source, m.license, m.package, cache, _text_size(documents)) for m, documents in manuals),
        _record("WordNet 3.0", "WordNet-3.0", "wordnet-base", cache, sum(len(e.meaning + e.example) for e in entries)),
    ]

    sections = [section for _, documents in manuals for section in documents]
    train_source = _chat_source(_kept(novels), _kept(sections), _kept(entries))
    held_source = _chat_source(_held_out(novels), _held_out(sections), _held_out(entries))
    texts = {
        "train_novels": [_document_text(chapter) for chapter in train_source.novels],
        "train_manuals": [*map(_document_text, train_source.manuals), *_fact_texts(seed)],
        "train_chat": _chat_texts(train_source, conversations, seed),
        "train_repetition": _repetition_texts(train_source, conversations // 2, seed),
        "held_novels": [_document_text(chapter) for chapter in held_source.novels],
        "held_manuals": [_document_text(section) for section in held_source.manuals],
        "held_chat": _chat_texts(held_source, max(conversations // 50, 50), seed + 1),
        "held_repetition": _repetition_texts(held_source, max(conversations // 50, 50), seed + 1),
    }
    # As many conversations as make about as much text as the novels, so that neither rules the vocabulary.
    tokenizer = train_tokenizer(
        [*texts["train_novels"], *texts["train_manuals"], *texts["train_chat"][: min(conversations, 10_000)]]
    )
    save_tokenizer(tokenizer, work / "tokenizer", max_length)
    np.savez_compressed(work / "corpus.npz", **{name: _encode(tokenizer, part) for name, part in texts.items()})
    (work / "sources.json").write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")


def load_corpus(work: Path) -> Corpus:
    """Read what `prepare_corpus` wrote.

    Raises:
        FileNotFoundError: `work` has no prepared corpus.
    """
    path = work / "corpus.npz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run the step `prepare` with the same --work first.")
    with np.load(path) as arrays:
        return Corpus(
            train={name: arrays[f"train_{name}"] for name in STREAMS},
            held_out={name: arrays[f"held_{name}"] for name in STREAMS},
        )


def load_sources(work: Path) -> list[SourceRecord]:
    """Read the list of sources that `prepare_corpus` wrote."""
    return [SourceRecord(**record) for record in json.loads((work / "sources.json").read_text())]


def _record(name: str, license: str, package: str, cache: Path, characters: int) -> SourceRecord:
    return SourceRecord(name, license, package, package_version(package, cache), characters)


def _text_size(documents: Iterable[Document]) -> int:
    return sum(len(paragraph) for document in documents for paragraph in document.paragraphs)


def _kept(items: Sequence[T]) -> list[T]:
    return [item for index, item in enumerate(items) if index % HELD_OUT_EVERY]


def _held_out(items: Sequence[T]) -> list[T]:
    return list(items[::HELD_OUT_EVERY])


def _chat_source(novels: list[Document], manuals: list[Document], entries: list[WordEntry]) -> ChatSource:
    text = " ".join(paragraph for document in (*novels, *manuals) for paragraph in document.paragraphs)
    return ChatSource(novels, manuals, entries, frozenset(re.findall(r"[a-z]{3,}", text)))


def _document_text(document: Document) -> str:
    return render_document("\n\n".join(document.paragraphs))


def _fact_texts(seed: int) -> list[str]:
    generator = random.Random(seed)
    countries = sorted(CAPITALS)
    return [
        render_document(" ".join(capital_sentence(name) for name in generator.sample(countries, len(countries))))
        for _ in range(20)
    ]


def _chat_texts(source: ChatSource, count: int, seed: int) -> list[str]:
    writer = ConversationWriter(source, seed)
    return [render_chat(writer.conversation()) for _ in range(count)]


def _repetition_texts(source: ChatSource, count: int, seed: int) -> list[str]:
    writer = ConversationWriter(source, seed)
    return [render_chat(writer.repetition()) for _ in range(count)]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])
