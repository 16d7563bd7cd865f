"""A tiny model with a tokenizer and a chat template, as a folder: all that `LLM` needs, made in a moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.cpu.tiny_models import make_tiny

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_llm(folder: Path, family: str = "llama", added: Sequence[str] = (), **overrides: Any) -> Path:
    """`added`: texts that are tokens of their own, like the markers of reasoning; `overrides`: of the config."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the sky is blue because light is scattered", "why is the sky blue"] * 4, trainer)
    tokenizer.add_tokens(list(added))
    make_tiny(family, folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=0, **overrides)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, 3], "temperature": 0.7, "top_k": 20})
    )
    return folder
