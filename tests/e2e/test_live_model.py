"""A server whose weights, precision and sleep change under streams: none is lost, and the next engine knows of it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ADMIN_KEY, Started, need, start

PROMPT = [5, 9, 17, 33, 65, 8, 7, 6]
ASK = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def served(model_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Started, Path, Path]]:
    """A server of one of two folders with different weights of one model."""
    need("torch", "transformers", "httpx")
    import torch
    from safetensors.torch import load_file, save_file

    from tests.cpu.tiny_llm import make_tiny_llm

    folder = tmp_path_factory.mktemp("live")
    first = make_tiny_llm(folder / "first", max_position_embeddings=1024)
    second = folder / "second"
    shutil.copytree(first, second)
    tensors = load_file(second / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    changed = {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in tensors.items()}
    save_file(changed, second / "model.safetensors", {"format": "pt"})
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        str(first),
        "--port",
        "0",
        "--admin-key",
        ADMIN_KEY,
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--num-pages",
        "800",
        "--host-memory",
        "0",
        "--served-model-name",
        "tiny",
    ]
    started = start(command)
    yield started, first, second
    started.stop()


def client_of(started: Started) -> Any:
    import httpx

    return httpx.Client(base_url=started.url, headers={"x-api-key": ADMIN_KEY}, timeout=120)


def say(client: Any, **more: Any) -> str:
    reply = client.post("/v1/completions", json={**ASK, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


class Streams:
    """Requests that run in threads until they are joined."""

    def __init__(self, started: Started):
        self.used: list[int] = []
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(started, i)) for i in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self, started: Started, index: int) -> None:
        with client_of(started) as client:
            reply = client.post("/v1/completions", json={**ASK, "prompt": [*PROMPT, 10 + index], "max_tokens": 300})
            if reply.status_code == 200:
                self.used.append(reply.json()["usage"]["completion_tokens"])
            else:
                self.failed.append(reply.text)

    def check(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert not self.failed and self.used == [300] * NUM_STREAMS


def test_changes_under_streams_lose_none(served: tuple[Started, Path, Path]) -> None:
    started, first, second = served
    with client_of(started) as client:
        before = say(client)

        def change(path: str, **body: Any) -> dict[str, Any]:
            streams = Streams(started)
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            if path == "/admin/sleep":
                assert client.get("/healthz").status_code == 200
                assert client.post("/admin/wake").json()["asleep"] is False
            streams.check()
            return reply.json()

        done = change("/admin/weights", model=str(second))
        assert done["paused_seconds"] > 0
        other = say(client)
        assert other != before
        change("/admin/precision", weights="q8_0", max_loss=5)
        change("/admin/sleep", cache="drop")
        change("/admin/precision", weights="auto", max_loss=5)
        assert say(client) == other
        pid = client.get("/admin/engine").json()["pid"]
        os.kill(pid, signal.SIGKILL)
        assert say(client) == other, "the next engine starts with the new weights"
        change("/admin/weights", model=str(first), in_flight="recompute")
        assert say(client) == before


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/admin/weights", {"model": "/none/there"}, "model_not_found"),
        ("/admin/weights", {"model": "x", "in_flight": "forget"}, "invalid_value"),
        ("/admin/precision", {"weights": "int3"}, "invalid_parameter"),
        ("/admin/sleep", {"cache": "some"}, "invalid_value"),
    ],
)
def test_what_can_not_be_done_is_refused(
    served: tuple[Started, Path, Path], path: str, body: dict[str, Any], code: str
) -> None:
    with client_of(served[0]) as client:
        before = say(client)
        refused = client.post(path, json=body)
        assert 400 <= refused.status_code < 500 and refused.json()["error"]["code"] == code, refused.text
        assert say(client) == before
