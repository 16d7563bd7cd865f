"""Hostile requests by kind, each with the statuses that a server may answer. `attacks` sends them.

Bytes are made once and sent many times, so that sending takes little CPU time on the machine it shares with the server.
`Sizes` sets how large requests are: the benchmark uses the defaults, the chaos gate uses `SMALL`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CUT = 0  # instead of a status: the connection was closed without an answer
REFUSED = frozenset({400, 413, 422})
OVERLOADED = frozenset({429, 503})  # overloaded: always a correct answer to a hostile request
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass(frozen=True, slots=True)
class Target:
    """The server's address and a valid API key."""

    host: str
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class Sizes:
    text: int = 8 << 20  # characters of a prompt
    tokens: int = 2_000_000
    list_items: int = 1_000_000  # items of a list whose last item is invalid
    words: int = 1024
    word_len: int = 4096
    depth: int = 100_000
    samples: int = 16
    headers: int = 20_000
    pipelined: int = 500


SMALL = Sizes(400_000, 100_000, 50_000, 64, 1024, 5_000, 4, pipelined=50)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One complete request, and the statuses that are correct answers to it."""

    name: str
    data: bytes
    expected: frozenset[int] = REFUSED


def post(target: Target, path: str, body: bytes, *headers: str, key: bool = True, host: str | None = None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host or f'{target.host}:{target.port}'}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    if key:
        lines.append(f"Authorization: Bearer {target.key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def chat(content: str = "x", **fields: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0, **fields}
    return json.dumps(body).encode()


# ---------------------------------------------------------------------------------------------------------------------
# Kinds of requests


def _amplify(target: Target, sizes: Sizes) -> list[Exchange]:
    """Lists in which every item is an error."""
    ones = b"[" + b"1," * sizes.list_items + b"-1]"
    bodies = {"prompt": COMPLETIONS, "messages": CHAT, "input": RESPONSES}
    return [
        Exchange(f"{field} of ints", post(target, path, b'{"%s":%s}' % (field.encode(), ones)))
        for field, path in bodies.items()
    ]


def _words(target: Target, sizes: Sizes) -> list[Exchange]:
    words = [f"{place:06d}" + "ab " * (sizes.word_len // 3 - 3) for place in range(sizes.words)]
    bad = json.dumps({"prompt": ["x"] * 4, "max_tokens": 1, "bad_words": words}).encode()
    breakers = [chr(0x4E00 + place) + f"{place}x" for place in range(64)]
    dry = chat(dry_multiplier=0.8, dry_breakers=breakers)
    any_end = REFUSED | {200}  # requests within the limits may be answered
    return [
        Exchange("bad_words", post(target, COMPLETIONS, bad), any_end),
        Exchange("dry_breakers", post(target, CHAT, dry), any_end),
    ]


def _long_prompts(target: Target, sizes: Sizes) -> list[Exchange]:
    words, one_word = "word " * (sizes.text // 5), "a" * sizes.text
    many = b'{"prompt":[' + b"7," * sizes.tokens + b'7],"max_tokens":1}'
    return [
        Exchange("a long text", post(target, COMPLETIONS, json.dumps({"prompt": words}).encode())),
        Exchange("a long word", post(target, CHAT, chat(one_word))),
        Exchange("many tokens", post(target, COMPLETIONS, many)),
        Exchange(
            "many messages",
            post(target, CHAT, json.dumps({"messages": [{"role": "user", "content": "x" * 64}] * 5_000}).encode()),
        ),
    ]


# Costs that a model's chat template may cause; `costly_template` puts them before the model's own template.
TEMPLATE_COSTS = {
    "loop": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}"
    "{% endfor %}",
    "square": "{% set n = namespace(x=7) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "double": "{% set n = namespace(x=[1]) %}{% for a in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}"
    "{{ n.x | tojson }}",
    "nest": "{% set n = namespace(x=[1]) %}{% for a in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | string }}",
    "replace": "{% set n = namespace(x='a' * 1000) %}{% for a in range(9) %}"
    "{% set n.x = n.x | replace('a', 'a' * 1000) %}{% endfor %}{{ n.x }}",
    "sum": "{% set n = namespace(x=[[1]] * 1000) %}{% for a in range(20) %}"
    "{% set n.x = [n.x | sum(start=[])] * 1000 %}{% endfor %}{{ n.x }}",
}


def costly_template(own: str) -> str:
    """Return a chat template that runs the cost named in the first message, or else the model's own template."""
    cases = [f"messages[0].content == 'cost:{name}' %}}{source}" for name, source in TEMPLATE_COSTS.items()]
    return "{% if " + "{% elif ".join(cases) + "{% else %}" + own + "{% endif %}"


def _templates(target: Target, sizes: Sizes) -> list[Exchange]:
    return [Exchange(f"template {name}", post(target, CHAT, chat(f"cost:{name}"))) for name in TEMPLATE_COSTS]


def _logprobs(target: Target, sizes: Sizes) -> list[Exchange]:
    body = {
        "prompt": [7 + place % 50 for place in range(900)],
        "max_tokens": 1,
        "n": sizes.samples,
        "temperature": 1,
        "prompt_logprobs": 20,
    }
    any_end = REFUSED | {200}
    return [
        Exchange("prompt_logprobs", post(target, COMPLETIONS, json.dumps(body).encode()), any_end),
        Exchange(
            "echo",
            post(
                target, COMPLETIONS, json.dumps({**body, "prompt_logprobs": None, "echo": True, "logprobs": 5}).encode()
            ),
            any_end,
        ),
    ]


def _heads(target: Target, sizes: Sizes) -> list[Exchange]:
    start, _, body = post(target, CHAT, chat()).partition(b"\r\n\r\n")
    many = start + b"\r\n" + b"a: b\r\n" * sizes.headers + b"\r\n" + body
    long_value = start + b"\r\nx-long: " + b"a" * (sizes.headers * 6) + b"\r\n\r\n" + body
    long_path = b"GET /" + b"a" * (sizes.headers * 6) + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    ends = frozenset({CUT, 400, 414, 431})
    return [
        Exchange("many headers", many, ends),
        Exchange("a long header", long_value, ends),
        Exchange("a long path", long_path, ends),
    ]


def _values(target: Target, sizes: Sizes) -> list[Exchange]:
    """Values that are not valid text or numbers, in every field that is stored or returned."""
    store = b'{"input":"x","max_output_tokens":1,"store":true,"metadata":%s}'
    item = b'{"input":[{"type":"message","role":"user","content":"%s"}],"max_output_tokens":1}'
    deep = b'{"a":' * 600 + b"1" + b"}" * 600  # valid JSON, too deep for code that recurses
    bodies = {
        "a lone surrogate in metadata": (RESPONSES, store % rb'{"a":"\ud800"}'),
        "NaN in metadata": (RESPONSES, store % b'{"a":NaN}'),
        "deep metadata": (RESPONSES, store % deep),
        "a lone surrogate in an item": (RESPONSES, item % rb"\udfff"),
        "a lone surrogate in a message": (CHAT, rb'{"messages":[{"role":"user","content":"\ud800"}]}'),
        "NaN": (CHAT, chat(temperature=float("nan"))),
        "logit_bias of 1e39": (CHAT, chat(logit_bias={"7": 1e39})),
        "logit_bias of 1e400": (CHAT, chat(logit_bias={"7": 2}).replace(b": 2}", b": 1e400}")),
    }
    return [Exchange(name, post(target, path, body)) for name, (path, body) in bodies.items()]


def _names(target: Target, sizes: Sizes) -> list[Exchange]:
    """Foreign hosts and origins, and two credentials in one request."""
    refused = frozenset({400, 401, 403, 421})
    return [
        Exchange("a foreign host", post(target, CHAT, chat(), key=False, host="rebound.example"), refused),
        Exchange("a foreign origin", post(target, CHAT, chat(), "Origin: http://rebound.example", key=False), refused),
        Exchange("two authorizations", post(target, CHAT, chat(), "Authorization: Bearer other"), refused),
    ]


def _grammars(target: Target, sizes: Sizes) -> list[Exchange]:
    depth = sizes.depth
    nested = chat().removesuffix(b"}") + b', "metadata": ' + b"[" * depth + b"]" * depth + b"}"
    wide = {"type": "object", "properties": {f"f{n}": {"enum": [f"{n}-{k}" for k in range(20)]} for n in range(2000)}}
    formats = {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}
    regexes = ("((a{1,500}){1,500}){1,500}", "(" * 5000 + "a" + ")" * 5000, "(a|b|ab)*" * 2000)
    ends = REFUSED | {200}
    return [
        Exchange("deep JSON", post(target, CHAT, nested)),
        Exchange("deep arrays", post(target, CHAT, b"[" * depth + b"]" * depth)),
        Exchange("a giant schema", post(target, CHAT, chat(response_format=formats)), ends),
        *(
            Exchange(f"a costly regex {place}", post(target, CHAT, chat(structured_outputs={"regex": regex})), ends)
            for place, regex in enumerate(regexes)
        ),
    ]


REQUEST_KINDS: dict[str, Callable[[Target, Sizes], list[Exchange]]] = {
    "amplify": _amplify,
    "words": _words,
    "long prompts": _long_prompts,
    "templates": _templates,
    "logprobs": _logprobs,
    "heads": _heads,
    "values": _values,
    "names": _names,
    "grammars": _grammars,
}
