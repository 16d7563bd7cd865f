"""`LLM`: runs a model in this process, for scripts and notebooks. Outputs are in the order of the prompts.

It runs the engine's loop in the calling thread; several threads may share one LLM. Ctrl-C ends only the call that it
interrupts. `AsyncLLM` is the equivalent for programs with an event loop. Neither uses HTTP.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from quire.cache.explain import Explanation, explain, pin
from quire.config import Config
from quire.config_build import library_config
from quire.edge import Chunk, Edge, Output, Prompt, Reply
from quire.engine.host.driver import TRANSFER_SECONDS
from quire.engine.host.interrupts import HeldInterrupts
from quire.files.adapters import AdapterFiles, read_adapter
from quire.files.pooling import read_pooling
from quire.files.progress import Progress
from quire.llm_sessions import LLMSessions
from quire.startup.early_init import open_engine
from quire.types import QuireError, Request, SamplingParams, choose_pooling
from quire.types.control import ControlAction, ControlCommand
from quire.types.sessions import SessionCommand, SessionInfo

if TYPE_CHECKING:
    from quire.startup.assemble import Assembly

__all__ = ["LLM", "Chunk", "Output"]

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model with its engine. Thread-safe; use it as a context manager or call `close`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        progress: Progress | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **knobs: Any,
    ):
        """`model` and `knobs` are settings: LLM("smollm2", dtype="float32", max_model_len=2048). `adapters`: LoRA
        adapters by name, as PEFT folders or GGUF files; `SamplingParams(adapter=name)` chooses one."""
        self.config = library_config(model, config, knobs)
        self._parts: Assembly = open_engine(self.config, progress)
        self._engine = self._parts.engine
        self._lock = threading.RLock()
        self._replies: dict[str, _Open] = {}  # request id -> its reply
        self._num_ended = 0  # requests that have ended, seen by any thread
        self._unwanted: deque[str] = deque()  # ids of requests to cancel; appended without the lock
        self._is_torn = False  # a call left the engine in an undefined state, for example after an interrupt
        self._in_engine = False
        self._closed = False
        self.sessions = LLMSessions(self.edge, self._run_session, lambda: self._engine.scheduler.cache)
        try:
            for name, path in (adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    # -- public methods -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[Any],
        params: Params = None,
        *,
        progress: bool = False,
        priority: int = 0,
        timeout: float | None = None,
        salt: bytes = b"",
    ) -> list[Output]:
        """Completes one prompt or several: strings, lists of token ids, or conversations. Cached prefixes and outputs
        that drafts are made of are shared only between calls with one `salt`."""
        many = _as_list(prompts)
        each = _params_for(params, len(many))
        todo = deque(
            self._requests(self.edge.encode(prompt), p, priority, timeout, salt)
            for prompt, p in zip(many, each, strict=True)
        )
        replies = [Reply(self.edge, requests) for requests in todo]
        opened = [_Open(reply, keep=False) for reply in replies]
        waiting = deque(zip(opened, todo, strict=True))
        self._sweep()
        with _bar(len(many), progress) as advance, HeldInterrupts() as interrupts:
            try:
                unfinished, seen = opened, -1
                while unfinished:
                    self._submit(waiting)
                    self._turn()
                    interrupts.release()
                    if seen != self._num_ended:  # checked only after a request has ended, not at every step
                        seen = self._num_ended
                        _check_lost(opened)
                        unfinished = [o for o in unfinished if not o.reply.done]
                    if advance is not None:
                        advance(len(opened) - len(unfinished), sum(o.num_tokens for o in opened))
            finally:
                self._forget(opened)
        return [reply.output for reply in replies]

    def chat(
        self,
        messages: Sequence[Any],
        params: Params = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
        progress: bool = False,
        salt: bytes = b"",
        **template_kwargs: Any,
    ) -> list[Output]:
        """Answer one conversation (a list of messages) or several. `Output.message` has the answer's content, reasoning
        and tool calls. `tools` have OpenAI's form; `tool_choice` is "auto", "none", "required" or a tool's name, and a
        grammar enforces the last two. Other keyword arguments go to the chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        each = _params_for(params, len(conversations))
        turns = [
            self.edge.chat_turn(c, p, tools=tools, tool_choice=tool_choice, template_kwargs=template_kwargs)
            for c, p in zip(conversations, each, strict=True)
        ]
        bound = [replace(p, grammar=turn.grammar) for turn, p in zip(turns, each, strict=True)]
        outputs = self.generate([turn.tokens for turn in turns], bound, progress=progress, salt=salt)
        return [self.edge.read_answer(*one) for one in zip(turns, outputs, each, strict=True)]

    def embed(
        self,
        prompts: str | Sequence[Any],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Computes one vector per prompt, in `Output.embedding`.

        `pooling` is "mean" or "last". Its default is the setting `pooling`, then the rule in the model's files, then
        the normalised hidden state of the last token. The model's files also decide whether vectors are normalised.
        `generate` with `SamplingParams(pooling=…)` returns the vector without normalisation, beside the text.
        """
        rule = choose_pooling(read_pooling(self._parts.files), self.config.model.pooling, pooling, normalize)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=rule.kind)
        outputs = self.generate(prompts, params, progress=progress)
        for output in outputs:  # the engine samples one token after the prompt, which is not part of the result
            output.text, output.token_ids, output.usage.completion_tokens = "", [], 0
            output.embedding = rule.scaled(output.embedding) if output.embedding is not None else None
        return outputs

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, timeout: float | None = None
    ) -> Generator[Chunk, None, None]:
        """Yields text as it is generated. Closing the iterator cancels the request."""
        tokens = self.edge.encode(prompt)
        requests = self._requests(tokens, params or SamplingParams(), priority, timeout)
        opened = _Open(Reply(self.edge, requests))
        stream = self._stream(opened, requests)
        opened.stream = weakref.ref(stream)
        return stream

    def _stream(self, opened: _Open, requests: list[Request]) -> Generator[Chunk, None, None]:
        waiting = deque([(opened, requests)])
        self._sweep()
        try:
            while waiting or opened.chunks or not opened.reply.done:
                with HeldInterrupts():
                    self._submit(waiting)
                    if not opened.chunks and not opened.reply.done:
                        self._turn()
                while opened.chunks:
                    yield opened.chunks.popleft()
                _check_lost([opened])
        finally:
            self._forget([opened])

    def explain(self, prompt: Prompt) -> Explanation:
        """Returns how many tokens of a prompt are in the prefix cache, and where the prompt diverges from it."""
        tokens = self.edge.encode(prompt)
        with HeldInterrupts(), self._lock:
            self._enter()
            found = explain(self._engine.scheduler.cache, tokens)
            self._leave()
        return found

    def pin(self, prompt: Prompt, *, pinned: bool = True) -> int:
        """Pins the cached pages of a prompt, so that they are evicted last, or unpins them. Returns their tokens."""
        tokens = self.edge.encode(prompt)
        with HeldInterrupts(), self._lock:
            self._enter()
            num_tokens = pin(self._engine.scheduler.cache, tokens, pinned=pinned)
            self._leave()
        return num_tokens

    def _run_session(self, command: SessionCommand) -> SessionInfo | None:
        with HeldInterrupts() as interrupts, self._lock:
            self._engine.sessions.start(command)
            while True:
                for reply in self._engine.sessions.poll():
                    if reply.number == command.number:
                        return reply.result()
                self._turn()
                interrupts.release()

    def set_weights(self, model: str | Path, *, in_flight: str = "keep") -> dict[str, Any]:
        """Puts the weights of another folder or file in place of the present ones. `in_flight`: what open requests do
        with what they have computed: "keep", "recompute" or "end". Returns the version and the pause."""
        return self._control("weights", model=str(model), in_flight=in_flight)

    def set_precision(self, weights: str, *, max_loss: float = 0.5) -> dict[str, Any]:
        """Quantizes the weights of the running model anew: "auto" (as they are stored) or a value of the setting
        `quant`. `max_loss`: the loss on a fixed text, in nats per token, above which the old ones stay."""
        return self._control("precision", weights=weights, max_loss=max_loss)

    def sleep(self, *, cache: str = "keep") -> None:
        """Gives the memory of the weights back until `wake`, and with cache="drop" that of the KV cache."""
        self._control("sleep", cache=cache)

    def wake(self) -> None:
        self._control("wake")

    def _control(self, action: ControlAction, **fields: Any) -> dict[str, Any]:
        with HeldInterrupts() as interrupts, self._lock:
            self._engine.controls.start(ControlCommand(0, action, fields))
            while True:
                for reply in self._engine.controls.poll():
                    return reply.result()
                self._turn()
                interrupts.release()

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> str:
        """Loads a LoRA adapter; requests choose it by `SamplingParams(adapter=name)`. Returns its digest. `replace`:
        another adapter may have the name; its requests go on with it."""
        names = self.edge.adapters
        names.check_free(name, replaces=replace)
        files = read_adapter(path)
        self._engine.adapters.read(files)
        with HeldInterrupts(), self._lock:
            self._enter()
            self._engine.adapters.register(files.digest)
            before = names.put(name, files)
            self._drop_adapter(before)
            self._leave()
        return files.digest

    def unload_adapter(self, name: str) -> None:
        """Removes a LoRA adapter. Requests that use it go on to their end."""
        files = self.edge.adapters.remove(name)
        with HeldInterrupts(), self._lock:
            self._enter()
            self._drop_adapter(files)
            self._leave()

    def _drop_adapter(self, files: AdapterFiles | None) -> None:
        if files is not None and not self.edge.adapters.has_digest(files.digest):
            self._engine.adapters.remove(files.digest)

    @property
    def edge(self) -> Edge:
        return self._parts.edge

    @property
    def tokenizer(self) -> Any:
        return self._parts.edge.tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return self._parts.edge.max_len

    @property
    def memory(self) -> Any:
        return self._parts.memory

    @property
    def engine(self) -> Any:
        """The engine, for measurements and tests: statistics, scheduler, cache index."""
        return self._engine

    def prepare(self) -> None:
        """Compiles kernels and captures graphs now instead of at first use. Optional."""
        with self._lock, HeldInterrupts() as interrupts:
            while self._engine.run_warm_up():
                interrupts.release()
            gc.collect()
            gc.freeze()  # these objects stay, so later collections skip them

    def close(self) -> None:
        """Ends the engine and releases its memory."""
        if not self._closed:
            self._closed = True
            self._engine.close()
            gc.unfreeze()  # so that the engine's objects can be collected

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- running the loop -----------------------------------------------------------------------------------------

    def _requests(
        self, tokens: list[int], params: SamplingParams, priority: int, timeout: float | None, salt: bytes = b""
    ) -> list[Request]:
        requests = self.edge.requests(tokens, params, priority=priority, timeout=timeout, salt=salt)
        if params.grammar is not None:
            if self._parts.grammars is None:
                raise QuireError(
                    "no_tokenizer", "A grammar needs a tokenizer, which this model does not have.", param="grammar"
                )
            self._parts.grammars.compile_all(requests)
        return requests

    def _submit(self, waiting: deque[tuple[_Open, list[Request]]]) -> None:
        """Adds requests to the engine until its queue is full; the rest stay in `waiting`."""
        if not waiting:
            return
        if self._engine.is_held:
            raise QuireError("asleep", "The model sleeps.", "Call wake() first.")
        with self._lock:
            self._enter()
            try:
                while waiting:
                    opened, requests = waiting[0]
                    while requests:
                        self._engine.add(requests[0])
                        self._replies[requests[0].id] = opened
                        requests.pop(0)
                    waiting.popleft()
            except QuireError as error:  # refused without a change of state
                if error.code != "queue_full" or not self._engine.has_work:
                    self._leave()
                    raise
            self._leave()

    def _turn(self) -> None:
        with self._lock:
            self._enter()
            if self._engine.awaits_transfers or self._engine.awaits_session:
                self._engine.wait_for_transfer(TRANSFER_SECONDS)
            for delta in self._engine.turn():
                opened = self._replies.get(delta.request_id)
                if opened is None:
                    continue
                stop = opened.take(delta)
                if stop is not None:
                    self._engine.cancel(stop)
                if delta.finish_reason is not None:
                    del self._replies[delta.request_id]
                self._num_ended += stop is not None or delta.finish_reason is not None
            for fault in self._engine.scheduler.cache.take_faults():
                warnings.warn(fault.what, RuntimeWarning, stacklevel=2)  # once for each kind of failure
            self._leave()

    def _forget(self, opened: list[_Open]) -> None:
        """Cancels the requests of these replies that have not ended.

        The garbage collector may close an abandoned stream and call this inside a turn; the next turn then cancels it.
        """
        self._unwanted.extend([request_id for o in opened for request_id in o.reply.ids])
        with HeldInterrupts(), self._lock:
            if not self._in_engine:
                self._enter()
                self._leave()

    def _sweep(self) -> None:
        """Cancels the requests of streams whose cleanup was interrupted."""
        with self._lock:
            left = {id(o): o for o in self._replies.values() if o.is_left}
        if left:
            self._forget(list(left.values()))

    def _enter(self) -> None:
        """Begins a use of the engine; the caller holds the lock.

        If the last use did not end with `_leave`, the engine is rebuilt and its requests are marked as lost.
        """
        if self._is_torn:
            for request_id, opened in list(self._replies.items()):
                opened.is_lost = True
                del self._replies[request_id]
            self._num_ended += 1
            self._engine.rebuild()
        self._is_torn = self._in_engine = True
        while self._unwanted:
            request_id = self._unwanted[0]
            if self._replies.pop(request_id, None) is not None:
                self._engine.cancel(request_id)
            self._unwanted.popleft()

    def _leave(self) -> None:
        """Ends a use of the engine that has kept it consistent."""
        self._is_torn = self._in_engine = False


class _Open:
    """An open reply with its unread chunks. `keep`: whether chunks are kept for a stream."""

    def __init__(self, reply: Reply, keep: bool = True):
        self.reply = reply
        self._keep = keep
        self.chunks: deque[Chunk] = deque()
        self.num_tokens = 0
        self.is_lost = False  # the engine was rebuilt before the reply was complete
        self.stream: weakref.ref[Generator[Chunk, None, None]] | None = None  # the stream that reads it

    @property
    def is_left(self) -> bool:
        """Whether its stream has ended or was garbage collected."""
        stream = self.stream() if self.stream is not None else None
        ended = isinstance(stream, GeneratorType) and stream.gi_frame is None
        return self.stream is not None and (stream is None or ended)

    def take(self, delta: Any) -> str | None:
        """Adds a delta. Returns the id of a request to cancel, if a stop string ended its text."""
        chunk, stop = self.reply.push(delta)
        if chunk is not None:
            if self._keep:
                self.chunks.append(chunk)
            self.num_tokens += len(chunk.token_ids)
        return stop


def _check_lost(opened: Sequence[_Open]) -> None:
    if any(o.is_lost for o in opened):
        what = (
            "The request was lost: an interrupt or an error in another call left the engine in an inconsistent state."
        )
        raise QuireError("interrupted", what, "The engine has been rebuilt; send the request again.")


def _as_list(prompts: str | Sequence[Any]) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], (int, dict)):
        return [prompts]  # one prompt: token ids or a conversation
    return list(prompts)


def _params_for(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        what = f"{len(params)} sampling parameters were given for {count} prompts."
        raise QuireError("invalid_parameter", what, "Give one for all prompts, or one for each.", "params")
    return list(params)


class _bar:
    """A progress bar on stderr: prompts done, tokens so far."""

    def __init__(self, total: int, shown: bool):
        self._total, self._shown = total, shown

    def __enter__(self) -> Any:
        if not self._shown:
            return None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.start()
        task = self._bar.add_task("", total=self._total, tokens=0)
        return lambda done, tokens: self._bar.update(task, completed=done, tokens=tokens)

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            self._bar.stop()
