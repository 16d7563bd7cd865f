"""`LLM`: a model in this process, for scripts and notebooks. Prompts in, outputs out, in the same order.

It turns the engine's loop by hand in the calling thread; several threads may share one LLM. Ctrl-C ends what its caller
asked for and nothing else. `AsyncLLM` is the same for programs with an event loop. Neither knows about HTTP.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from quire.cache.explain import Explanation, explain, pin
from quire.config import Config
from quire.config_build import library_config
from quire.edge import Chunk, Edge, Output, Prompt, Reply
from quire.engine.host.interrupts import HeldInterrupts
from quire.files.pooling import read_pooling
from quire.files.progress import Progress
from quire.startup.early_init import open_engine
from quire.types import QuireError, Request, SamplingParams, choose_pooling

if TYPE_CHECKING:
    from quire.startup.assemble import Assembly

__all__ = ["LLM", "Chunk", "Output"]

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    def __init__(self, model: str | None = None, *, config: Config | None = None, progress: Progress | None = None,
                 **knobs: Any):  # fmt: skip
        """`model` and `knobs` are leaves of the config tree: LLM("smollm2", dtype="float32", max_model_len=2048)."""
        self.config = library_config(model, config, knobs)
        self._parts: Assembly = open_engine(self.config, progress)
        self._engine = self._parts.engine
        self._lock = threading.RLock()
        self._replies: dict[str, _Open] = {}  # request id -> where its news go
        self._num_ended = 0  # ends seen so far, by whichever thread turned the loop
        self._unwanted: deque[str] = deque()  # ids of requests to cancel; appended to at any moment, without the lock
        self._is_torn = False  # the engine was entered and not left in order: its books can't be relied on
        self._in_engine = False
        self._closed = False

    # -- what people call -----------------------------------------------------------------------------------------

    def generate(self, prompts: str | Sequence[Any], params: Params = None, *, progress: bool = False,
                 priority: int = 0, timeout: float | None = None) -> list[Output]:  # fmt: skip
        """Complete one prompt or many: strings, lists of token ids, or conversations."""
        many = _as_list(prompts)
        each = _params_for(params, len(many))
        todo = deque(
            self._requests(self.edge.encode(prompt), p, priority, timeout) for prompt, p in zip(many, each, strict=True)
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
                    if seen != self._num_ended:  # looked at only when somebody ended, not at every step
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
        outputs = self.generate([turn.tokens for turn in turns], bound, progress=progress)
        return [self.edge.read_answer(*one) for one in zip(turns, outputs, each, strict=True)]

    def embed(self, prompts: str | Sequence[Any], *, pooling: str | None = None, normalize: bool | None = None,
              progress: bool = False) -> list[Output]:  # fmt: skip
        """One vector for each prompt, in `Output.embedding`. `pooling` is "mean" or "last"; left out, it is what the
        model's own files or the setting `pooling` say, or else the last token's hidden state, normalised. A model's
        files also say whether vectors are normalised. `SamplingParams(pooling=…)` in `generate` gives the same vector
        as it is, beside the text."""
        rule = choose_pooling(read_pooling(self._parts.files), self.config.model.pooling, pooling, normalize)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=rule.kind)
        outputs = self.generate(prompts, params, progress=progress)
        for output in outputs:  # the one token that ends the prompt's last step is sampled all the same
            output.text, output.token_ids, output.usage.completion_tokens = "", [], 0
            output.embedding = rule.scaled(output.embedding) if output.embedding is not None else None
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0,
               timeout: float | None = None) -> Generator[Chunk, None, None]:  # fmt: skip
        """Text as it comes. Closing the iterator cancels the request."""
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
        """How much of a prompt would come from the prefix cache now, and where it leaves what is cached."""
        tokens = self.edge.encode(prompt)
        with HeldInterrupts(), self._lock:
            self._enter()
            found = explain(self._engine.scheduler.cache, tokens)
            self._leave()
        return found

    def pin(self, prompt: Prompt, *, pinned: bool = True) -> int:
        """Ask for what is cached of a prompt to be evicted last, or no longer. Returns how many tokens that is."""
        tokens = self.edge.encode(prompt)
        with HeldInterrupts(), self._lock:
            self._enter()
            num_tokens = pin(self._engine.scheduler.cache, tokens, pinned=pinned)
            self._leave()
        return num_tokens

    @property
    def edge(self) -> Edge:
        return self._parts.edge

    @property
    def tokenizer(self) -> Any:
        return self._parts.edge.tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self._parts.edge.max_len

    @property
    def memory(self) -> Any:
        return self._parts.memory

    @property
    def engine(self) -> Any:
        """For measurements and tests: statistics, the scheduler, the cache index."""
        return self._engine

    def prepare(self) -> None:
        """Compile kernels and capture graphs now, so that nothing is left to do while requests run. Optional: what is
        not prepared is done when it is first needed."""
        with self._lock, HeldInterrupts() as interrupts:
            while self._engine.do_chore():
                interrupts.release()
            gc.collect()
            gc.freeze()  # what is there now stays: no later collection, in the midst of a step, need walk over it

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.close()
            gc.unfreeze()  # what was frozen for it may go with it

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- turning the loop -----------------------------------------------------------------------------------------

    def _requests(
        self, tokens: list[int], params: SamplingParams, priority: int, timeout: float | None
    ) -> list[Request]:
        requests = self.edge.requests(tokens, params, priority=priority, timeout=timeout)
        if params.grammar is not None:
            if self._parts.desk is None:
                raise QuireError("no_tokenizer", "A grammar needs a tokenizer, this model has none.", param="grammar")
            self._parts.desk.settle(requests)
        return requests

    def _submit(self, waiting: deque[tuple[_Open, list[Request]]]) -> None:
        """Hand over as many as the queue takes; the rest wait here."""
        if not waiting:
            return
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
            except QuireError as error:  # refused, and nothing has changed
                if error.code != "queue_full" or not self._engine.has_work:
                    self._leave()
                    raise
            self._leave()

    def _turn(self) -> None:
        with self._lock:
            self._enter()
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
            self._leave()

    def _forget(self, opened: list[_Open]) -> None:
        """Whatever is not done by now is not wanted any more. A stream that nobody holds may be collected, and come
        here, in the middle of a turn: then the next one cancels it."""
        self._unwanted.extend([request_id for o in opened for request_id in o.reply.ids])
        with HeldInterrupts(), self._lock:
            if not self._in_engine:
                self._enter()
                self._leave()

    def _sweep(self) -> None:
        """Forget streams that ended without doing so: an interrupt hit them while they did."""
        with self._lock:
            left = {id(o): o for o in self._replies.values() if o.is_left}
        if left:
            self._forget(list(left.values()))

    def _enter(self) -> None:
        """Before anything is done with the engine, with the lock held. What was not left in order, whatever ended it,
        is built anew; callers whose requests were lost with it are told."""
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
        self._is_torn = self._in_engine = False


class _Open:
    """A reply under way, with the news nobody has read yet, unless nobody will."""

    def __init__(self, reply: Reply, keep: bool = True):
        self.reply = reply
        self._keep = keep
        self.chunks: deque[Chunk] = deque()
        self.num_tokens = 0
        self.is_lost = False  # the engine was built anew before it was done
        self.stream: weakref.ref[Generator[Chunk, None, None]] | None = None  # who reads it

    @property
    def is_left(self) -> bool:
        """Its stream is gone, or has ended."""
        stream = self.stream() if self.stream is not None else None
        ended = isinstance(stream, GeneratorType) and stream.gi_frame is None
        return self.stream is not None and (stream is None or ended)

    def take(self, delta: Any) -> str | None:
        chunk, stop = self.reply.push(delta)
        if chunk is not None:
            if self._keep:
                self.chunks.append(chunk)
            self.num_tokens += len(chunk.token_ids)
        return stop


def _check_lost(opened: Sequence[_Open]) -> None:
    if any(o.is_lost for o in opened):
        what = "The request was lost: an interrupt or an error in another call left the engine's books unusable."
        raise QuireError("interrupted", what, "The engine works again; ask once more.")


def _as_list(prompts: str | Sequence[Any]) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], (int, dict)):
        return [prompts]  # one prompt as token ids, or one conversation
    return list(prompts)


def _params_for(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        what = f"{len(params)} sampling parameters were given for {count} prompts."
        raise QuireError("invalid_parameter", what, "Give one for all, or one for each.", "params")
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

        columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"),
                   TimeElapsedColumn())  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.start()
        task = self._bar.add_task("", total=self._total, tokens=0)
        return lambda done, tokens: self._bar.update(task, completed=done, tokens=tokens)

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            self._bar.stop()
