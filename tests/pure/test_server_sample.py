"""Deltas of a sample to pieces, pieces to blocks and wholes, without a server."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("msgspec")

from quire.server.blocks import BlockClosed, BlockGrown, BlockOpened, ContentBlocks
from quire.server.collector import SampleCollector
from quire.server.sample import PlainText, Sample
from quire.text.channels.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, QuireError, Request, SamplingParams, Usage
from tests.pure.test_text_support import gguf_of, gpt2_words, train_byte_level

END = 300  # any token will do


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_of(train_byte_level(gpt2_words()), "gpt-2"))


def make_sample(**params: object) -> Sample:
    request = Request("r", [1], 1, SamplingParams(**params).resolve(), 100, stop_ids=frozenset({END}))  # type: ignore[arg-type]
    return Sample(request, tokenizer(), PlainText(), 0)


def ids(text: str | bytes) -> list[int]:
    """One token for each byte, whatever the tokenizer would merge."""
    by_bytes = {tokenizer().token_bytes(i): i for i in range(tokenizer().vocab_size)}
    return [by_bytes[bytes([byte])] for byte in (text.encode() if isinstance(text, str) else text)]


def test_text_and_the_engines_end() -> None:
    sample, gather = make_sample(), SampleCollector(1)
    end = Delta("r", [*ids("c"), END], finish_reason=FinishReason.STOP, usage=Usage(1, 0, 4))
    for delta in (Delta("r", ids("a")), Delta("r", ids("b")), end):
        piece, cancel = sample.push(delta)
        assert piece is not None and not cancel
        gather.take([piece])
    whole = gather.samples[0]
    assert (whole.message.content, whole.end.reason, whole.end.stop_text) == ("abc", "stop", None)
    assert whole.end.usage.completion_tokens == 4 and sample.ended


def test_a_stop_string_cancels_and_waits_for_the_engines_last_word() -> None:
    sample = make_sample(stop=("xy",))
    piece, cancel = sample.push(Delta("r", ids("ax")))
    assert piece is not None and piece.events == [TextDelta("a")] and not cancel
    piece, cancel = sample.push(Delta("r", ids("yzz")))
    assert piece is not None and piece.events == [] and cancel and piece.token_ids == ids("y")
    assert sample.push(Delta("r", ids("late"))) == (None, False)
    piece, cancel = sample.push(Delta("r", finish_reason=FinishReason.CANCELLED, usage=Usage(1, 0, 9)))
    assert piece is not None and piece.end is not None and not cancel
    assert (piece.end.reason, piece.end.stop_text, piece.end.usage.completion_tokens) == ("stop", "xy", 3)


def test_half_a_character_waits_and_is_not_lost() -> None:
    sample = make_sample()
    first, second = ids("é")
    piece, _ = sample.push(Delta("r", [first]))
    assert piece is not None and piece.events == [] and piece.token_ids == [first]
    piece, _ = sample.push(Delta("r", [second], finish_reason=FinishReason.LENGTH))
    assert piece is not None and piece.events == [TextDelta("é")] and piece.end is not None
    assert piece.end.reason == "length"


@pytest.mark.parametrize(
    "delta,code",
    [
        (Delta("r", finish_reason=FinishReason.DEADLINE), "deadline_exceeded"),
        (Delta("r", finish_reason=FinishReason.CANCELLED), "engine_closed"),
        (Delta("r", finish_reason=FinishReason.ERROR, error="no", error_code="queue_full"), "queue_full"),
    ],
)
def test_failures_have_codes(delta: Delta, code: str) -> None:
    with pytest.raises(QuireError) as caught:
        make_sample().push(delta)
    assert caught.value.code == code


def test_blocks_open_grow_and_close_one_at_a_time() -> None:
    blocks = ContentBlocks()
    changes = blocks.feed([ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("a"), ToolCallStart(0, "f"),
                           ToolCallDelta(0, "{"), ToolCallDelta(0, "}"), ToolCallEnd(0), ToolCallStart(1, "g"),
                           ToolCallEnd(1), TextDelta("z")])  # fmt: skip
    changes += blocks.finish()
    shown = [(type(change), change.block.index) for change in changes]
    opened, grown, closed = BlockOpened, BlockGrown, BlockClosed
    assert shown == [
        (opened, 0), (grown, 0), (grown, 0), (closed, 0), (opened, 1), (grown, 1), (closed, 1), (opened, 2),
        (grown, 2), (grown, 2), (closed, 2), (opened, 3), (closed, 3), (opened, 4), (grown, 4), (closed, 4),
    ]  # fmt: skip
    assert [(block.kind, block.name, block.text) for block in blocks.all] == [
        ("reasoning", "", "hm"), ("text", "", "a"), ("call", "f", "{}"), ("call", "g", ""), ("text", "", "z"),
    ]  # fmt: skip
    assert blocks.finish() == []
