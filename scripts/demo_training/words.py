"""Short definitions out of WordNet 3.0 (its own permissive license), Debian package wordnet-base.

File format: wndb(5WN), `lexicographer file`, words and gloss of each synset. Only everyday categories are read, and
entries that touch violence, sex, bodies, beliefs or origins are left out, so that a demo does not embarrass anyone.
"""

from __future__ import annotations

import re
from pathlib import Path

from demo_training.documents import WordEntry

FOLDER = "usr/share/wordnet"
# Lexicographer files of lexnames(5WN). People, groups, bodies, possessions and states are not among them.
CATEGORIES = {
    "noun": {
        "04": "act",
        "05": "animal",
        "06": "artifact",
        "07": "attribute",
        "09": "cognition",
        "10": "communication",
        "11": "event",
        "12": "feeling",
        "13": "food",
        "15": "location",
        "17": "object",
        "19": "phenomenon",
        "20": "plant",
        "23": "quantity",
        "25": "shape",
        "27": "substance",
        "28": "time",
    },
    "verb": {
        "30": "change",
        "31": "cognition",
        "32": "communication",
        "36": "creation",
        "37": "emotion",
        "38": "motion",
        "39": "perception",
    },
    "adj": {"00": "description"},
}
_UNWANTED = re.compile(
    r"sex|genit|penis|vagin|breast|erotic|porn|obscen|vulgar|slur|offensive|disparag|derogat|contempt|profan|"
    r"prostitut|\brap(e|ed|es|ing)\b|murder|kill|suicid|death|dead\b|\bdie[sd]?\b|corpse|tortur|execut|hang(ing|ed)|"
    r"weapon|\bgun|bomb|\bwar\b|warfare|nazi|terror|drug|narcotic|cocaine|heroin|cannabis|opium|addict|drunk|alcohol|"
    r"homosexual|lesbian|\bgay\b|negro|\bblacks?\b|\bjew|muslim|islam|christ|hindu|\brac(e|es|ial|ist)\b|ethnic|"
    r"slave|excre|urin|feces|faec|defecat|fart|vomit|semen|menstru|abort|castrat|incest|naked|nud(e|ity)|"
    r"disease|cancer|venereal|tumor|pathol|idiot|moron|imbecil|retard|stupid|whore|bitch|bastard|damn|devil|hell\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[a-z]{3,14}")
_MARKER = re.compile(r"\((?:a|p|ip)\)$")


def read_words(package: Path) -> list[WordEntry]:
    """Return the first meaning of each plain lower-case word, sorted by word and part of speech."""
    entries: list[WordEntry] = []
    for kind, categories in CATEGORIES.items():
        first = _first_senses(package / FOLDER / f"index.{kind}")
        for line in (package / FOLDER / f"data.{kind}").read_text(encoding="latin-1").splitlines():
            if not line.startswith("  "):  # the license's lines are indented
                entries += _entries(line, kind, categories, first)
    return sorted(set(entries), key=lambda entry: (entry.word, entry.kind))


def _first_senses(index: Path) -> dict[str, str]:
    senses = {}
    for line in index.read_text(encoding="latin-1").splitlines():
        if not line.startswith("  "):
            fields = line.split()
            senses[fields[0]] = fields[-int(fields[2])]
    return senses


def _entries(line: str, kind: str, categories: dict[str, str], first: dict[str, str]) -> list[WordEntry]:
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    if fields[1] not in categories or _UNWANTED.search(head) or _UNWANTED.search(gloss):
        return []
    meaning, examples = _split_gloss(gloss)
    if not 12 <= len(meaning) <= 160:
        return []
    count = int(fields[3], 16)
    words = [_MARKER.sub("", word) for word in fields[4 : 4 + 2 * count : 2]]
    return [
        WordEntry(word, kind, categories[fields[1]], meaning, _example_with(word, examples))
        for word in words
        if _WORD.fullmatch(word) and first.get(word) == fields[0]
    ]


def _split_gloss(gloss: str) -> tuple[str, list[str]]:
    examples = re.findall(r'"([^"]+)"', gloss)
    plain = re.sub(r'"[^"]*"', "", gloss)
    plain = re.sub(r"\([^)]*\)", "", plain)
    clauses = [" ".join(clause.split()) for clause in plain.split(";")]
    meaning = next((clause for clause in clauses if clause), "")
    return meaning.replace(" ,", ",").strip(" ,:-`'"), examples


def _example_with(word: str, examples: list[str]) -> str:
    for example in examples:
        text = " ".join(example.split())
        if re.search(rf"\b{word}\b", text) and 4 <= text.count(" ") + 1 <= 25:
            sentence = text[0].upper() + text[1:]
            return sentence if sentence[-1] in ".!?" else sentence + "."
    return ""
