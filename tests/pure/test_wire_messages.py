"""The messages between the processes: they come out as they went in, and what is wrong is said clearly."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("msgspec")

from quire.engine.host import wire
from quire.engine.host.frames import VERSION, FrameReader, FrameWriter
from quire.types import (
    Delta,
    FinishReason,
    GrammarSpec,
    QuireError,
    Request,
    SamplingParams,
    Timing,
    TokenLogprobs,
    Usage,
)

PARAMS = SamplingParams(
    temperature=0.5, logit_bias=((3, -math.inf), (5, 1.5)), stop=("a", "b"), n=3, seed=-7, bad_token_ids=((1, 2), (3,))
).resolve()


def make_requests() -> list[Request]:
    return [
        Request(id=f"r/{index}", tokens=[1, 2, 70000], prompt_len=3, params=PARAMS, max_len=9, stop_ids=frozenset({2}),
                seed=-7, sample_index=index, priority=-1, arrival=1.5, deadline=2.5, salt=b"\0salt",
                grammar=GrammarSpec("regex", "a+", (5, 6)))
        for index in range(3)
    ]  # fmt: skip


def test_requests_survive_the_way() -> None:
    message = wire.decode_to_engine(wire.encode(wire.submit_message(make_requests())))
    assert isinstance(message, wire.Submit)
    for came, sent in zip(wire.submitted_requests(message), make_requests(), strict=True):
        for name in ("id", "tokens", "prompt_len", "params", "max_len", "stop_ids", "seed", "sample_index", "priority",
                     "arrival", "deadline", "salt", "adapter", "grammar"):  # fmt: skip
            assert getattr(came, name) == getattr(sent, name), name


def test_samples_do_not_share_their_tokens() -> None:
    message = wire.submit_message(make_requests())
    first, second, _ = wire.submitted_requests(message)
    first.tokens.append(4)
    assert second.tokens == [1, 2, 70000]


def test_a_prompt_is_sent_once_however_many_samples_it_has() -> None:
    one = make_requests()[:1]
    one[0].tokens = list(range(1000, 11000))
    many = [Request(f"r/{i}", one[0].tokens, 10000, PARAMS, 10009, sample_index=i) for i in range(100)]
    assert len(wire.encode(wire.submit_message(many))) < 1.2 * len(wire.encode(wire.submit_message(one)))


@pytest.mark.parametrize(
    "delta",
    [
        Delta("a", [1, 2]),
        Delta("a", [7], logprobs=[TokenLogprobs(7, -0.5, 1, [7, 8], [-0.5, -math.inf])]),
        Delta("a", prompt_logprobs=[TokenLogprobs(7, -0.5, 1, [], [])]),
        Delta("a", [3], finish_reason=FinishReason.STOP, usage=Usage(3, 2, 1), timing=Timing(0.1, 0.2, 0.3)),
        Delta("a", finish_reason=FinishReason.ERROR, error="oh no", error_code="step_failed"),
    ],
)
def test_deltas_survive_the_way(delta: Delta) -> None:
    message = wire.decode_from_engine(wire.encode(wire.deltas_message([delta])))
    assert isinstance(message, wire.Deltas) and message.deltas == [delta]


def test_the_bounds_of_a_delta_hold_on_the_way() -> None:
    long = Delta("a", finish_reason=FinishReason.ERROR, error="x" * (wire.MAX_TEXT + 1), error_code="step_failed")
    message = wire.decode_from_engine(wire.encode(wire.deltas_message([long])))
    assert isinstance(message, wire.Deltas) and message.deltas[0].error == "x" * wire.MAX_TEXT
    for bad in (
        Delta("a" * 257),
        Delta("a", embedding=[0.0] * (wire.MAX_BATCH + 1)),
        Delta("a", error="x" * (wire.MAX_TEXT + 1)),
        Delta("a", error_code="x" * (wire.MAX_TEXT + 1)),
    ):
        with pytest.raises(QuireError, match="malformed"):
            wire.decode_from_engine(wire.encode(wire.Deltas([bad])))


def test_a_beat_and_a_failure_survive_the_way() -> None:
    beat = wire.Beat(steps=3, running=2, groups=[wire.GroupUsage("full", 10, 9)])
    assert wire.decode_from_engine(wire.encode(beat)) == beat
    failed = wire.decode_from_engine(wire.encode(wire.Failed("code", "what", "hint", "param")))
    assert isinstance(failed, wire.Failed) and str(failed.error()) == "what hint" and failed.error().param == "param"


def test_another_version_is_a_clear_error() -> None:
    frame = bytearray(FrameWriter(wire.MARK).frame(wire.encode(wire.StopEngine())))
    frame[2] += 1
    with pytest.raises(QuireError, match=rf"version {VERSION + 1}.*version {VERSION}") as caught:
        FrameReader(wire.MARK).open(bytes(frame))
    assert caught.value.code == "version_mismatch"


@pytest.mark.parametrize("frame", [b"", b"Q", b"GET / HTTP/1.1", wire.MARK, wire.MARK + bytes([VERSION])])
def test_frames_of_others_are_dropped_and_harm_nothing(frame: bytes) -> None:
    writer, reader = FrameWriter(wire.MARK), FrameReader(wire.MARK)
    assert reader.open(writer.frame(b"one")) == b"one"
    assert reader.open(frame) is None
    assert reader.open(writer.frame(b"two")) == b"two"


def test_a_frame_counts_once_and_a_missing_or_damaged_one_is_noticed() -> None:
    writer, reader = FrameWriter(wire.MARK), FrameReader(wire.MARK)
    frames = [writer.frame(bytes([65 + i])) for i in range(6)]
    assert [reader.open(frame) for frame in (frames[0], frames[0], frames[1], frames[0])] == [b"A", None, b"B", None]
    with pytest.raises(QuireError) as caught:
        reader.open(frames[3])
    assert caught.value.code == "frames_lost"
    for place in range(3, len(frames[2])):
        damaged = bytearray(frames[2])
        damaged[place] ^= 4
        with pytest.raises(QuireError) as caught:
            reader.open(bytes(damaged))
        assert caught.value.code == "frames_damaged", place
    assert reader.open(frames[2]) == b"C"


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91\xa5start", b"\x92\xa4nope\x00", b"\x91" * 3000])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(QuireError) as caught:
        wire.decode_to_engine(payload)
    assert caught.value.code == "bad_message"


def test_a_request_goes_on_from_what_was_delivered() -> None:
    request = make_requests()[1]
    request.tokens, request.prompt_len, request.prompt_scored = [1, 2, 70000, 8, 9], 3, 2
    request.resumed = request.suspect = True
    message = wire.decode_to_engine(wire.encode(wire.submit_message([request])))
    assert isinstance(message, wire.Submit)
    (came,) = wire.submitted_requests(message)
    assert (came.tokens, came.prompt_len, came.num_sampled, came.sample_index) == ([1, 2, 70000, 8, 9], 3, 2, 1)
    assert (came.prompt_scored, came.resumed, came.suspect) == (2, True, True)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(QuireError, match="malformed"):
        wire.decode_to_engine(wire.encode(wire.Beat()))


def test_lists_are_bounded() -> None:
    frame = wire.encode(wire.CancelMany(["x"] * (wire.MAX_BATCH + 1)))
    with pytest.raises(QuireError, match="malformed"):
        wire.decode_to_engine(frame)
    with pytest.raises(QuireError, match="malformed"):
        wire.decode_to_engine(wire.encode(wire.CancelMany(["x" * 257])))


def test_wrong_types_are_refused() -> None:
    frame = wire.encode(wire.CancelMany([5]))  # type: ignore[list-item]
    with pytest.raises(QuireError, match="malformed"):
        wire.decode_to_engine(frame)
