"""The packaged demo model: its files, its shape, its tokenizer, and that it writes words without ties."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sglang_adapt.demo import demo_model_path

MOST_BYTES = 6_000_000
TP_SIZES = (1, 2, 4, 8)
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "What is a harbor?"},
]
PROMPTS = ("She was", "The house was", "It is a truth", "In the morning they", "I am sure that", "The server is")
PROSE = """\
The road to the village followed the river for a mile, and then turned up the hill between two rows of old trees. They
had walked there every evening of that summer, and had never been in a hurry to come home. She spoke of her brother,
who was to return from London before the end of the month; and he listened to her with so much attention, that she
began to think he must have some reason for it. "You will like him," said she, "when you know him better. He is not so
proud as he looks, and he has always been very good to me."
"""
# The most frequent words of English; about six in ten words of any English text are among them.
COMMON_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        """
        a about after again all always am an and any are as at be because been before being best better both but
        by came can come could day did do does down each even every few file first for friend from function gave
        get give go good great had happy has have he heard her here herself him himself his how i if in into is it
        its itself just kind know last left less let letter like little long look made make man many may me mean
        mind more most mother mr mrs miss much must my myself name never new no nor not nothing now object of off
        on once one only or other our out over own people quite rather really request room said same saw say see
        seemed server she should sister so some soon still such than that the their them themselves then there
        these they thing think this those thought through time to told too two type under until up upon us use
        used value very want was way we well went were what when where which while who whole whom why will with
        without word world would yes yet you young your
        """,
    )
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True).eval()


def test_files_are_there_and_small() -> None:
    files = {file.name: file.stat().st_size for file in demo_model_path().iterdir()}
    assert files.keys() == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= MOST_BYTES


def test_every_width_divides_by_every_tp_size() -> None:
    config = json.loads((demo_model_path() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] == config["num_key_value_heads"] == 8
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] == 8192
    padded_vocab = -(-config["vocab_size"] // 64) * 64
    widths = (config["num_key_value_heads"], config["hidden_size"], config["intermediate_size"], padded_vocab)
    assert [(width, tp) for width in widths for tp in TP_SIZES if width % tp] == []


def test_end_and_padding_tokens_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((demo_model_path() / "config.json").read_text())
    generation = json.loads((demo_model_path() / "generation_config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[name] == generation[name] == getattr(tokenizer, name)
    assert len(tokenizer) == config["vocab_size"]


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!\n\n\tIndented  twice. ",
        "naïve façade — “quotes” … ½ €",
        "日本語 العربية हिन्दी 🙂👩‍🚀",
        '{"json": [1, 2.5e-3, null]}',
        "".join(map(chr, range(256))),
        "",
    ],
)
def test_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.is_fast
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]


def test_chat_template_renders_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be kind.<|eos|><|user|>Hello<|eos|><|assistant|>Hi!<|eos|>"
        "<|user|>What is a harbor?<|eos|><|assistant|>"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Be kind.HelloHi!What is a harbor?"


def test_chat_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match=r"this message's is robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "beep"}], tokenize=False)


def test_greedy_text_is_words_without_ties(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    words: list[str] = []
    narrowest = float("inf")
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(
            ids, max_new_tokens=64, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        words += re.findall(r"[a-z]+", tokenizer.decode(output.sequences[0, ids.shape[1] :]).lower())
        top = torch.cat(output.logits).topk(2).values
        narrowest = min(narrowest, (top[:, 0] - top[:, 1]).min().item())
    assert len(words) > 100
    assert sum(word in COMMON_WORDS for word in words) / len(words) > 0.5
    assert narrowest > 1e-4  # float32 rounding is below this


def test_a_greeting_gets_an_answer_that_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    answer = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer[-1] == tokenizer.eos_token_id
    assert len(tokenizer.decode(answer, skip_special_tokens=True).split()) >= 3


def test_all_positions_are_trained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A text is about as likely at the end of a full context as it is at the beginning of one."""
    words = torch.tensor([tokenizer.encode(PROSE, add_special_tokens=False)])
    filler = words.repeat(1, 8192 // words.shape[1] + 1)[:, : 8192 - words.shape[1]]
    context = torch.cat([filler, words], dim=1)
    with torch.no_grad():
        near = model(words, labels=words).loss.item()
        far = model(context, labels=torch.cat([torch.full_like(filler, -100), words], dim=1)).loss.item()
    assert far < near + 0.3
