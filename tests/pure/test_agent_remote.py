"""The agent's client of OpenAI's API: what servers send in different ways, and what goes wrong on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.agent.engines.remote import RemoteEngine
from quire.agent.engines.seam import ModelAnswer, Question
from quire.types import QuireError

TOOL = {"type": "function", "function": {"name": "read_file", "description": "", "parameters": {"type": "object"}}}
Reply = tuple[int, bytes]


class Served:
    """A server whose replies a test sets."""

    def __init__(self) -> None:
        self.models: Reply = (200, b'{"data": [{"id": "m", "max_model_len": 100}, {"id": "n", "meta": {"n_ctx": 7}}]}')
        self.reply: Reply = (200, b"")
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    def events(self, *events: Any, done: bool = True) -> None:
        lines = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        self.reply = (200, b": comment\n\n" + lines + (b"data: [DONE]\n\n" if done else b""))


@pytest.fixture
def served() -> Iterator[Served]:
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            state.keys.append(self.headers["Authorization"])
            self.answer(state.models)

        def do_POST(self) -> None:
            state.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(state.reply)

        def answer(self, reply: Reply) -> None:
            self.send_response(reply[0])
            self.end_headers()
            self.wfile.write(reply[1])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


def ask(engine: RemoteEngine, **options: Any) -> ModelAnswer:
    stream = engine.ask(Question([{"role": "user", "content": "hi"}], **options))
    while True:
        try:
            next(stream)
        except StopIteration as ended:
            answer: ModelAnswer = ended.value
            return answer


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def call_piece(name: str | None, arguments: str | None, index: int = 0, call_id: str | None = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return delta(tool_calls=[{"index": index, "id": call_id, "type": "function", "function": function}])


def test_an_answer_with_reasoning_text_calls_and_usage(served: Served) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    served.events(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="I look."),
        call_piece("read_file", '{"path":'),
        call_piece(None, ' "a"}', call_id=None),
        call_piece("read_file", "{}", 1, "c2"),
        delta("tool_calls"),
        {"choices": [], "usage": usage},
    )
    answer = ask(RemoteEngine(served.url), tools=[TOOL])
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("I look.", "hm", "tool_calls")
    assert [(call.id, call.name, call.arguments) for call in answer.calls] == [
        ("c1", "read_file", '{"path": "a"}'),
        ("c2", "read_file", "{}"),
    ]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 5, 4)
    assert served.bodies[0]["tools"][0]["function"]["strict"] is True


def test_a_server_that_repeats_the_name_and_counts_nothing(served: Served) -> None:
    """llama-cpp-python does both."""
    pieces = [call_piece("read_file", part) for part in ("", '{"path"', ': "a"', "}")]
    served.events(*pieces, delta("tool_calls"))
    answer = ask(RemoteEngine(served.url), tools=[TOOL])
    assert [(call.name, call.arguments) for call in answer.calls] == [("read_file", '{"path": "a"}')]
    assert answer.output_tokens == 4


def test_a_stream_without_any_event_is_asked_again_as_a_whole(served: Served) -> None:
    """llama-cpp-python ends a stream so where it can't choose among tools in one, or has an error to tell."""
    function = {"name": "read_file", "arguments": '{"path": "a"}'}
    message = {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    whole = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 7}}
    served.reply = (200, json.dumps(whole).encode())
    answer = ask(RemoteEngine(served.url), tools=[TOOL])
    assert [(call.id, call.name, call.arguments) for call in answer.calls] == [("c1", "read_file", '{"path": "a"}')]
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (7, 1, "tool_calls")
    assert [body.get("stream") for body in served.bodies] == [True, None]


def test_a_call_cut_by_the_limit_is_not_complete(served: Served) -> None:
    served.events(call_piece("read_file", '{"path": "a'), delta("length"))
    assert not ask(RemoteEngine(served.url), tools=[TOOL]).calls[0].is_complete


def test_models_contexts_and_keys(served: Served) -> None:
    engine = RemoteEngine(served.url + "/v1/", api_key="sk-1")
    assert (engine.name, engine.context_len, engine.models()) == ("m", 100, ["m", "n"])
    assert served.keys[0] == "Bearer sk-1"
    engine.switch("n")
    assert (engine.name, engine.context_len) == ("n", 7)
    with pytest.raises(QuireError, match="no model 'x'"):
        engine.switch("x")


def test_tools_in_the_prompt_are_not_sent(served: Served) -> None:
    served.events(delta("stop", content="ok"))
    ask(RemoteEngine(served.url, takes_tools=False), tools=[TOOL], tool_choice="read_file")
    assert "tools" not in served.bodies[0] and "tool_choice" not in served.bodies[0]


def set_reply(status: int, body: bytes) -> Callable[[Served], None]:
    return lambda served: setattr(served, "reply", (status, body))


@pytest.mark.parametrize(
    ("prepare", "code", "why"),
    [
        (set_reply(500, b'{"error": {"message": "no memory"}}'), "request_failed", "500: no memory"),
        (set_reply(400, b'{"error": {"message": "exceeds the context window"}}'), "context_full", "400"),
        (set_reply(401, b"{}"), "request_failed", "401"),
        (set_reply(404, b"<html>nothing</html>"), "request_failed", "nothing"),
        (set_reply(200, b"data: {broken\n\n"), "request_failed", "no JSON"),
        (set_reply(200, b'data: {"error": {"message": "died"}}\n\n'), "request_failed", "died"),
        (set_reply(200, b""), "request_failed", "no answer"),
        (set_reply(200, b'{"choices": [3]}'), "request_failed", "no answer"),
        (lambda served: served.events(delta(content="half"), done=False), "request_failed", "broke off"),
    ],
)
def test_what_goes_wrong_is_one_error(served: Served, prepare: Callable[[Served], None], code: str, why: str) -> None:
    engine = RemoteEngine(served.url)
    prepare(served)
    with pytest.raises(QuireError, match=why) as caught:
        ask(engine)
    assert caught.value.code == code


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://user:word@x", "http://x?y=1"])
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(QuireError, match="not the URL"):
        RemoteEngine(url)


def test_a_server_that_is_not_there_is_one_error() -> None:
    with pytest.raises(QuireError, match="Is it running"):
        RemoteEngine("http://127.0.0.1:9")


def test_a_server_without_a_list_of_models_is_used(served: Served) -> None:
    served.models = (404, b"nothing")
    assert (RemoteEngine(served.url).name, RemoteEngine(served.url, model="mine").name) == ("default", "mine")
