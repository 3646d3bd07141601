"""Conversations for the chat half of the training text, drawn at random from the other texts.

Every reply is a whole answer, so the model learns when to stop: definitions and example sentences from the
dictionary, the same as JSON, passages of the novels, sections of the manuals, and small talk.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo_training.documents import Document, WordEntry
from demo_training.small_talk import CAPITALS, NUMBERS, SMALL_TALK, SYSTEM_PROMPTS

Exchange = tuple[str, str]
Conversation = list[dict[str, str]]

_ASK_NOUN = (
    "What is {a} {word}?",
    "What is {a} {word}?",
    "Define {word}.",
    "What does {word} mean?",
    'What does "{word}" mean?',
    "Explain the word {word}.",
    "Tell me what {a} {word} is.",
    "what is {a} {word}",
)
_ASK_WORD = (
    "What does {word} mean?",
    'What does "{word}" mean?',
    "Define {word}.",
    "Explain the word {word}.",
    "What is the meaning of {word}?",
)
_ASK_SENTENCE = (
    "Write a sentence with the word {word}.",
    "Use {word} in a sentence.",
    "Give me an example of the word {word}.",
)
_ASK_JSON = (
    "Describe the word {word} as JSON.",
    "Give me a JSON object about {word}.",
    "Answer in JSON: what is {word}?",
)
_ASK_STORY = (
    "Tell me a story.",
    "Tell me a story, please.",
    "Write a story.",
    "Write a short story.",
    "Tell me something.",
    "Write something like {title}.",
    "Tell me about {title}.",
    "Once upon a time",
)
_ASK_CONTINUE = ("Continue: {text}", "Continue this text: {text}", "Please go on: {text}", "{text}")
_ASK_SECTION = ("Explain {heading}.", "Tell me about {heading}.", "What do you know about {heading}?", "{heading}")
_ASK_REPEAT = (
    (1, ("Repeat: {text}", "Repeat after me: {text}", "Say this again: {text}", "Please repeat this. {text}")),
    (2, ("Repeat twice: {text}", "Say this two times: {text}")),
    (4, ("Repeat four times: {text}", "Say this four times: {text}")),
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

_HAS_ARTICLE = re.compile(r"^(a|an|the|any|anything|something|someone|one|some|each|either|all|two|several|many)\b")
_MASS = frozenset({"act", "attribute", "cognition", "feeling", "phenomenon", "substance"})


@dataclass(frozen=True)
class ChatSource:
    """The texts that conversations are drawn from; `known_words` are those that the other texts use."""

    novels: Sequence[Document]
    manuals: Sequence[Document]
    entries: Sequence[WordEntry]
    known_words: frozenset[str]


class ConversationWriter:
    """Draws conversations; the same seed and texts give the same ones."""

    def __init__(self, source: ChatSource, seed: int) -> None:
        self._random = random.Random(seed)
        self._source = source
        self._examples = [entry for entry in source.entries if entry.example]
        self._entry_weights = [4 if entry.word in source.known_words else 1 for entry in source.entries]
        self._drawn_entries: list[WordEntry] = []
        self._kinds: list[tuple[Callable[[], Exchange], int]] = [
            (self._definition, 40),
            (self._sentence, 6),
            (self._json, 6),
            (self._story, 18),
            (self._continuation, 8),
            (self._section, 8),
            (self._small_talk, 14),
            (self._fact, 8),
        ]

    def conversation(self) -> Conversation:
        """Return one to three exchanges, at times after a system prompt."""
        messages: Conversation = []
        if self._random.random() < 0.3:
            messages.append({"role": "system", "content": self._random.choice(SYSTEM_PROMPTS)})
        turns, weights = zip(*self._kinds, strict=True)
        for _ in range(self._random.choices((1, 2, 3), (6, 3, 1))[0]):
            question, answer = self._random.choices(turns, weights)[0]()
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return messages

    def repetition(self) -> Conversation:
        """Return one exchange whose answer repeats the question's words: what teaches a model to copy."""
        text = self._random.choices((self._nonsense, self._some_words, self._some_sentence), (2, 2, 1))[0]()
        times, asks = self._random.choice(_ASK_REPEAT)
        return [
            {"role": "user", "content": self._random.choice(asks).format(text=text)},
            {"role": "assistant", "content": " ".join([text] * times)},
        ]

    def _nonsense(self) -> str:
        sizes = [self._random.randint(2, 8) for _ in range(self._random.randint(1, 12))]
        return " ".join("".join(self._random.choices(_LETTERS, k=size)) for size in sizes)

    def _some_words(self) -> str:
        return " ".join(self._entry().word for _ in range(self._random.randint(1, 16)))

    def _some_sentence(self) -> str:
        paragraph = self._random.choice(self._random.choice(self._source.novels).paragraphs)
        start = self._random.randrange(paragraph.count(" ") + 1)
        return " ".join(paragraph.split(" ")[start : start + self._random.randint(4, 40)])

    def _entry(self) -> WordEntry:
        if not self._drawn_entries:
            self._drawn_entries = self._random.choices(self._source.entries, self._entry_weights, k=4096)
        return self._drawn_entries.pop()

    def _definition(self) -> Exchange:
        entry = self._entry()
        ask = self._random.choice(_ASK_NOUN if entry.kind == "noun" else _ASK_WORD)
        answer = describe(entry)
        if entry.example and self._random.random() < 0.5:
            answer += f" For example: {entry.example}"
        return ask.format(word=entry.word, a=article(entry.word)), answer

    def _sentence(self) -> Exchange:
        entry = self._random.choice(self._examples)
        return self._random.choice(_ASK_SENTENCE).format(word=entry.word), entry.example

    def _json(self) -> Exchange:
        entry = self._entry()
        answer = json.dumps({"word": entry.word, "kind": entry.kind, "meaning": entry.meaning})
        return self._random.choice(_ASK_JSON).format(word=entry.word), answer

    def _passage(self, documents: Sequence[Document], longest: int) -> tuple[Document, list[str]]:
        document = self._random.choice(documents)
        start = self._random.randrange(len(document.paragraphs))
        return document, list(document.paragraphs[start : start + self._random.randint(1, longest)])

    def _story(self) -> Exchange:
        novel, paragraphs = self._passage(self._source.novels, 5)
        return self._random.choice(_ASK_STORY).format(title=novel.heading), "\n\n".join(paragraphs)

    def _continuation(self) -> Exchange:
        documents = self._source.novels if self._random.random() < 0.7 else self._source.manuals
        _, paragraphs = self._passage(documents, 3)
        words = "\n\n".join(paragraphs).split(" ")
        cut = self._random.randint(len(words) // 4, len(words) * 3 // 4) if len(words) > 4 else len(words) // 2
        ask = self._random.choice(_ASK_CONTINUE).format(text=" ".join(words[:cut]) or "Go on.")
        return ask, " ".join(words[cut:])

    def _section(self) -> Exchange:
        section = self._random.choice(self._source.manuals)
        answer = "\n\n".join(section.paragraphs[: self._random.randint(1, 3)])
        return self._random.choice(_ASK_SECTION).format(heading=section.heading), answer

    def _small_talk(self) -> Exchange:
        questions, answers = self._random.choice(SMALL_TALK)
        return self._random.choice(questions), self._random.choice(answers)

    def _fact(self) -> Exchange:
        if self._random.random() < 0.5:
            country = self._random.choice(sorted(CAPITALS))
            ask = self._random.choice(
                ("What is the capital of {}?", "Name the capital of {}.", "what is the capital of {}")
            )
            return ask.format(country), capital_sentence(country)
        left, right = self._random.randint(0, 5), self._random.randint(0, 5)
        ask = self._random.choice(("What is {} plus {}?", "What is {} + {}?", "{} + {}", "{}+{}=?"))
        words = self._random.random() < 0.3 and "plus" in ask
        names = NUMBERS if words else [str(number) for number in range(11)]
        return (
            ask.format(names[left], names[right]),
            f"{names[left].capitalize()} plus {names[right]} is {names[left + right]}.",
        )


def capital_sentence(country: str) -> str:
    """Return one sentence that names the country's capital."""
    return f"The capital of {country} is {CAPITALS[country]}."


def article(word: str) -> str:
    """Return the indefinite article that mostly suits the spelling of `word`."""
    return "an" if word[0] in "aeiou" else "a"


def describe(entry: WordEntry) -> str:
    """Return the definition of a word as one English sentence."""
    if entry.kind == "verb":
        return f"To {entry.word} means to {entry.meaning}."
    if entry.kind == "adj":
        return f"{entry.word.capitalize()} means {entry.meaning}."
    if entry.category in _MASS or entry.word.endswith("s"):
        return f"{entry.word.capitalize()} is {entry.meaning}."
    meaning = entry.meaning if _HAS_ARTICLE.match(entry.meaning) else f"{article(entry.meaning)} {entry.meaning}"
    return f"{article(entry.word).capitalize()} {entry.word} is {meaning}."
