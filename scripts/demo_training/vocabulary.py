"""The demo model's tokenizer: byte-level BPE, so that any text round-trips, and its chat template.

Form of the files: `tokenizers` (tokenizer.json) and `transformers` (tokenizer_config.json, chat_template.jinja).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES))
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- set role = "system" if message.role == "developer" else message.role -%}
    {%- if role not in ["system", "user", "assistant"] -%}
        {{- raise_exception("The roles are system, user and assistant; this message's is " ~ message.role) -}}
    {%- endif -%}
    {{- "<|" ~ role ~ "|>" ~ message.content ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|assistant|>" -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `VOCAB_SIZE` tokens; the special tokens have the first ids.

    All 256 bytes are in it. Digits are never merged. Encoding with special tokens puts `BOS` first.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer's files into `folder`, as `AutoTokenizer.from_pretrained` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [f"<|{role}|>" for role in ROLES],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def render_chat(messages: Iterable[dict[str, str]]) -> str:
    """Return a whole conversation as text; the same as the chat template without a generation prompt."""
    return BOS + "".join(f"<|{message['role']}|>{message['content']}{EOS}" for message in messages)


def render_document(text: str) -> str:
    """Return a plain document between the tokens that begin and end one."""
    return BOS + text + EOS
