"""Our tokenizer and templates against `transformers` on the same folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from quire.text.template import template_for
from quire.text.tokenizer import Tokenizer
from tests.pure.test_text_support import (
    TEXTS,
    gpt2_words,
    sentencepiece_backend,
    smollm_words,
    train_byte_level,
    write_folder,
)
from tests.pure.test_text_template import CHATML, HEADERS, PARTS_OR_TEXT, SYSTEM, TALK, THINKING, TOOLS, TURNS, USER

BYTE_LEVEL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def with_bos(backend: Any, token: str, token_id: int) -> Any:
    backend.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])
    return backend


CASES = {
    "gpt-2": lambda: (train_byte_level(gpt2_words()), BYTE_LEVEL),
    "digits": lambda: (train_byte_level(smollm_words()), BYTE_LEVEL),
    "byte-level-bos": lambda: (with_bos(train_byte_level(gpt2_words()), "<|im_start|>", 1), BYTE_LEVEL),
    "sentencepiece-bos": lambda: (with_bos(sentencepiece_backend(), "<s>", 1), SENTENCEPIECE),
}


def both(folder: Path, backend: Any, config: dict[str, Any]) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    write_folder(folder, backend, tokenizer_config=config)
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("case", CASES)
def test_same_ids_and_same_text(case: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, *CASES[case]())
    assert ours.bos_id == theirs.bos_token_id and ours.eos_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("source", [CHATML, HEADERS, TURNS, THINKING, TOOLS, PARTS_OR_TEXT])
def test_same_prompt(source: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, train_byte_level(gpt2_words()), BYTE_LEVEL | {"chat_template": source})
    template = template_for(ours)
    talks = [[USER], TALK] + ([[SYSTEM, *TALK]] if source != TURNS else [])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for messages in talks:
        for options in ({}, {"enable_thinking": False}, {"tools": tools}):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
            assert template.render(messages, **options) == expected
    open_talk = [*TALK, {"role": "assistant", "content": "Well, <b>"}]
    expected = theirs.apply_chat_template(open_talk, tokenize=False, continue_final_message=True)
    assert template.render(open_talk, continue_final_message=True) == expected
