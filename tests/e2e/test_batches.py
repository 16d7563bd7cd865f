"""Files and batches: every line answered once, across kills of the server; cancel; errors; each key sees its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ADMIN_KEY, KEY, ROOT, Started, need, start, stub_command
from tests.e2e.test_bad_input import check_error
from tests.e2e.test_security import client_of

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(stub: Started) -> Iterator[Any]:
    with client_of(stub, KEY) as client:
        yield client


def line(number: int, text: str = "", **body: Any) -> str:
    said = [{"role": "user", "content": text or f"line {number}"}]
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": CHAT, "body": {"messages": said, **body}})


def upload(http: Any, content: str, purpose: str = "batch") -> dict[str, Any]:
    reply = http.post("/v1/files", files={"file": ("lines.jsonl", content.encode())}, data={"purpose": purpose})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def finished(http: Any, name: str) -> dict[str, Any]:
    for _ in range(6000):
        batch: dict[str, Any] = http.get(f"/v1/batches/{name}").json()
        if batch["status"] not in ("in_progress", "cancelling"):
            return batch
        time.sleep(0.05)
    raise AssertionError(f"the batch did not end: {batch}")


def answers(http: Any, name: str | None) -> dict[str, Any]:
    content = http.get(f"/v1/files/{name}/content").text if name else ""
    rows = [json.loads(row) for row in content.splitlines()]
    found = {row["custom_id"]: row["response"] for row in rows}
    assert len(found) == len(rows), "no line is answered twice"
    return found


def test_with_openais_client(stub: Started) -> None:
    need("openai")
    from openai import OpenAI

    client = OpenAI(base_url=f"{stub.url}/v1", api_key=KEY)
    content = "\n".join([line(1), line(2, top_k="x"), line(3)]).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(content) and client.files.content(file.id).content == content
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    while client.batches.retrieve(batch.id).status == "in_progress":
        time.sleep(0.05)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.metadata == {"a": "b"} and batch.completed_at
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    rows = [json.loads(row) for row in client.files.content(batch.output_file_id or "").text.splitlines()]
    said = [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows]
    assert [row["custom_id"] for row in rows] == ["n1", "n3"] and said == ["line 1", "line 3"]
    wrong = json.loads(client.files.content(batch.error_file_id or "").text)
    assert wrong["response"]["status_code"] == 400 and wrong["response"]["body"]["error"]["param"] == "top_k"
    assert batch.id in [one.id for one in client.batches.list()]
    assert client.files.delete(file.id).deleted


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_two_kills_and_every_line_is_answered_once(model_here: None, tmp_path: Path, count: int) -> None:
    flags = ("--batch-store", str(tmp_path / "batches.sqlite"), "--max-rows", "8", "--max-model-len", "512")
    name = ""
    for turn in range(3):
        started = start(stub_command(*flags), {"STUB_STEP_SECONDS": "0.001"})
        with client_of(started, None) as client:
            if not name:
                file = upload(client, "\n".join(line(number) for number in range(count)))
                name = client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": CHAT}).json()["id"]
            if turn < 2:
                wanted = count * (turn + 1) // 4
                while client.get(f"/v1/batches/{name}").json()["request_counts"]["completed"] < wanted:
                    time.sleep(0.01)
                started.process.kill()
                started.process.wait()
                continue
            batch = finished(client, name)
            found = answers(client, batch["output_file_id"])
        started.stop()
    assert batch["status"] == "completed" and batch["request_counts"] == {
        "total": count,
        "completed": count,
        "failed": 0,
    }
    said = {custom: one["body"]["choices"][0]["message"]["content"] for custom, one in found.items()}
    assert said == {f"n{number}": f"line {number}" for number in range(count)}


def test_cancelled(http: Any) -> None:
    slow = "\n".join(line(number, "word " * 600) for number in range(300))
    file = upload(http, slow)
    batch = http.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": CHAT}).json()
    assert http.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] in ("cancelling", "cancelled")
    batch = finished(http, batch["id"])
    assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
    assert len(answers(http, batch["output_file_id"])) == batch["request_counts"]["completed"] < 300
    check_error(http.post(f"/v1/batches/{batch['id']}/cancel"), 400, "invalid_value", "batch_id")


@pytest.mark.parametrize(
    "content,code,number",
    [
        ("", "empty_file", None),
        ("{", "invalid_json", 1),
        (line(1) + "\n" + line(1), "duplicate_custom_id", 2),
        (line(1) + "\n\n" + line(2, stream=True), "unsupported_parameter", 3),
        (json.dumps({"custom_id": "a", "body": {}, "url": "/v1/completions"}), "invalid_value", 1),
        (json.dumps({"custom_id": "a", "body": {}, "method": "GET"}), "invalid_value", 1),
        (json.dumps({"custom_id": "", "body": {}}), "missing_field", 1),
        (json.dumps({"custom_id": "a", "body": 1}), "missing_field", 1),
    ],
)
def test_wrong_lines_fail_the_batch(http: Any, content: str, code: str, number: int | None) -> None:
    file = upload(http, content)
    batch = http.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": CHAT}).json()
    assert batch["status"] == "failed" and batch["request_counts"]["total"] == 0
    assert [(error["code"], error["line"]) for error in batch["errors"]["data"]] == [(code, number)]


def test_bad_input(http: Any, stub: Started) -> None:
    file = upload(http, line(1))
    good = {"input_file_id": file["id"], "endpoint": CHAT}
    for fields, status, code, param in (
        ({"input_file_id": "file-x"}, 404, "not_found", "input_file_id"),
        ({"endpoint": "/admin/check"}, 400, "invalid_value", "endpoint"),
        ({"completion_window": "soon"}, 400, "invalid_value", "completion_window"),
        ({"mood": 1}, 400, "unknown_field", "mood"),
    ):
        check_error(http.post("/v1/batches", json={**good, **fields}), status, code, param)
    check_error(http.get("/v1/batches/batch_x"), 404, "not_found", "batch_id")
    check_error(http.get("/v1/files/file-x/content"), 404, "not_found", "file_id")
    part = {"file": ("a", b"x")}
    check_error(http.post("/v1/files", files=part, data={"purpose": "fine-tune"}), 400, "invalid_value", "purpose")
    check_error(http.post("/v1/files", files=part), 400, "missing_field", "purpose")
    check_error(http.post("/v1/files", files={"mood": ("a", b"x")}), 400, "unknown_field", "mood")
    check_error(http.post("/v1/files", json={}), 415, "unsupported_media_type")
    kind = {"content-type": "multipart/form-data; boundary=b"}
    for body, code in ((b"", "missing_field"), (b"--b\r\nx", "invalid_value"), (b"--b\r\n\r\n" * 99, "invalid_value")):
        check_error(http.post("/v1/files", content=body, headers=kind), 400, code, "file")
    check_error(http.post(CHAT, content=b"--b", headers=kind), 415, "unsupported_media_type")
    with client_of(stub, ADMIN_KEY) as other:
        check_error(other.get(f"/v1/files/{file['id']}"), 404, "not_found", "file_id")
        check_error(other.post("/v1/batches", json=good), 404, "not_found", "input_file_id")
        assert file["id"] not in [one["id"] for one in other.get("/v1/files").json()["data"]]


def test_the_command(stub: Started, tmp_path: Path) -> None:
    lines, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text("\n".join([line(1), line(2), line(3, top_k="x")]))
    command = [sys.executable, "-m", "quire", "batch", str(lines), "-o", str(output), "--url", stub.url]
    done = subprocess.run([*command, "--api-key", KEY], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "2 of 3 lines answered, 1 failed" in done.stderr, done.stderr
    rows = [json.loads(row) for row in output.read_text().splitlines()]
    assert sorted((row["custom_id"], row["response"]["status_code"]) for row in rows) == [
        ("n1", 200),
        ("n2", 200),
        ("n3", 400),
    ]
    lines.write_text("{")
    done = subprocess.run([*command, "--api-key", KEY], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "line 1" in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr
