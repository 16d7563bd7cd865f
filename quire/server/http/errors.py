"""Errors in the format of the caller's API. Every error reply of the server is made here.

An `ApiError` has a status, code, message and the parameter at fault; a dialect formats its body. `QuireError`s of other
packages are mapped by their code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from starlette.responses import Response

from quire.server.http.encoding import to_json
from quire.types import PromptTooLong, QuireError

Dialect = Literal["openai", "anthropic", "ollama"]

STATUS_BY_CODE = {
    "model_not_found": 404,
    "not_found": 404,
    "session_not_found": 404,
    "session_damaged": 409,
    "session_of_other_model": 409,
    "nothing_cached": 409,
    "no_cache_folder": 409,
    "queue_full": 429,
    "rate_limited": 429,
    "deadline_exceeded": 504,
    "message_too_large": 413,
    "engine_lost": 503,
    "engine_failed": 503,
    "engine_closed": 503,
    "weights_replaced": 503,
    "busy": 409,
    "asleep": 409,
    "engine_hung": 503,
    "device_lost": 503,
    "shutting_down": 503,
    "step_failed": 500,
    "out_of_memory": 500,
    "prepare_failed": 500,
    "detokenize_failed": 500,
    "quarantined": 500,
    "bad_config": 500,
    "check_failed": 500,
    "store_failed": 507,
    "bad_logits": 500,
    "grammar_failed": 500,
    "kernel_failed": 500,
}
# Messages of these codes describe internals and go to the log only.
INTERNAL_CODES = frozenset(
    {
        "step_failed",
        "engine_failed",
        "device_lost",
        "grammar_failed",
        "out_of_memory",
        "prepare_failed",
        "detokenize_failed",
        "frames_lost",
        "frames_damaged",
        "check_failed",
        "kernel_failed",
    }
)
INTERNAL_MESSAGE = "The engine failed on this request. Other requests were not affected; the server's log says why."
OLLAMA_NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "response_format": "format",
}
# A route's names for parameters that have another name here. `param` in replies is the client's name.
CLIENT_NAMES = {
    "/v1/chat/completions": {"prompt": "messages", "logprobs": "top_logprobs"},
    "/v1/responses": {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"},
    "/v1/messages": {"prompt": "messages", "stop": "stop_sequences"},
    "/v1/messages/count_tokens": {"prompt": "messages"},
    "/v1/embeddings": {"prompt": "input"},
    "/render": {"prompt": "messages"},
    "/v1/chat/render": {"prompt": "messages"},
    "/api/chat": {"prompt": "messages", **OLLAMA_NAMES},
    "/api/generate": OLLAMA_NAMES,
    "/api/embed": {"prompt": "input"},
    "/infill": {"prompt": "input_prefix", "max_tokens": "n_predict", "logprobs": "n_probs"},
}
# Routes that generate nothing, so the context does not bound them.
COUNTING_ROUTES = frozenset({"/tokenize", "/render", "/v1/chat/render"})
CONTEXT_CODE = "context_length_exceeded"
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error reply: status, code, message, parameter and headers."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    return ApiError(400, code, message, param)


def from_quire_error(error: QuireError, retry_after: int = 1, route: str = "") -> ApiError:
    """The API error of a QuireError. Codes without a status are the caller's fault and give 400."""
    if isinstance(error, PromptTooLong):
        return _context_exceeded(error, route)
    status = STATUS_BY_CODE.get(error.code, 400)
    headers = {"retry-after": str(retry_after)} if status in (429, 503) else {}
    error = in_client_words(error, CLIENT_NAMES.get(route, {}))
    message = INTERNAL_MESSAGE if error.code in INTERNAL_CODES else str(error)
    code = CONTEXT_CODE if error.code == "prompt_too_long" else error.code
    return ApiError(status, code, message, error.param, headers)


@contextmanager
def counting_output(max_tokens: int | None) -> Iterator[None]:
    """Add the requested output tokens to a `PromptTooLong` raised inside, because clients expect both counts."""
    try:
        yield
    except PromptTooLong as error:
        error.num_output = max(1, max_tokens or 1)
        raise


def _context_exceeded(error: PromptTooLong, route: str) -> ApiError:
    """The error of a prompt that is too long, in the sentence by which agents and proxies recognise it: Anthropic's on
    its routes, else OpenAI's."""
    param = CLIENT_NAMES.get(route, {}).get("prompt", "prompt")
    shown = f"at least {error.count}" if error.at_least else f"{error.count}"
    if dialect_of(route) == "anthropic":
        return bad_request(CONTEXT_CODE, f"prompt is too long: {shown} tokens > {error.limit} maximum", param)
    if route in COUNTING_ROUTES:
        return bad_request("text_too_long", f"The text has {shown} tokens, {route} takes {error.limit} at most.", param)
    if route in ("/v1/embeddings", "/api/embed"):  # the client requests no output, so none is counted
        size, asked, cure = error.limit, f"your {param} resulted in {shown} tokens", param
    else:
        total = shown.replace(str(error.count), str(error.count + error.num_output))
        asked = f"you requested {total} tokens ({shown} in the {param}, {error.num_output} in the completion)"
        size, cure = error.limit + 1, f"{param} or completion"
    message = f"This model's maximum context length is {size} tokens. However, {asked}."
    return bad_request(CONTEXT_CODE, f"{message} Please reduce the length of the {cure}.", param)


def in_client_words(error: QuireError, names: Mapping[str, str]) -> QuireError:
    """The error with the client's names of fields, in `param` and wherever the message has `name=`."""
    what = error.what
    for ours, theirs in names.items():
        what = re.sub(rf"\b{ours}=", f"{theirs}=", what)
    return QuireError(error.code, what, error.hint, names.get(error.param or "", error.param))


def dialect_of(path: str) -> Dialect:
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def error_body(dialect: Dialect, error: ApiError, request_id: str = "") -> dict[str, Any]:
    if dialect == "ollama":
        return {"error": error.message, "param": error.param, "code": error.code}
    if dialect == "anthropic":
        kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        inner = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
        return {"type": "error", "error": inner, "request_id": request_id}
    kind = OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(dialect: Dialect, error: ApiError, request_id: str = "") -> Response:
    body = to_json(error_body(dialect, error, request_id))
    return Response(body, error.status, headers=error.headers, media_type="application/json")


# ---------------------------------------------------------------------------------------------------------------------
# Bodies that do not fit the schema

_CODES = {"extra_forbidden": "unknown_field", "missing": "missing_field", "json_invalid": "invalid_json"}


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error for the first invalid part of a body, query or path, by the client's name of it."""
    if not errors:
        return bad_request("invalid_request", "The request is not valid.")
    first = min(errors, key=_specificity)
    kind, place = str(first["type"]), _place(first)
    code = _CODES.get(kind, "invalid_value")
    if kind == "json_invalid":
        why = (first.get("ctx") or {}).get("error", "")
        return bad_request(code, f"The body is not valid JSON{f': {why}' if why else ''}.")
    if kind == "extra_forbidden":
        return bad_request(code, f"Unknown field {place!r}. Check its spelling, or leave it out.", place)
    if kind == "missing":
        return bad_request(code, f"The field {place!r} is missing." if place else "The body is missing.", place)
    return bad_request(code, f"{place or 'The body'}: {first['msg']}.", place)


def _specificity(error: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Sort key, most specific first: a value of a union gives one error per branch, and the deepest one says most."""
    kind = str(error["type"])
    return kind != "json_invalid", kind.endswith("_type"), -len(error["loc"])


def _place(error: Mapping[str, Any]) -> str | None:
    """The place of an error, such as messages[0] for ("body", "messages", 0, "str"). Parts that name a union's branch
    are types and are left out."""
    place, parts = "", list(error["loc"][1:])
    unknown = str(parts.pop())[:200] if parts and error["type"] == "extra_forbidden" else None
    for part in parts:
        part = part if isinstance(part, int) else str(part)[:200]  # a key of the client may have any length
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in _TYPE_NAMES and not part[0].isupper():
            place += f".{part}" if place else part
    if unknown is not None:
        place += f".{unknown}" if place else unknown
    return place or None


_TYPE_NAMES = {"str", "int", "float", "bool", "constrained", "none", "list", "dict"}
