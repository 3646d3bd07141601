"""The demo model's shape: a Llama small enough to ship and wide enough to split eight ways."""

from __future__ import annotations

from transformers import LlamaConfig

from demo_training.vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

MAX_LENGTH = 8192


def demo_config() -> LlamaConfig:
    """Return the configuration: 2.8 million parameters; heads, widths and vocabulary divide by 8.

    Eight KV heads (no grouping), so that TP 1, 2, 4 and 8 each split them evenly. `dtype` is float32 though the file
    stores bfloat16: every bfloat16 is a float32, and in float32 greedy choices do not depend on how sums are split.
    """
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        initializer_range=0.02,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
