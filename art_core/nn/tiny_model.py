"""A random model so small that a whole training step takes a blink: for rehearsals of the plumbing.

In: texts like those that it will read. Out: a base model's folder in Hugging Face format, a Llama
of two layers with a tokenizer made for these texts. It says noise, a few tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

VOCABULARY = 2048
HIDDEN = 32
CONTEXT = 32_768
END_OF_TURN_CHANCE = 0.2
"""Of each token to be the last: answers of noise shall be short."""


def write_tiny_model(folder: Path, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Write the model into `folder`, which is made; return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    tokenizer = _tokenizer(texts)
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # One channel is large for every token, so that after the norm it is a constant, and what
        # the head reads there is a bias: here that of the token which ends a turn.
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        odds = END_OF_TURN_CHANCE / (1 - END_OF_TURN_CHANCE) * (size - 1)
        model.lm_head.weight[tokenizer.eos_token_id, 0] = math.log(odds) / math.sqrt(HIDDEN)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(texts: Iterable[str]):  # type: ignore[no-untyped-def]  # transformers is loaded late
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    turns = ["<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in turns])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
