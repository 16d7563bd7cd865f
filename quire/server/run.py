"""Starts and stops a server: socket, engine process, application, uvicorn, signals. `quire serve` calls `serve`.

The first SIGTERM (or Ctrl-C) drains: the server is not ready, refuses new requests, finishes open ones and stops. The
second stops at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.client.engine_client import EngineClient
from quire.client.fleet import Fleet, Replica
from quire.client.supervisor import Supervisor, SupervisorLimits, link_starter
from quire.config import Config, ServerConfig
from quire.config_build import engine_settings
from quire.edge import Edge
from quire.files.adapters import NamedAdapters, parse_adapters, read_adapter
from quire.files.source import ModelFiles
from quire.server.app import create_app
from quire.server.chat import ChatPrompts
from quire.server.generation import Generation
from quire.server.http.bodies import HeldBodies
from quire.server.http.connection import ServerConnection
from quire.server.http.errors import ApiError
from quire.server.http.keys import KeyRing, RateLimits
from quire.server.http.loop_delay import LoopDelay
from quire.server.http.open_connections import OpenConnections, allow_files
from quire.server.logs import LibraryLines, Log
from quire.server.metrics import Metrics
from quire.server.state import Server
from quire.server.store import ResponseStore
from quire.server.streams.kept_streams import KeptStreams
from quire.server.textwork.pool import TextWork, WorkerPool
from quire.server.textwork.tasks import Setup
from quire.server.tracing.exporter import SpanExporter
from quire.text.loading import lazy_template, load_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError

BACKLOG = 2048


async def serve(
    config: Config,
    files: ModelFiles,
    engine_command: Sequence[str],
    on_ready: Callable[[str], None],
    version: str,
    load: Callable[[ModelFiles], Tokenizer | None] = load_tokenizer,
) -> int:
    """Run until a signal stops the server and return the exit code. `on_ready` gets the URL once requests are
    accepted."""
    log = Log(config.server.log_level, config.server.log_form)
    phases = PhaseTimes()
    listener = listen(config.server)
    setup = Setup.of(config, files)
    work = WorkerPool(setup, log.write)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)  # nothing to drain while the model loads
    try:
        tokenizer = await asyncio.to_thread(load, files)
        phases.end("tokenizer")
        if tokenizer is None:
            raise QuireError("no_tokenizer", "The model has no tokenizer, so it can't be served.", "Add its files.")
        start_link = link_starter(engine_command, config.server.start_timeout)
        client = EngineClient()
        supervisor = Supervisor(client, start_link, engine_settings(config), SupervisorLimits.of(config), log=log.write)
        names = served_names(config)
        adapters = supervisor.adapters = NamedAdapters(names)
        for name, path in parse_adapters(config.adapters.adapter).items():
            adapters.check_free(name)
            adapters.put(name, await asyncio.to_thread(read_adapter, path))
        fleet = Fleet({names[0]: [Replica("0", client, supervisor)]})
        starting = asyncio.create_task(work.start())
        await fleet.start()
        phases.end("engine")
        await starting
        phases.end("text_workers")
    except BaseException as error:
        listener.close()
        await work.close()
        if isinstance(error, asyncio.CancelledError) and task.uncancel() == 0:
            return 128 + signal.SIGTERM
        raise
    server = None
    try:
        server = make_server(config, fleet, tokenizer, log, setup, work)
        log.write("info", "formats", found="; ".join(server.chat.format_notes) or "the model has no chat template")
        if config.server.otel_endpoint is not None:
            server.spans = SpanExporter(config.server.otel_endpoint, version, log.write)
        app = create_app(server, version)
        phases.end("application")
        server.start_seconds = phases.seconds()
        log.write("info", "started", **server.start_seconds)
        return await _run(server, listener, app, on_ready)
    finally:
        listener.close()
        if config.server.uds is not None:
            Path(config.server.uds).unlink(missing_ok=True)
        await work.close()
        await fleet.stop(at_once=server is None or server.at_once)


class PhaseTimes:
    """The durations of the phases of a start, one after the other."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = self._last = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self._seconds[name], self._last = now - self._last, now

    def seconds(self) -> dict[str, float]:
        rounded = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return {**rounded, "total": round(self._last - self._started, 3)}


def make_server(config: Config, fleet: Fleet, tokenizer: Tokenizer, log: Log, setup: Setup, work: TextWork) -> Server:
    ready, settings = fleet.lead.client.ready, config.server
    edge = Edge(
        tokenizer=tokenizer,
        template=lazy_template(tokenizer, config.model.chat_template),
        vocab_size=ready.vocab_size,
        max_len=ready.max_len,
        eos_ids=tuple(ready.eos_ids),
        defaults=ready.defaults,
        special_in_content=config.model.special_in_content,
        adapters=fleet.lead.supervisor.adapters,
    )
    chat = ChatPrompts(edge, setup, work)
    metrics = Metrics()
    metrics.watch(fleet, served_names(config)[0] if settings.metric_names == "vllm" else None)
    return Server(
        config=config,
        fleet=fleet,
        edge=edge,
        metrics=metrics,
        generation=Generation(fleet, edge, chat, settings, metrics),
        chat=chat,
        held=HeldBodies(),
        files=setup.files,
        store=ResponseStore(settings.response_store, settings.max_stored, settings.max_stored_bytes),
        names=served_names(config),
        keys=KeyRing(settings.api_key),
        admin_keys=KeyRing(settings.admin_key),
        rates=RateLimits(settings.rate_requests, settings.rate_tokens),
        log=log,
        streams=KeptStreams(settings.resume_seconds),
        created=int(time.time()),
    )


def served_names(config: Config) -> list[str]:
    if config.server.served_model_name is not None:
        names = [name.strip() for name in config.server.served_model_name.split(",")]
        return [name for name in names if name] or ["model"]
    name = config.model.model
    return [Path(name).resolve().name if Path(name).exists() else name]


def listen(settings: ServerConfig) -> socket.socket:
    """The listening socket that the settings ask for."""
    tls_context(settings)  # a certificate that can't be read is said before the model is loaded
    if settings.uds is not None:
        return bind_unix(settings.uds)
    return bind(settings.host, settings.port, settings.send_timeout)


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket that only this user can reach. A stale socket, without a listener, is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                    other.connect(path)
                raise OSError("another server listens on it")
            except ConnectionRefusedError:
                Path(path).unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        what = f"Can't listen on {path}: {error.strerror or error}."
        raise QuireError("address_in_use", what, "Choose another --uds.", "uds") from None


def tls_context(settings: ServerConfig) -> ssl.SSLContext | None:
    """The server's certificate; None without one."""
    if settings.tls_cert is None:
        if settings.tls_key is not None:
            raise QuireError("invalid_setting", "--tls-key needs --tls-cert.", param="tls_key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        what = f"The certificate {settings.tls_cert} can't be used: {error}."
        raise QuireError("invalid_setting", what, "Give PEM files that belong together.", "tls_cert") from None
    return context


def address_of(listener: socket.socket, *, secure: bool) -> str:
    """The URL of a listening socket."""
    scheme = "https" if secure else "http"
    if listener.family == getattr(socket, "AF_UNIX", None):
        return f"{scheme}+unix://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def bind(host: str, port: int, send_timeout: float = 0.0) -> socket.socket:
    """A listening socket. It listens before the model is loaded, because two servers can bind one port while neither
    listens; clients that connect meanwhile wait. The kernel drops a connection whose client acknowledges nothing for
    `send_timeout` seconds, with its unsent data."""
    listener = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT") and send_timeout:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_timeout * 1000))
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        what = f"Can't listen on {host} port {port}: {error.strerror or error}."
        raise QuireError("address_in_use", what, "Choose another --host or --port.", "port") from None


async def _run(server: Server, listener: socket.socket, app: ASGIApp, on_ready: Callable[[str], None]) -> int:
    http = _Http(
        uvicorn.Config(
            app,
            loop="none",
            http=connection_factory(server),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
        )
    )
    http.config.load()
    http.config.ssl = tls_context(server.config.server)
    library = logging.getLogger("uvicorn.error")
    library.propagate = False
    library.addHandler(LibraryLines(server.log))
    library.setLevel(logging.WARNING)
    stopper = _Stopper(server, http)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopper.signalled)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    while not http.started and not serving.done():
        await asyncio.sleep(0.01)
    if http.started:
        if server.batches is not None:
            server.batches.start()
        gc.collect()
        gc.freeze()  # else a full collection visits every imported object, which delays all streams by 50 ms
        on_ready(address_of(listener, secure=http.config.ssl is not None))
    delay = LoopDelay(loop, server.metrics.loop_delayed)
    delay.start()
    await serving
    delay.stop()
    if server.batches is not None:
        await server.batches.stop()
    await server.store.close()
    if server.spans is not None:
        await asyncio.to_thread(server.spans.close)
    return 0


def connection_factory(server: Server) -> Any:
    """The protocol factory that uvicorn calls for each connection."""

    def report(request_id: str, error: ApiError) -> None:
        server.metrics.failed("other", error.code)
        server.log.write("info", "reply", id=request_id, status=error.status, outcome=error.code)

    wanted = server.config.server.max_connections
    allowed = allow_files(wanted)
    if allowed < wanted:
        server.log.write("warning", "fewer connections", allowed=allowed, max_connections=wanted, why="open files")
    return partial(ServerConnection, others=OpenConnections(allowed, report=report))


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: it would stop listening at the first signal, and probes could not see the
    server drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stopper:
    def __init__(self, server: Server, http: _Http):
        self._server, self._http, self._log = server, http, server.log
        self._draining: asyncio.Task[None] | None = None

    def signalled(self) -> None:
        if self._draining is None:
            self._server.draining = True
            self._draining = asyncio.create_task(self._drain())
            return
        self._log.write("warning", "stop at once", open=self._server.open_replies)
        self._draining.cancel()
        self._server.at_once = True
        self._http.force_exit = self._http.should_exit = True

    async def _drain(self) -> None:
        server, patience = self._server, self._server.config.server.drain_timeout
        self._log.write("info", "draining", open=server.open_replies, seconds=patience)
        if server.open_replies:
            try:
                await asyncio.wait_for(server.idle.wait(), patience)
            except TimeoutError:
                self._log.write("warning", "drain timed out", open=server.open_replies)
                self._http.force_exit = True
        self._http.should_exit = True
