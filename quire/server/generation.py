"""Runs generation jobs: admission, submission to the engine, and the stream of pieces of text.

Every route that generates calls `Generation.open` and reads the `GenerationRun` it returns, streaming or not; dialects
differ only in how they write the pieces. Closing a run early cancels it in the engine.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from quire.client.engine_client import DeltaStream, EngineClient
from quire.client.fleet import Fleet
from quire.config import ServerConfig
from quire.edge import Edge
from quire.server.chat import ChatPrompts
from quire.server.metrics import Metrics
from quire.server.sample import AnswerParser, Piece, PlainText, Sample
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, QuireError, Request, SamplingParams, Usage

MAX_RETRY_SECONDS = 600
MAX_LOGPROBS_SHOWN = 1 << 17  # per reply, alternatives included

GRAMMAR_CODES = frozenset({"invalid_schema", "grammar_too_complex", "no_allowed_token", "no_grammar"})


@dataclass(slots=True)
class GenerationJob:
    """One generation request of a dialect: prompts as token ids, sampling parameters, and the parser of the output."""

    prompts: list[list[int]]
    params: SamplingParams
    make_parser: Callable[[], AnswerParser] = PlainText
    timeout: float | None = None
    priority: int = 0
    salt: bytes = b""
    route: str = ""
    request_id: str = ""  # for logs
    grammar_param: str | None = None  # the client's field to name in errors about the grammar
    model: str | None = None  # the name that the client asked for, which may be an adapter's
    num_shown: int = 1  # how often the reply repeats each prompt's log-probabilities
    on_usage: Callable[[int], None] | None = None  # called with a sample's tokens, for the key's rate limit


@dataclass(slots=True)
class Totals:
    """Usage of a request over all samples. A prompt counts once, independent of its samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    queue_seconds: float | None = None  # queue time of the first sample to end
    first_token_seconds: float | None = None
    dropped_messages: int = 0  # left out of the prompt by truncation: auto


class Generation:
    """Submits generation jobs for all routes, within the bounds of the queue."""

    def __init__(self, fleet: Fleet, edge: Edge, prompts: ChatPrompts, config: ServerConfig, metrics: Metrics):
        self._prompts = prompts
        self._fleet = fleet
        self.edge = edge
        self._config = config
        self._metrics = metrics
        limits = fleet.lead.client.ready.limits
        self._max_open = int(limits["max_rows"]) + int(limits["max_waiting"])
        self._max_samples = min(config.max_samples, self._max_open)  # more samples could never be admitted
        self._max_waiting_tokens = int(limits["max_waiting_tokens"])

    async def open(self, job: GenerationJob) -> GenerationRun:
        """Submit a job. Raises before submission if it is invalid or there is no room for it."""
        self.check_samples(len(job.prompts), job.params.n)
        self._check_reply(job)
        if job.model is not None and job.model in self.edge.adapters:
            job.params = replace(job.params, adapter=job.model)
        job.params = await self._prompts.resolve(job.params)  # once, for all prompts and samples
        timeout = min(job.timeout or self._config.request_timeout, self._config.request_timeout)
        # The client's id makes the engine's logs and traces searchable; the suffix makes the name unique.
        name = f"{job.request_id or 'gen'}-{secrets.token_hex(4)}"
        groups: list[list[Request]] = []
        for place, tokens in enumerate(job.prompts):
            await asyncio.sleep(0)  # yield: copying each prompt's tokens for each sample takes time
            self.edge.check_prompt(tokens)
            requests = self.edge.requests(
                tokens, job.params, request_id=f"{name}.{place}", priority=job.priority, timeout=timeout, salt=job.salt
            )
            groups.append(requests)
        client = self._fleet.choose().client
        self._admit(client, groups)
        samples: dict[str, Sample] = {}
        for request in (request for requests in groups for request in requests):
            samples[request.id] = Sample(request, self.tokenizer, job.make_parser(), len(samples))
        return GenerationRun(client.submit(groups), samples, job, self._metrics)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.edge.tokenizer is None:
            raise QuireError("no_tokenizer", "This model has no tokenizer.")
        return self.edge.tokenizer

    def check_samples(self, num_prompts: int, n: int) -> None:
        """Refuse too many samples. Called before the prompts are tokenized, so that a refusal costs no time."""
        if n * num_prompts > self._max_samples:
            prompts = f"{num_prompts} prompts times " if num_prompts > 1 else ""
            what = f"{prompts}n={n} is more than the {self._max_samples} samples a request may have."
            raise QuireError("invalid_parameter", what, "Ask for fewer.", "n" if n > 1 else "prompt")

    def _check_reply(self, job: GenerationJob) -> None:
        """Refuse a reply with too many log-probabilities: a few kilobytes of prompt can request gigabytes of them."""
        params, count = job.params, 0
        if params.prompt_logprobs is not None:
            count += sum(map(len, job.prompts)) * (1 + params.prompt_logprobs) * job.num_shown
        if params.logprobs is not None and params.max_tokens is not None:
            room = sum(max(0, min(params.max_tokens, self.edge.max_len - len(prompt))) for prompt in job.prompts)
            count += room * params.n * (1 + params.logprobs)
        if count > MAX_LOGPROBS_SHOWN:
            what = f"The reply would hold {count} log-probabilities, {MAX_LOGPROBS_SHOWN} is the limit."
            hint = "Ask for fewer alternatives, samples or tokens, or send fewer prompts at a time."
            name = "prompt_logprobs" if params.prompt_logprobs is not None else "logprobs"
            raise QuireError("reply_too_large", what, hint, name)

    def _admit(self, client: EngineClient, groups: list[list[Request]]) -> None:
        """Apply the bounds of the engine's queue here, so that a refusal costs no round trip."""
        count = sum(map(len, groups))
        tokens = sum(requests[0].prompt_len * len(requests) for requests in groups)
        excess = len(client.live) + count - self._max_open
        if excess > 0 and not client.shed(groups[0][0].priority, excess):
            what = f"{len(client.live)} requests are open, and {self._max_open} is the limit."
            raise QuireError("queue_full", what, "Try again a little later.")
        if client.num_waiting_tokens and client.num_waiting_tokens + tokens > self._max_waiting_tokens:
            what = f"{client.num_waiting_tokens} prompt tokens wait already, {self._max_waiting_tokens} is the limit."
            raise QuireError("queue_full", what, "Try again a little later.")

    def retry_after(self) -> int:
        """Estimated seconds until the waiting requests have ended, at the recently measured throughput."""
        client = self._fleet.choose().client
        waiting = max(1, client.beat.waiting)
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(client.throughput.seconds_for(waiting))))


def _push(sample: Sample, delta: Delta) -> tuple[Piece | None, bool]:
    """Push a delta into its sample. Any exception while decoding becomes an error of this request only."""
    try:
        return sample.push(delta)
    except QuireError:
        raise
    except Exception as error:
        what = f"The text could not be made ({type(error).__name__}: {error})."
        raise QuireError("detokenize_failed", what, "Other requests were not affected.") from error


@dataclass(slots=True)
class GenerationRun:
    """A submitted job and its stream of pieces."""

    _ticket: DeltaStream
    _samples: dict[str, Sample]
    job: GenerationJob
    _metrics: Metrics
    totals: Totals = field(default_factory=Totals)
    started: float = field(default_factory=time.monotonic)
    _first_at: dict[str, float] = field(default_factory=dict)
    _ahead: list[Piece] = field(default_factory=list)
    _closed: bool = False

    @property
    def params(self) -> SamplingParams:
        """The effective parameters, with the model's defaults filled in."""
        return next(iter(self._samples.values())).request.params

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    @property
    def done(self) -> bool:
        return not self._ahead and all(sample.ended for sample in self._samples.values())

    async def next(self, patience: float | None = None) -> list[Piece]:
        """The next pieces, or none after `patience` seconds without a delta. Raises QuireError if the job failed, and
        `DeltaStreamClosed` once the run is closed."""
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            return ahead
        pieces: list[Piece] = []
        while not pieces and not self.done:
            deltas = await self._ticket.next(patience)
            for delta in deltas:
                sample = self._samples[delta.request_id]
                try:
                    piece, cancel = _push(sample, delta)
                except QuireError as error:
                    error.param = self.job.grammar_param if error.code in GRAMMAR_CODES else error.param
                    raise
                if cancel:
                    self._ticket.cancel(delta.request_id)
                if piece is not None:
                    self._count(delta.request_id, piece)
                    pieces.append(piece)
            if not deltas and patience is not None:
                break
        return pieces

    async def peek(self, patience: float) -> None:
        """Wait up to `patience` seconds for the first pieces, so that an early failure still gets its own HTTP
        status."""
        self._ahead = await self.next(patience)

    def close(self) -> None:
        """Cancel the samples that still run and count their usage so far. May be called twice."""
        self._ticket.close()
        if self._closed:
            return
        self._closed = True
        for name, sample in self._samples.items():
            if not sample.ended:
                self._add_usage(name, Usage(sample.request.prompt_len, 0, sample.num_tokens))

    def _count(self, name: str, piece: Piece) -> None:
        now = time.monotonic()
        if piece.token_ids and name not in self._first_at:
            self._first_at[name] = now
            if self.totals.first_token_seconds is None:
                self.totals.first_token_seconds = now - self._samples[name].request.arrival
            self._metrics.first_token(self.job.route, now - self._samples[name].request.arrival)
        if piece.end is not None:
            self._add_usage(name, piece.end.usage)
            if self.totals.queue_seconds is None:
                self.totals.queue_seconds = piece.end.timing.queue
            first = self._first_at.get(name)
            per_token = None
            if first is not None and piece.end.usage.completion_tokens > 1:
                per_token = (now - first) / (piece.end.usage.completion_tokens - 1)
            total = now - self._samples[name].request.arrival
            self._metrics.sample_ended(self.job.route, piece.end.usage, piece.end.timing, per_token, total)

    def _add_usage(self, name: str, usage: Usage) -> None:
        totals, first_of_prompt = self.totals, self._samples[name].request.sample_index == 0
        totals.completion_tokens += usage.completion_tokens
        totals.accepted_prediction_tokens += usage.accepted_prediction_tokens
        totals.rejected_prediction_tokens += usage.rejected_prediction_tokens
        if first_of_prompt:
            totals.prompt_tokens += usage.prompt_tokens
            totals.cached_tokens += usage.cached_tokens
        if self.job.on_usage is not None:
            self.job.on_usage(usage.completion_tokens + (usage.prompt_tokens if first_of_prompt else 0))
