"""Reads what clients of `/v1/files` and `/v1/batches` send: multipart uploads, and lines of JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from quire.server.http.bodies import decode_json
from quire.server.http.errors import ApiError, bad_request

MAX_LINES = 50_000
MAX_ERRORS = 20  # told of a file
MAX_PARTS = 16
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
_FIELD = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """An upload."""

    filename: str
    purpose: str
    content: bytes


def read_upload(content_type: str, body: bytes) -> UploadedFile:
    """The file in a multipart body, as OpenAI's clients send it."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        message = "Send the file as multipart/form-data, with the fields file and purpose."
        raise ApiError(415, "unsupported_media_type", message)
    boundary = b"--" + (found.group(1) or found.group(2)).encode("latin-1", "replace")
    purpose, filename, content = "", "", None
    parts = (b"\r\n" + body).split(b"\r\n" + boundary, MAX_PARTS + 1)
    if len(parts) > MAX_PARTS:
        raise bad_request("invalid_value", f"The upload has more than {MAX_PARTS} parts.", "file")
    for part in parts[1:]:
        if part.startswith(b"--"):
            break
        head, gap, value = part.partition(b"\r\n\r\n")
        fields = dict(_FIELD.findall(head.decode("utf-8", "replace")))
        if not gap or "name" not in fields:
            raise bad_request("invalid_value", "The upload is not valid multipart/form-data.", "file")
        if fields["name"] == "file":
            filename, content = fields.get("filename", "file.jsonl")[:256], value
        elif fields["name"] == "purpose":
            purpose = value.decode("utf-8", "replace")[:64]
        elif not fields["name"].startswith("expires_after"):
            raise bad_request("unknown_field", f"Unknown field {fields['name'][:200]!r}.", fields["name"][:200])
    if content is None:
        raise bad_request("missing_field", "The field 'file' is missing.", "file")
    if purpose != "batch":
        what = f"The purpose {purpose!r} is not known; files are for batches." if purpose else "The purpose is missing."
        raise bad_request("invalid_value" if purpose else "missing_field", what, "purpose")
    return UploadedFile(filename, purpose, content)


def read_lines(content: bytes, endpoint: str) -> tuple[list[tuple[str, bytes]], list[dict[str, Any]]]:
    """The id and body of each line, and what is wrong with lines."""
    lines: list[tuple[str, bytes]] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            name, body = _read_line(line, endpoint)
            if name in seen:
                raise bad_request("duplicate_custom_id", f"The custom_id {name[:100]!r} stands twice.", "custom_id")
        except ApiError as error:
            errors.append({"code": error.code, "message": error.message, "param": error.param, "line": number})
            if len(errors) >= MAX_ERRORS:
                break
            continue
        seen.add(name)
        lines.append((name, body))
    if not lines and not errors:
        errors = [{"code": "empty_file", "message": "The file has no lines.", "param": None, "line": None}]
    if len(lines) > MAX_LINES:
        message = f"The file has {len(lines)} lines, {MAX_LINES} is the limit."
        errors = [{"code": "too_many_lines", "message": message, "param": None, "line": None}]
    return lines, errors


def _read_line(line: bytes, endpoint: str) -> tuple[str, bytes]:
    try:
        value = decode_json(line)
    except json.JSONDecodeError as error:
        raise bad_request("invalid_json", f"The line is not valid JSON: {error.msg}.") from None
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise bad_request("missing_field", "The line has no object 'body'.", "body")
    name = value.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= 512:
        raise bad_request("missing_field", "The line has no text 'custom_id'.", "custom_id")
    if value.get("method", "POST") != "POST":
        raise bad_request("invalid_value", "The method of a line is POST.", "method")
    if value.get("url", endpoint) != endpoint:
        raise bad_request("invalid_value", f"The url of a line is the batch's endpoint, {endpoint}.", "url")
    if value["body"].get("stream"):
        raise bad_request("unsupported_parameter", "A line of a batch can't be streamed.", "body.stream")
    return name, json.dumps(value["body"], ensure_ascii=False, separators=(",", ":")).encode()
