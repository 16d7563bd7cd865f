"""Replies of `/v1/completions`: raw text is continued. All samples of all prompts form one reply."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from quire.server.collector import SampleCollector, WholeSample, new_id
from quire.server.generation import GenerationRun
from quire.server.http.encoding import COMMENT
from quire.server.http.errors import bad_request
from quire.server.openai.chunks import ChunkWriter, usage_body
from quire.server.openai.logprobs import CompletionLogprobs, prompt_field
from quire.server.openai.schemas import CompletionBody
from quire.server.sample import Piece
from quire.text.channels.events import TextDelta
from quire.text.tokenizer import Tokenizer


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def check(body: CompletionBody) -> None:
    if body.suffix is not None and body.echo:
        raise bad_request("unsupported_parameter", "echo is of a text that is continued, and suffix inserts.", "echo")
    if body.suffix is not None and not isinstance(body.prompt, str):
        raise bad_request("invalid_value", "suffix needs a prompt that is one text.", "prompt")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("unsupported_parameter", "best_of must equal n; ask for n and choose.", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("invalid_value", "max_tokens=0 makes sense with echo only.", "max_tokens")
    if body.echo and body.stream and body.logprobs is not None:
        raise bad_request("unsupported_parameter", "echo with logprobs can't be streamed.", "stream")


class CompletionWhole:
    """The reply as one body."""

    def __init__(self, run: GenerationRun, model: str, tokenizer: Tokenizer, body: CompletionBody):
        self._run, self._model, self._tokenizer, self._body = run, model, tokenizer, body
        self._gather = SampleCollector(run.num_samples)
        self.take = self._gather.take

    async def body(self) -> dict[str, Any]:
        totals = self._run.totals
        if self._body.max_tokens == 0:
            totals.completion_tokens = 0  # the engine samples at least one token, which is not shown
        return {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [await self._choice(index, whole) for index, whole in enumerate(self._gather.samples)],
            "usage": usage_body(totals),
        }

    async def _choice(self, index: int, whole: WholeSample) -> dict[str, Any]:
        body, tokenizer = self._body, self._tokenizer
        only_prompt = body.max_tokens == 0
        skip_special = self._run.params.skip_special_tokens
        text = "" if only_prompt else whole.message.content
        n = self._run.job.params.n
        prompt, scores = self._run.job.prompts[index // n], self._gather.samples[index // n * n].prompt_logprobs
        if body.echo:
            text = tokenizer.decode(prompt, skip_special=skip_special) + text
        logprobs = None
        if body.logprobs is not None:
            tokens: list[Any] = [] if only_prompt else list(whole.logprobs)
            ids = [] if only_prompt else list(whole.token_ids)
            if body.echo:
                tokens, ids = [None, *scores, *tokens], [*prompt, *ids]
            num_prompt = len(prompt) if body.echo else 0
            logprobs = await CompletionLogprobs(tokenizer, skip_special).whole_body(tokens, ids, num_prompt)
        reason = "length" if only_prompt else whole.end.reason
        asked = body.prompt_logprobs is not None and index % n == 0  # once per prompt
        shown = await prompt_field(scores, tokenizer) if asked else {}
        if body.return_token_ids:
            shown |= {"prompt_token_ids": prompt, "token_ids": whole.token_ids}
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **shown}


class CompletionStream:
    """The reply as chunks."""

    keep_alive = COMMENT

    def __init__(self, run: GenerationRun, model: str, tokenizer: Tokenizer, body: CompletionBody):
        self._run, self._tokenizer, self._body = run, tokenizer, body
        head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": model}
        self._chunks = ChunkWriter(head, run, body.stream_options)
        self.finish, self.fail = self._chunks.finish, self._chunks.fail
        self._skip_special = run.params.skip_special_tokens
        self._told = [False] * run.num_samples  # whose prompt's ids were sent
        self._logprobs = [CompletionLogprobs(tokenizer, self._skip_special) for _ in range(run.num_samples)]

    def start(self) -> bytes:
        if not self._body.echo:
            return b""
        job = self._run.job
        return b"".join(
            self._chunk(index, self._tokenizer.decode(prompt, skip_special=self._skip_special), None, None)
            for index, prompt in ((index, job.prompts[index // job.params.n]) for index in range(self._run.num_samples))
        )

    def push(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(self._piece(piece) for piece in pieces)

    def _piece(self, piece: Piece) -> bytes:
        shows = self._body.max_tokens != 0
        self._chunks.usage.count(piece)
        text = "".join(event.text for event in piece.events if isinstance(event, TextDelta)) if shows else ""
        logprobs = None
        if self._body.logprobs is not None and piece.logprobs:
            logprobs = self._logprobs[piece.index].body(piece.logprobs, piece.token_ids)
        reason = piece.end.reason if piece.end is not None else None
        ids = piece.token_ids if self._body.return_token_ids else []
        if not text and logprobs is None and reason is None and not ids:
            return b""
        return self._chunk(piece.index, text, logprobs, reason if shows or reason is None else "length", ids)

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None, ids: Sequence[int] = ()) -> bytes:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if ids:
            choice["token_ids"] = ids
        if self._body.return_token_ids and not self._told[index]:
            self._told[index] = True
            choice["prompt_token_ids"] = self._run.job.prompts[index // self._run.job.params.n]
        return self._chunks.frame(choice)
