"""`quire batch FILE`: answer a file of requests, with a server that runs or with one of its own.

It speaks the batch API of any server (`/v1/files`, `/v1/batches`). Answers and errors go to the output file.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.types import QuireError

POLL_SECONDS = 0.5
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch",
        usage="quire batch FILE [--url URL | --model MODEL] [-o FILE]",
        help="answer a file of requests",
        description="Answer every line of a JSONL file in the form of OpenAI's batch API, with the server at --url, "
        "or with a server that is started for it.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help='lines of {"custom_id": …, "url": …, "body": {…}}')
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="answers (default: FILE.out.jsonl)")
    parser.add_argument("--endpoint", metavar="PATH", help="route of all lines (default: the first line's url)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", metavar="URL", help="a server that runs, such as http://127.0.0.1:8000")
    where.add_argument("--model", default="smollm2", metavar="MODEL", help="the model to serve (default: smollm2)")
    parser.add_argument("--api-key", metavar="K", help="the server's key (default: QUIRE_API_KEY)")


def run(args: Namespace) -> int:
    from quire.cli.output import print_note

    try:
        content = args.file.read_bytes()
    except OSError as error:
        raise QuireError("invalid_value", f"{args.file} can't be read: {error.strerror}.") from None
    output = args.output or args.file.with_name(f"{args.file.name}.out.jsonl")
    with _server(args.url, args.model) as url:
        api = _Api(url, args.api_key or os.environ.get("QUIRE_API_KEY"))
        batch = api.run(args.file.name, content, args.endpoint or _endpoint_of(content))
        if batch["errors"]:
            first = batch["errors"]["data"][0]
            place = f"line {first['line']} of " if first["line"] else ""
            raise QuireError("invalid_value", f"{place}{args.file}: {first['message']}")
        parts = [api.content(batch[name]) for name in ("output_file_id", "error_file_id") if batch[name]]
    try:
        output.write_bytes(b"".join(parts))
    except OSError as error:
        raise QuireError("store_failed", f"{output} can't be written: {error.strerror}.") from None
    counts = batch["request_counts"]
    done, total, failed = counts["completed"], counts["total"], counts["failed"]
    print_note(f"{done} of {total} lines answered, {failed} failed: {output}")
    return 0 if done == total else 1


def _endpoint_of(content: bytes) -> str:
    """The route of the first line. What is wrong with lines is said by the server."""
    try:
        return str(json.loads(content.split(b"\n", 1)[0])["url"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "/v1/chat/completions"


@contextmanager
def _server(url: str | None, model: str) -> Iterator[str]:
    """The URL of the given server, or of one that is started and ended here."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if " at http" not in line:
                raise QuireError("engine_failed", "The server did not start.", "Its lines above say why.")
            yield line.split(" at ")[1].strip()
        finally:
            process.terminate()


class _Api:
    """The batch API of one server."""

    def __init__(self, url: str, key: str | None):
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def run(self, name: str, content: bytes, endpoint: str) -> dict[str, Any]:
        """Upload the lines, create a batch of them, and wait for its end."""
        boundary = secrets.token_hex(16)
        head = 'Content-Disposition: form-data; name="%s"%s\r\n\r\n'
        shown = name.encode("ascii", "replace").decode().replace('"', "_")
        body = b"".join(
            (
                f"--{boundary}\r\n{head % ('purpose', '')}batch\r\n--{boundary}\r\n".encode(),
                (head % ("file", f'; filename="{shown}"')).encode(),
                content,
                f"\r\n--{boundary}--\r\n".encode(),
            )
        )
        kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
        file = json.loads(self._send("POST", "/v1/files", body, kind))
        fields = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        kind = {"content-type": "application/json"}
        batch: dict[str, Any] = json.loads(self._send("POST", "/v1/batches", json.dumps(fields).encode(), kind))
        while batch["status"] in OPEN:
            time.sleep(POLL_SECONDS)
            batch = json.loads(self._send("GET", f"/v1/batches/{batch['id']}"))
        return batch

    def content(self, file_id: str) -> bytes:
        return self._send("GET", f"/v1/files/{file_id}/content")

    def _send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
        given = {**self._headers, **(headers or {})}
        request = urllib.request.Request(f"{self._url}{path}", body, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                found: bytes = reply.read()
                return found
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            try:
                text = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                text = text[:200]
            raise QuireError("invalid_value", f"{self._url}{path} answered {error.code}: {text}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            what = f"{self._url} can't be reached: {why}."
            raise QuireError("invalid_value", what, "Start it with `quire serve`, or leave --url out.") from None
