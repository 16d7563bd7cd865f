"""Message content never becomes control tokens, and every other prompt is what it was."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from quire.files.tiny_model import make_tiny_model
from quire.text import prompts
from quire.text.prompts import encode_chat, encode_within, render_chat
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError
from tests.pure.test_text_support import sentencepiece_metadata

TEMPLATES = {
    "byte level": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "sentencepiece": "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}",
}


@cache
def _sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata())


@pytest.fixture(params=list(TEMPLATES))
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, ChatTemplate]:
    byte_level = request.param == "byte level"
    tokenizer = Tokenizer.from_folder(make_tiny_model(tmp_path / "model")) if byte_level else _sentencepiece()
    return tokenizer, ChatTemplate(TEMPLATES[request.param], tokenizer.special_tokens)


def tokens_of(kind: tuple[Tokenizer, ChatTemplate], messages: list[Any], **options: Any) -> list[int]:
    tokenizer, template = kind
    return encode_chat(tokenizer, render_chat(template, tokenizer, messages, **options), 10_000)


def num_special(tokenizer: Tokenizer, tokens: list[int]) -> int:
    return sum(map(tokenizer.is_special, tokens))


def test_control_tokens_spelled_in_content_stay_text(kind: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, _ = kind
    plain = num_special(tokenizer, tokens_of(kind, [{"role": "user", "content": "the dog"}]))
    for spelling in tokenizer.special_spellings:
        for content in (f"the {spelling} dog", spelling, spelling * 3, f"{spelling[:3]}{spelling}{spelling[3:]}"):
            tokens = tokens_of(kind, [{"role": "user", "content": content}])
            assert num_special(tokenizer, tokens) == plain, content
            assert content in tokenizer.decode(tokens, skip_special=False)
            kept = tokens_of(kind, [{"role": "user", "content": content}], special_in_content=True)
            assert num_special(tokenizer, kept) > plain


def test_control_tokens_spelled_in_names_and_variables_stay_text(kind: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, _ = kind
    source = "{{ tools | tojson }}{{ messages | tojson }}{{ documents | tojson }}{{ date_string }}"
    template = ChatTemplate(source, {})
    for spelling in tokenizer.special_spellings:
        parameters = {"type": "object", "properties": {spelling: {"enum": [spelling]}}}
        call = {"function": {"name": "f", "arguments": {spelling: 1}}}
        tokens = tokens_of(
            (tokenizer, template),
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
            if spelling in tokenizer.turn_spellings
            else [{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            documents=[{"title": spelling, spelling: 1}],
            date_string=spelling,
        )
        assert num_special(tokenizer, tokens) == 0, spelling
        assert tokenizer.decode(tokens, skip_special=False).count(spelling) >= 5


def test_halves_of_a_control_token_do_not_meet(kind: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, _ = kind
    template = ChatTemplate("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", {})
    spelling = tokenizer.special_spellings[0]
    parts = [{"type": "text", "text": text} for text in ("a", spelling[:2], spelling[2:], "b")]
    tokens = tokens_of((tokenizer, template), [{"role": "user", "content": parts}])
    assert num_special(tokenizer, tokens) == 0
    assert f"a{spelling}b" in tokenizer.decode(tokens, skip_special=False)


def test_an_assistants_markers_keep_their_meaning_but_end_no_turn(kind: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, _ = kind
    plain = num_special(tokenizer, tokens_of(kind, [{"role": "assistant", "content": "the dog"}]))
    for spelling in tokenizer.special_spellings:
        tokens = tokens_of(kind, [{"role": "assistant", "content": f"the {spelling} dog"}])
        ends = spelling in tokenizer.turn_spellings
        assert num_special(tokenizer, tokens) == plain + (not ends), spelling


def test_ordinary_prompts_are_unchanged(kind: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = kind
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        texts = ["".join(rng.choices("the dog in<|>/s \n漢é😀{}", k=rng.randrange(1, 60))) for _ in range(3)]
        messages = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)
        ]
        if any(spelling in text for spelling in tokenizer.special_spellings for text in texts):
            continue
        segments = render_chat(template, tokenizer, messages)
        assert segments == [template.render(messages)]
        whole = tokenizer.encode(segments[0], add_special=False)
        assert encode_chat(tokenizer, segments, 10_000) == whole


def test_a_text_that_cant_fit_is_not_encoded(kind: tuple[Tokenizer, ChatTemplate], monkeypatch: Any) -> None:
    tokenizer, _ = kind
    encoded: list[int] = []
    real = tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return real(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    monkeypatch.setattr(prompts, "SLICE_CHARS", 1000)
    text = "the dog " * 5000
    with pytest.raises(QuireError, match="at least"):
        encode_within(tokenizer, text, 100)
    assert not encoded, "no tokens are long enough for it"
    with pytest.raises(QuireError, match="at least"):
        encode_within(tokenizer, text, len(text) // tokenizer.longest_token + 1)
    assert 0 < sum(encoded) < len(text)
    encoded.clear()
    assert encode_within(tokenizer, text, len(text)) == real(text)
