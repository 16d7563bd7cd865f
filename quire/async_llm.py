"""`AsyncLLM`: the equivalent of `LLM` for programs with an event loop. The engine runs in a thread of its own.

Any task or thread may submit requests. Cancelling the awaiting task or closing a stream cancels the request.
Tokenization runs in worker threads; no method blocks the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.config import Config
from quire.config_build import library_config
from quire.edge import Chunk, Edge, Output, Prompt, Reply
from quire.engine.host.thread import EngineThread
from quire.startup.early_init import open_engine
from quire.types import Delta, QuireError, Request, SamplingParams


class AsyncLLM:
    """A loaded model with its engine thread. `model`, `adapters` and `knobs` are those of `LLM`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **knobs: Any,
    ):
        self.config = library_config(model, config, knobs)
        self._parts = open_engine(self.config)
        for name, path in (adapters or {}).items():
            self._parts.engine.adapters.load(self.edge.adapters, name, path)
        self._sinks: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Delta]]] = {}
        self._thread = EngineThread(self._parts.engine, self._deliver, self._parts.grammars)

    @property
    def edge(self) -> Edge:
        return self._parts.edge

    @property
    def tokenizer(self) -> Any:
        return self._parts.edge.tokenizer

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Output:
        """Completes one prompt. Options: priority, timeout, request_id, salt."""
        output: Output | None = None
        async for chunk in self.stream(prompt, params, **options):
            if chunk.output is not None and (output is None or chunk.index == 0):
                output = chunk.output  # samples end in any order; the first one includes all
        assert output is not None
        return output

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
        template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Output:
        """Answer one conversation, as `LLM.chat` does. Options: those of `generate`."""
        params = params or SamplingParams()
        make = partial(self.edge.chat_turn, tools=tools, tool_choice=tool_choice, template_kwargs=template_kwargs)
        turn = await asyncio.to_thread(make, messages, params)
        output = await self.generate(turn.tokens, replace(params, grammar=turn.grammar), **options)
        return await asyncio.to_thread(self.edge.read_answer, turn, output, params)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Chunk]:
        """Yields the chunks of all n samples as they are generated. Leaving the loop early cancels the request."""
        tokens = await asyncio.to_thread(self.edge.encode, prompt)
        requests = self.edge.requests(tokens, params or SamplingParams(), **options)
        reply = Reply(self.edge, requests)
        deltas_queue: asyncio.Queue[Delta] = asyncio.Queue()
        try:
            self._submit(requests, deltas_queue)
            while not reply.done:
                chunk, stop = reply.push(await deltas_queue.get())
                if stop is not None:
                    self._thread.cancel(stop)
                if reply.done:
                    _ = reply.output  # adds the other samples to the first one
                if chunk is not None:
                    yield chunk
        finally:
            for request in requests:
                if self._sinks.pop(request.id, None) is not None:
                    self._thread.cancel(request.id)

    def _submit(self, requests: list[Request], deltas_queue: asyncio.Queue[Delta]) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            if request.id in self._sinks:
                raise QuireError("duplicate_id", f"A request with id {request.id!r} is already running.")
        for request in requests:
            self._sinks[request.id] = (loop, deltas_queue)
            self._thread.submit(request)

    def _deliver(self, deltas: list[Delta]) -> None:
        """Passes deltas to their event loops. Runs in the engine's thread."""
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is None:
                continue
            if delta.finish_reason is not None:
                self._sinks.pop(delta.request_id, None)
            loop, deltas_queue = sink
            try:
                loop.call_soon_threadsafe(deltas_queue.put_nowait, delta)
            except RuntimeError:  # the loop was closed before its tasks ended, by an interrupt for example
                if self._sinks.pop(delta.request_id, None) is not None:
                    self._thread.cancel(delta.request_id)

    async def close(self) -> None:
        """Ends the engine and releases its memory."""
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
