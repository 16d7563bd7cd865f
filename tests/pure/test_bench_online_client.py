"""The streaming client: events in any cut, every kind of answer a server can give, and URLs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.bench.online.stream_client import Answer, EventParser, RequestFailure, fetch_json, parse_url, stream
from quire.types import QuireError
from tests.pure.fake_openai import Exchange, fake_server

# -- events

EVENTS = (
    b": a comment\n\ndata: one\n\nevent: x\r\ndata:two\r\nid: 5\r\ndata: more\r\n\r\n"
    b"data: \xc3\xa4\r\rretry: 5\n\ndata:  last\n\ndata: never ended\n"
)
EXPECTED = ["one", "two\nmore", "ä", " last"]


def test_every_cut_in_three_gives_the_same_events() -> None:
    for first in range(len(EVENTS) + 1):
        for second in range(first, len(EVENTS) + 1):
            parser = EventParser()
            parts = (EVENTS[:first], EVENTS[first:second], EVENTS[second:])
            assert [event for part in parts for event in parser.feed(part)] == EXPECTED, parts


def test_byte_by_byte() -> None:
    parser = EventParser()
    assert [event for byte in EVENTS for event in parser.feed(bytes([byte]))] == EXPECTED


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.bench.online.stream_client.MAX_EVENT", 100)
    with pytest.raises(RequestFailure):
        EventParser().feed(b"data: " + b"x" * 200)


# -- what events say


def take(*payloads: str) -> Answer:
    answer = Answer()
    for index, payload in enumerate(payloads):
        answer.take(payload, float(index))
    return answer


def test_pieces_are_events_that_show_something() -> None:
    answer = take(
        '{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}',
        '{"choices": [{"delta": {"reasoning_content": "hm"}}]}',
        '{"choices": [{"delta": {"content": "yes"}}], "usage": null}',
        '{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}',
        '{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9,'
        ' "prompt_tokens_details": {"cached_tokens": 4}}}',
        "[DONE]",
    )
    assert answer.piece_times == [1.0, 2.0, 3.0] and answer.finished
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (5, 9, 4)


def test_tokens_that_show_nothing_count_when_they_end() -> None:
    assert take(
        '{"choices": [{"text": ""}]}', '{"choices": [{"text": "", "finish_reason": "length"}]}'
    ).piece_times == [1]


@pytest.mark.parametrize(
    "payload",
    ["{", "5", "[]", '{"choices": 5}', '{"choices": [1]}', '{"choices": [{"delta": 5}]}', '{"usage": {"x": 1}}',
     '{"choices": [], "usage": {"prompt_tokens": null, "completion_tokens": 1}}', "[" * 100_000],
)  # fmt: skip
def test_malformed_events(payload: str) -> None:
    with pytest.raises(RequestFailure) as caught:
        take(payload)
    assert caught.value.outcome == "malformed event"


def test_an_error_event_is_told() -> None:
    for payload in ('{"error": {"message": "out of luck"}}', '{"error": "out of luck"}'):
        with pytest.raises(RequestFailure) as caught:
            take(payload)
        assert (caught.value.outcome, caught.value.detail) == ("error event", "out of luck")


# -- over a connection


def ask(behave: Callable[[Exchange], Awaitable[None]], body: bytes = b'{"max_tokens": 3}') -> Answer:
    answer = Answer()

    async def main(url: str) -> None:
        async with asyncio.timeout(20):
            ticks = iter(range(1000))
            await stream(parse_url(url), "/completions", body, answer, lambda: float(next(ticks)))

    with fake_server(behave) as server:
        asyncio.run(main(server.url))
    return answer


def test_a_whole_answer() -> None:
    answer = ask(Exchange.answer)
    assert len(answer.piece_times) == 3 and answer.output_tokens == 3 and answer.finished


STREAM = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        HEAD + b"\r\n" + STREAM,
        HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM + b"beyond the end",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\n" + STREAM,
        HEAD + b"transfer-encoding: Chunked\r\n\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (len(STREAM), STREAM),
    ],
    ids=["until the end", "by length", "announced", "by chunks"],
)
def test_every_way_to_mark_the_end(reply: bytes) -> None:
    assert len(ask(lambda exchange: exchange.send(reply)).piece_times) == 1


@pytest.mark.parametrize(
    ("reply", "outcome", "detail"),
    [
        (b"", "hung up", ""),
        (b"HTTP/1.1 200", "hung up", ""),
        (HEAD + b"\r\n", "hung up", "before the answer did"),
        (HEAD + b"\r\n" + STREAM[:30], "hung up", "before the answer did"),
        (HEAD + b"\r\ndata: [DONE]\n\n", "empty answer", ""),
        (HEAD + b"Content-Length: 500\r\n\r\n" + STREAM, "hung up", ""),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\n" + STREAM[:20], "hung up", ""),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "not HTTP", ""),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "not HTTP", ""),
        (HEAD + b"Content-Length: lots\r\n\r\n", "not HTTP", ""),
        (HEAD + b"X: y\r\n" * 200, "not HTTP", "headers"),
        (HEAD + b"X: " + b"y" * 100_000, "not HTTP", ""),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP", "SSH"),
        (
            b"HTTP/1.1 429 Too Many\r\nContent-Length: 29\r\n\r\n" + b'{"error": {"message": "wait"}}'[:29],
            "HTTP 429",
            "",
        ),
        (b"HTTP/1.1 503 Busy\r\n\r\n" + b'{"error": {"message": "wait"}}', "HTTP 503", "wait"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}", "not a stream", "{}"),
        (HEAD + b"\r\ndata: {\n\n", "malformed event", "{"),
        (HEAD + b'\r\ndata: {"error": {"message": "no"}}\n\n', "error event", "no"),
    ],
)
def test_every_way_to_fail_has_a_name(reply: bytes, outcome: str, detail: str) -> None:
    with pytest.raises(RequestFailure) as caught:
        ask(lambda exchange: exchange.send(reply))
    assert caught.value.outcome == outcome and detail in caught.value.detail


def test_nobody_listens() -> None:
    with fake_server() as server:
        gone = server.url
    with pytest.raises(RequestFailure) as caught:
        asyncio.run(fetch_json(parse_url(gone), "/models"))
    assert caught.value.outcome == "no connection"


def test_the_key_goes_along_and_stays_out_of_sight() -> None:
    seen = []

    async def behave(exchange: Exchange) -> None:
        seen.append(exchange.headers)
        await exchange.answer()

    with fake_server(behave) as server:
        endpoint = parse_url(server.url, "sesame")
        asyncio.run(stream(endpoint, "/completions", b'{"max_tokens": 1}', Answer(), lambda: 0.0))
    assert seen[0]["authorization"] == "Bearer sesame"
    assert "sesame" not in repr(endpoint) and "sesame" not in endpoint.url


# -- URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://example.test/api", "https://example.test:443/api/v1"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    endpoint = parse_url(url)
    assert endpoint.url == expected
    assert endpoint.head("GET", "/models", 0).startswith(
        b"GET " + expected[expected.index("/", 8) :].encode() + b"/models "
    )


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://me:secret@x", "http://x/?a=1",
     "http://x/#a", "http://x/a b", "http://x/ä", "http://x/\r\nEvil: 1", "http://[::1"],
)  # fmt: skip
def test_wrong_urls(url: str) -> None:
    with pytest.raises(QuireError) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value) or url != "http://me:secret@x"


def test_a_key_no_header_can_hold() -> None:
    with pytest.raises(QuireError):
        parse_url("http://x", "a\r\nb")
