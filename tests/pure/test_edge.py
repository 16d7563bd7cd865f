"""What the edge refuses before the engine hears of it, whatever the model's chat template would make of it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.edge import Edge
from quire.types import QuireError, SamplingParams


class Letters:
    vocab_size = 0x110000
    special_spellings = turn_spellings = ()

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


class ShowsPictures:
    """Like the templates of models that have eyes: a picture becomes a mark in the text."""

    def render(self, messages: list[Any], **unused: Any) -> str:
        parts = [part for message in messages for part in message["content"]]
        return "".join(part["text"] if part["type"] == "text" else "<image>" for part in parts)


def make_edge() -> Edge:
    return Edge(Letters(), ShowsPictures, vocab_size=256, max_len=100, eos_ids=(), defaults={})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_pictures_are_refused_also_where_the_template_would_show_them(kind: str) -> None:
    edge = make_edge()
    text = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    with pytest.raises(QuireError) as caught:
        edge.encode([text, {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind}]}])
    assert caught.value.code == "invalid_parameter" and caught.value.param == "messages"
    assert f"messages[1] has a part of type {kind!r}" in str(caught.value) and "\n" not in str(caught.value)
    assert edge.encode([text]) == [ord("h"), ord("i")]


def test_a_token_that_only_the_tokenizer_knows_is_named() -> None:
    """Gemma 3's tokenizer has one for images, which models of text alone have no row for."""
    edge = make_edge()
    params = SamplingParams(max_tokens=4)
    assert edge.requests(edge.encode("h\u00ff"), params)[0].tokens == [ord("h"), 255]
    with pytest.raises(
        QuireError, match=r"The prompt has the token '\u0100' \(id 256\), which the tokenizer has"
    ) as caught:
        edge.requests(edge.encode("h\u0100"), params)
    assert caught.value.code == "invalid_prompt" and "\n" not in str(caught.value)
