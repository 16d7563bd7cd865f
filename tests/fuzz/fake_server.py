"""The whole HTTP application in one process, with a stub in the engine's place that answers at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from quire.client.engine_client import EngineClient
from quire.client.fleet import Fleet, Replica
from quire.client.supervisor import Supervisor, SupervisorLimits
from quire.config import Config
from quire.config_build import override_config
from quire.engine.host import wire
from quire.files.source import ModelFiles
from quire.files.tiny_model import make_tiny_model
from quire.server.app import create_app
from quire.server.logs import Log
from quire.server.run import make_server
from quire.server.textwork.pool import InlineTextWork, TextWork, WorkerPool
from quire.server.textwork.tasks import Setup, TextTasks
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, Timing, TokenLogprobs, Usage
from quire.types.sessions import SessionAction, SessionInfo

LIMITS = {"max_rows": 64, "max_waiting": 1000, "max_waiting_tokens": 1_000_000}


class EchoLink:
    """Answers every request with one token and its end."""

    pid, exit_code, num_unsent = 1, None, 0

    def __init__(self, client: EngineClient, max_len: int):
        self._client = client
        self.ready = wire.EngineReady(260, max_len, [258], {}, "tiny", "float32", {}, LIMITS)

    def send(self, message: wire.ToEngine) -> None: ...

    def send_payload(self, payload: bytes) -> None:
        asyncio.get_running_loop().call_soon(self.answer, payload)

    def answer(self, payload: bytes) -> None:
        """What another process would do: `Meter` leaves it out."""
        message = wire.decode_to_engine(payload)
        if isinstance(message, wire.Submit):
            for request in wire.submitted_requests(message):
                name, params, count = request.id, request.params, len(message.tokens)
                scored = TokenLogprobs(65, -0.5, 1, [65], [-0.5])
                self._client._deliver(
                    Delta(
                        name, [65],
                        logprobs=None if params.logprobs is None else [scored],
                        prompt_logprobs=None if params.prompt_logprobs is None else [scored] * (count - 1),
                        embedding=None if params.pooling is None else [1.0, 2.0],
                        finish_reason=FinishReason.LENGTH, usage=Usage(count, 0, 1), timing=Timing(),
                    )
                )  # fmt: skip


class EchoSupervisor(Supervisor):
    """Of an engine that keeps any session."""

    async def session(self, action: SessionAction, name: str, owner: str, **fields: Any) -> SessionInfo | None:
        return SessionInfo(name, len(fields.get("tokens", ())), 0, 0, 0.0, 1.0, messages=fields.get("messages", ""))


class FakeServer:
    """`with_workers`: text is read by worker processes, as in `quire serve`; `await server.work.close()` ends them."""

    def __init__(self, folder: Path, *, with_workers: bool = False, max_len: int = 512, **knobs: Any):
        model = make_tiny_model(folder / "served")
        config = override_config(Config(), {"model": str(model), "served_model_name": "tiny", **knobs})
        client = EngineClient()
        supervisor = EchoSupervisor(client, lambda settings: None, {}, SupervisorLimits(1, 1.0, 1e9, None, "same"))
        client.attach(EchoLink(client, max_len))  # type: ignore[arg-type]
        supervisor.states.move("started")
        self.lines: list[str] = []
        log = Log("error", stream=_Lines(self.lines))  # type: ignore[arg-type]
        setup = Setup.of(config, ModelFiles("folder", model, "tiny", None))
        tokenizer = Tokenizer.from_folder(model)
        pool = WorkerPool(setup, log.write) if with_workers else None
        self.work: TextWork = pool or InlineTextWork(TextTasks(setup, tokenizer))
        self.server = make_server(
            config, Fleet({"tiny": [Replica("0", client, supervisor)]}), tokenizer, log, setup, self.work
        )
        self.app = create_app(self.server, "test")

    async def post(self, path: str, body: bytes, method: str = "POST", headers: dict[str, str] | None = None,
                   reply_headers: dict[str, str] | None = None) -> tuple[int, bytes]:  # fmt: skip
        """Status and body of the reply; its headers go into `reply_headers`."""
        given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode("latin-1", "replace"), "query_string": b"", "scheme": "http", "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts = 0, []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if reply_headers is not None:
                    reply_headers.update({name.decode(): value.decode() for name, value in message["headers"]})
            else:
                parts.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return status, b"".join(parts)


class _Lines:
    def __init__(self, lines: list[str]):
        self._lines = lines

    def write(self, text: str) -> None:
        self._lines.append(text)

    def flush(self) -> None: ...
