"""The edge between front ends and engine: turns prompts into validated requests, and deltas into text.

All input from users is validated here, once; code behind the edge trusts its types. `Edge` builds requests, `Reply`
collects the deltas of the n samples of one prompt. This module imports neither torch nor the engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import countOf
from typing import Any

from quire.files.adapters import NamedAdapters
from quire.text.conversation import AssistantMessage, ChatRenderer, ChatTurn, make_conversation
from quire.text.delta_decoder import DeltaDecoder
from quire.text.prompts import encode_chat, encode_within, render_chat
from quire.text.resolve import prediction_too_long, resolve_params
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import (
    Delta,
    FinishReason,
    PromptTooLong,
    QuireError,
    Request,
    SamplingParams,
    Timing,
    TokenLogprobs,
    Usage,
)

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(slots=True)
class Output:
    """The result of one prompt. With n > 1 it is the first sample, and `samples` has all n."""

    request_id: str
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none
    embedding: list[float] | None = None  # the prompt's pooled hidden states, with `pooling`
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    error: str | None = None
    error_code: str | None = None
    samples: list[Output] = field(default_factory=list)
    message: AssistantMessage | None = None  # of `chat`: the text's content, reasoning and tool calls


@dataclass(slots=True)
class Chunk:
    """One increment of a stream: new text and token ids. The last chunk of a sample includes its whole output."""

    text: str
    token_ids: list[int]
    index: int = 0  # of the sample, below n
    finish_reason: str | None = None
    output: Output | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """Validates prompts and builds requests for one model."""

    tokenizer: Tokenizer | None
    template: Callable[[], ChatTemplate]
    vocab_size: int
    max_len: int  # maximum tokens of a sequence, by model and cache
    eos_ids: tuple[int, ...]
    defaults: dict[str, Any]  # sampling parameters that the model's files recommend
    clock: Callable[[], float] = time.monotonic
    special_in_content: bool = False  # spellings of control tokens in messages become control tokens
    tool_format: str | None = None  # None: read from the chat template
    adapters: NamedAdapters = field(default_factory=NamedAdapters)  # those that requests can name

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a text, of token ids or of messages, after a check of the model's limits."""
        if isinstance(prompt, str):
            tokens = encode_within(self._need_tokenizer(), prompt, self.max_len - 1)
        elif prompt and isinstance(prompt[0], dict):
            tokens = self.encode_chat(list(prompt))  # type: ignore[arg-type]
        else:
            tokens = self._check_ids(prompt)
        self.check_prompt(tokens)
        return tokens

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Requires at least one token of prompt, and room for one token of output."""
        if not tokens:
            raise QuireError("empty_prompt", "The prompt is empty.", "Give at least one token of text.", "prompt")
        if len(tokens) >= self.max_len:
            raise PromptTooLong(len(tokens), self.max_len - 1)

    def encode_chat(self, messages: list[Message], **template_kwargs: Any) -> list[int]:
        """Returns the token ids of a conversation, rendered with the chat template."""
        _refuse_pictures(messages)
        tokenizer = self._need_tokenizer()
        segments = render_chat(
            self.template(), tokenizer, messages, special_in_content=self.special_in_content, **template_kwargs
        )
        return encode_chat(tokenizer, segments, self.max_len - 1)

    def chat_turn(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
        parallel_tools: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> ChatTurn:
        """One conversation's prompt, and the grammar that its tools, its choice and `params.grammar` need. Without
        `parallel_tools` an enforced answer holds one call."""
        conversation = make_conversation(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tools=parallel_tools,
            output=params.grammar,
            template_kwargs=template_kwargs,
        )
        _refuse_pictures(conversation.messages)
        renderer = ChatRenderer.from_template(
            self._need_tokenizer(),
            self.template(),
            tool_format=self.tool_format,
            special_in_content=self.special_in_content,
        )
        return renderer.render(conversation, self.max_len - 1)

    def read_answer(self, turn: ChatTurn, output: Output, params: SamplingParams) -> Output:
        """`output` with the message of each sample's tokens."""
        params = params.resolve(self.defaults)
        stop_ids, tokenizer = self._stop_ids(params), self._need_tokenizer()
        for one in output.samples or [output]:
            cut = one.finish_reason != FinishReason.STOP.value
            one.message = turn.parse(one.token_ids, tokenizer, params, stop_ids=stop_ids, cut=cut)
        if output.samples:
            output.message = output.samples[0].message
        return output

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.eos_ids))

    def requests(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        salt: bytes = b"",
    ) -> list[Request]:
        """Returns the n requests of one prompt, validated and with all defaults filled in."""
        if self._knows_more:
            self._check_known(tokens)
        params = params.resolve(self.defaults)
        if self.tokenizer is not None:
            params = resolve_params(params, self.tokenizer)
            params = self._without_unknown(params) if self._knows_more else params
        elif params.stop or params.bad_words or params.dry_multiplier or params.prediction:
            what = "Stop strings, bad words, DRY and predictions need a tokenizer, which this model does not have."
            raise QuireError("no_tokenizer", what)
        if len(params.prediction_ids) > self.max_len:
            raise prediction_too_long(len(params.prediction_ids), self.max_len)
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [i for i, _ in params.logit_bias]),
            ("prediction_ids", params.prediction_ids),
        ):
            if any(not 0 <= i < self.vocab_size for i in ids):
                what = f"{name} names a token outside the vocabulary (0 to {self.vocab_size - 1})."
                raise QuireError("invalid_parameter", what, param=name)
        if timeout is not None and not timeout > 0:
            raise QuireError("invalid_parameter", f"timeout={timeout!r} must be above 0 seconds.", param="timeout")
        grammar = params.grammar
        if grammar is not None:
            params = replace(params, grammar=None)  # stored in the request, not in its parameters
        adapter = None
        if params.adapter is not None:
            adapter, params = self.adapters[params.adapter].digest, replace(params, adapter=None)
        name = request_id or f"req-{secrets.token_hex(8)}"
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        now = self.clock()
        left = self.max_len - len(tokens)
        max_tokens = left if params.max_tokens is None else min(params.max_tokens, left)
        stop_ids = self._stop_ids(params)
        return [
            Request(
                id=name if params.n == 1 else f"{name}/{index}",
                tokens=list(tokens),
                prompt_len=len(tokens),
                params=params.of_sample(index),
                max_len=len(tokens) + max_tokens,
                stop_ids=stop_ids,
                seed=seed,
                sample_index=index,
                priority=priority,
                arrival=now,
                deadline=None if timeout is None else now + timeout,
                salt=salt,
                adapter=adapter,
                grammar=grammar,
            )
            for index in range(params.n)
        ]

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise QuireError("no_tokenizer", "This model has no tokenizer.", "Send token ids instead of text.")
        return self.tokenizer

    @property
    def _knows_more(self) -> bool:
        """Whether the tokenizer has more tokens than the model's embedding."""
        return self.tokenizer is not None and self.tokenizer.vocab_size > self.vocab_size

    def _check_known(self, tokens: list[int]) -> None:
        unknown = next((token for token in tokens if token >= self.vocab_size), None)
        if unknown is not None:
            name = self._need_tokenizer().token_bytes(unknown).decode("utf-8", "replace")
            what = f"The prompt has the token {name!r} (id {unknown}), which the tokenizer has but this model has not."
            raise QuireError(
                "invalid_prompt", what, f"Leave it out; the model has token ids 0 to {self.vocab_size - 1}."
            )

    def _without_unknown(self, params: SamplingParams) -> SamplingParams:
        """Removes token ids that the model does not have, and can't sample, from bans, DRY breakers and predictions."""
        size = self.vocab_size
        return replace(
            params,
            bad_token_ids=tuple(ids for ids in params.bad_token_ids if max(ids, default=0) < size),
            dry_breaker_ids=tuple(token for token in params.dry_breaker_ids if token < size),
            prediction_ids=tuple(token for token in params.prediction_ids if token < size),
        )

    def _check_ids(self, prompt: Sequence[Any]) -> list[int]:
        are_ints = countOf(map(type, prompt), int) == len(prompt) > 0
        if are_ints and min(prompt) >= 0 and max(prompt) < self.vocab_size:
            return list(prompt)  # same result as below, but faster for long prompts
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                what = f"{token!r} is not a token id of this model (0 to {self.vocab_size - 1})."
                raise QuireError("invalid_prompt", what, "Send text, messages or token ids.", "prompt")
        return list(prompt)


class Reply:
    """Collects the deltas of one prompt's samples: `push` turns each into a chunk, `output` is the result."""

    def __init__(self, edge: Edge, requests: list[Request]):
        self._requests = list(requests)
        self._outputs = [Output(r.id, r.tokens[: r.prompt_len]) for r in requests]
        for output, request in zip(self._outputs, requests, strict=True):
            if request.params.prompt_logprobs is not None:
                output.prompt_logprobs = [None]
        self._decoders = [DeltaDecoder(edge.tokenizer, r.params, r.stop_ids) for r in requests]
        self.ids = [request.id for request in requests]
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._open = len(requests)
        self._drafts = [(0, 0)] * len(requests)  # accepted and rejected ones of each sample

    @property
    def done(self) -> bool:
        """Whether all samples have ended."""
        return self._open == 0

    @property
    def output(self) -> Output:
        """The first sample, with all samples in `samples` if there are several."""
        first = self._outputs[0]
        if len(self._outputs) > 1:
            scores = first.prompt_logprobs  # the samples share one prompt
            first.samples = [replace(one, samples=[], prompt_logprobs=scores) for one in self._outputs]
        return first

    def push(self, delta: Delta) -> tuple[Chunk | None, str | None]:
        """Returns the delta's chunk, and the id of the request to cancel if a stop string has ended its text."""
        index = self._places[delta.request_id]
        output = self._outputs[index]
        if output.finish_reason:
            return None, None  # its text has ended; the engine had not processed the cancel yet
        new = self._decoders[index].push(delta)
        output.token_ids += new.token_ids
        self._drafts[index] = (self._drafts[index][0] + delta.accepted, self._drafts[index][1] + delta.rejected)
        if new.logprobs is not None:
            output.logprobs = (output.logprobs or []) + new.logprobs
        if delta.prompt_logprobs is not None and output.prompt_logprobs is not None:
            output.prompt_logprobs += delta.prompt_logprobs
        if delta.embedding is not None:
            output.embedding = delta.embedding
        output.text += new.text
        if new.finish_reason is None:
            return Chunk(new.text, new.token_ids, index), None
        self._close(index, new.finish_reason, delta)
        chunk = Chunk(new.text, new.token_ids, index, new.finish_reason.value, output)
        return chunk, delta.request_id if new.cancel else None

    def _close(self, index: int, reason: FinishReason, delta: Delta) -> None:
        output, request = self._outputs[index], self._requests[index]
        output.finish_reason = reason.value
        output.error, output.error_code = delta.error, delta.error_code
        output.usage = delta.usage or Usage(request.prompt_len, request.cached_len, 0)
        output.usage.completion_tokens = len(output.token_ids)
        output.usage.accepted_prediction_tokens, output.usage.rejected_prediction_tokens = self._drafts[index]
        output.timing = delta.timing or Timing(
            queue=request.admitted_at - request.arrival, first_token=request.first_token_at - request.arrival
        )
        if delta.timing is None:
            output.timing.total = max(0.0, time.monotonic() - request.arrival)
        self._open -= 1


def _refuse_pictures(messages: list[Message]) -> None:
    """Refuses messages with parts other than text: a template might render a placeholder for an image, unread."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text":
                what = f"The model takes text only, and messages[{index}] has a part of type {kind!r}."
                raise QuireError("invalid_parameter", what, "Send text parts only.", param="messages")
