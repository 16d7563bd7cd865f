"""The HTTP process's side of the engine: submits requests and delivers their deltas, across engine processes.

Everything runs on one event loop. The client keeps every live request with its prompt and the tokens delivered so far,
which is all that is needed to resume it. The supervisor attaches the link to an engine that is ready and detaches it
when the engine is lost; the next link resumes every live request from its delivered tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quire.client.link import EngineLink
from quire.client.throughput import ThroughputEstimate
from quire.engine.host import wire
from quire.types import Delta, FinishReason, QuireError, Request, Timing, Usage

MAX_UNSENT = 10_000  # frames waiting because the engine does not read; above it new requests are refused
MAX_LOSSES = 2  # engine losses at the same token of a request, the last with it alone in the step
OVERDUE_SECONDS = 5.0  # time after its deadline at which the client ends a request that the engine did not end


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended: what another engine needs to resume it, and the stream of its deltas."""

    request: Request
    stream: DeltaStream
    delivered: list[int] = field(default_factory=list)
    prompt_scored: int = 0  # number of prompt logprobs delivered
    first_token_at: float = 0.0
    cancelled: bool = False
    num_engines: int = 0  # number of engines it was submitted to
    num_losses: int = 0  # consecutive engine losses with it in a step and no token between
    loss_len: int = -1  # tokens delivered at the last such loss

    @property
    def is_suspect(self) -> bool:
        return self.num_losses > 0 and self.loss_len == len(self.delivered)


class DeltaStreamClosed(Exception):
    """Raised in a pending `DeltaStream.next` when the stream is closed."""


class DeltaStream:
    """The deltas of one submission in order of arrival. `close` cancels its open requests."""

    def __init__(self, client: EngineClient, ids: Sequence[str]):
        self._client = client
        self._open = set(ids)
        self._deltas: list[Delta] = []
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        return not self._open and not self._deltas

    async def next(self, timeout: float | None = None) -> list[Delta]:
        """Return all deltas since the last call, and wait for at least one. Empty after `timeout` seconds and when
        all requests have ended. Raises `DeltaStreamClosed` once the stream is closed."""
        if self._closed:
            raise DeltaStreamClosed
        if not self._deltas and self._open:
            loop = asyncio.get_running_loop()
            self._wake = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, self._wake_up)
            try:
                await self._wake
            finally:
                self._wake = None
                if timer is not None:
                    timer.cancel()
            if self._closed:
                raise DeltaStreamClosed
        deltas, self._deltas = self._deltas, []
        return deltas

    def cancel(self, request_id: str) -> None:
        """Cancel one sample; its last delta, with the usage, is still delivered."""
        if request_id in self._open:
            self._client.cancel([request_id])

    def close(self) -> None:
        """Cancel and forget the open requests. May be called at any time, and twice."""
        if self._open:
            self._client.forget(list(self._open))
            self._open.clear()
        self._closed = True
        self._deltas.clear()
        self._wake_up()

    def put(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._open.discard(delta.request_id)
        self._deltas.append(delta)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class EngineClient:
    """`ready` describes the current or last engine, once one was attached; `beat` is its last heartbeat."""

    ready: wire.EngineReady

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._link: EngineLink | None = None
        self.beat = wire.Beat()
        self.failure: QuireError | None = None  # the final error: no engine will be attached any more
        self.live: dict[str, LiveRequest] = {}
        self.num_waiting_tokens = 0  # prompt tokens of live requests without a delivered token
        self.throughput = ThroughputEstimate()
        self.num_resumed = 0  # requests resumed by another engine
        self._beat_at = self._progress_at = clock()
        # Called when a request ends with an error.
        self.on_error: Callable[[str, str, str], None] = lambda request_id, code, what: None

    # -- attaching engines ----------------------------------------------------------------------------------------

    def attach(self, link: EngineLink) -> None:
        """Attach an engine that is ready and submit every live request to it, oldest first."""
        self._link, self.ready = link, link.ready
        self._beat_at = self._progress_at = self._clock()
        self.beat = wire.Beat()
        for live in sorted(self.live.values(), key=lambda live: live.request.arrival):
            link.send(wire.submit_message([self._resumable(live)]))
            self.num_resumed += live.num_engines > 0
            live.num_engines += 1

    def detach(self, suspects: set[str]) -> list[str]:
        """Detach a lost engine. `suspects`: the requests in its last steps, if one of them may be the reason.

        Returns the ids of requests that are quarantined: they end with an error and are not tried again.
        """
        self._link = None
        quarantined = []
        for name, live in list(self.live.items()):
            if live.cancelled:
                self._end(name, FinishReason.CANCELLED)
            elif name in suspects:
                live.num_losses = live.num_losses + 1 if live.loss_len == len(live.delivered) else 1
                live.loss_len = len(live.delivered)
                if live.num_losses >= MAX_LOSSES and len(suspects) == 1:
                    what = f"The engine was lost {live.num_losses} times while it computed this request."
                    error = QuireError("quarantined", what, "It is not tried again; please report it.")
                    self._end(name, FinishReason.ERROR, error)
                    quarantined.append(name)
        return quarantined

    def fail(self, error: QuireError) -> None:
        """End all live requests with `error`, and refuse later ones with it, because no engine will be attached."""
        self.failure = self.failure or error
        self._link = None
        for name in list(self.live):
            self._end(name, FinishReason.ERROR, error)

    def expire(self) -> None:
        """End requests past their deadline that the engine did not end, because it is lost or hangs."""
        overdue = self._clock() - (OVERDUE_SECONDS if self._link is not None else 0.0)
        for name, live in list(self.live.items()):
            if live.request.deadline is not None and live.request.deadline < overdue:
                if self._link is not None:
                    self._link.send(wire.CancelMany([name]))
                self._end(name, FinishReason.DEADLINE)

    def take(self, message: wire.Deltas | wire.Beat) -> None:
        """Handle a message of the engine: deltas of requests, or a beat."""
        if isinstance(message, wire.Beat):
            self._handle_beat(message)
            return
        for delta in message.deltas:
            self._deliver(delta)

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, prompts: Sequence[Sequence[Request]]) -> DeltaStream:
        """Submit for each prompt its requests, which differ in id and sample index only. Accepts all or raises.

        Without an engine they wait for the next one.
        """
        if self.failure is not None:
            raise self.failure
        if self._link is not None and self._link.num_unsent > MAX_UNSENT:
            what = f"The engine does not read requests fast enough: more than {MAX_UNSENT} messages wait for it."
            raise QuireError("queue_full", what, "Try again later.")
        requests = [request for samples in prompts for request in samples]
        for request in requests:
            if request.id in self.live:
                raise QuireError("duplicate_id", f"A request with id {request.id!r} is already running.")
        payloads = [wire.encode(wire.submit_message(samples)) for samples in prompts]
        stream = DeltaStream(self, [request.id for request in requests])
        for request in requests:
            self.live[request.id] = LiveRequest(request, stream, num_engines=int(self._link is not None))
            self.num_waiting_tokens += request.prompt_len
        if self._link is not None:
            for payload in payloads:
                self._link.send_payload(payload)
        return stream

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel requests; their last deltas are still delivered."""
        open_ids = [name for name in ids if name in self.live]
        for name in open_ids:
            self.live[name].cancelled = True
        if self._link is not None:
            if open_ids:
                self._link.send(wire.CancelMany(open_ids))
            return
        for name in open_ids:
            self._end(name, FinishReason.CANCELLED)

    def forget(self, ids: Sequence[str]) -> None:
        """Cancel requests and drop their remaining deltas."""
        self.cancel(ids)
        for name in ids:
            self._drop(name)

    def shed(self, priority: int, num_requests: int) -> bool:
        """Make room for `num_requests` requests of this priority: end as many of lower priority that have no token
        yet with `queue_full`, lowest priority and newest first. Returns False and ends none if there are fewer."""
        waiting = [live for live in self.live.values() if not live.delivered and live.request.priority > priority]
        if len(waiting) < num_requests:
            return False
        waiting.sort(key=lambda live: (live.request.priority, live.request.arrival))
        what = "The queue is full, and a request of higher priority replaced this one."
        for live in waiting[len(waiting) - num_requests :]:
            name = live.request.id
            if self._link is not None:
                self._link.send(wire.CancelMany([name]))
            self._end(name, FinishReason.ERROR, QuireError("queue_full", what, "Try again a little later."))
        return True

    # -- health ---------------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        return self._link is not None

    @property
    def num_suspects(self) -> int:
        """Requests that were in a step of a lost engine and have delivered no token since."""
        return sum(live.is_suspect for live in self.live.values())

    @property
    def longest(self) -> int:
        """The largest `max_len` of the live requests."""
        return max((live.request.max_len for live in self.live.values()), default=0)

    @property
    def pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    def beat_age(self) -> float:
        """Seconds since the engine's last beat; 0 without an engine."""
        return self._clock() - self._beat_at if self._link is not None else 0.0

    def progress_age(self) -> float:
        """Seconds without a computed token while requests are live; 0 without requests or engine."""
        return self._clock() - self._progress_at if self.live and self._link is not None else 0.0

    # -- internal -------------------------------------------------------------------------------------------------

    def _resumable(self, live: LiveRequest) -> Request:
        request = live.request
        return replace(
            request,
            tokens=request.tokens[: request.prompt_len] + live.delivered,
            prompt_scored=live.prompt_scored,
            resumed=live.num_engines > 0,
            suspect=live.is_suspect,
        )

    def _deliver(self, delta: Delta) -> None:
        live = self.live.get(delta.request_id)
        if live is None:
            return  # the request was dropped
        if delta.prompt_logprobs:
            live.prompt_scored += len(delta.prompt_logprobs)
        if delta.token_ids:
            if not live.delivered:
                self.num_waiting_tokens -= live.request.prompt_len
                live.first_token_at = self._clock()
            live.delivered += delta.token_ids
            self._progress_at = self._clock()
        if delta.finish_reason is not None:
            if live.num_engines > 1 and delta.timing is not None and live.first_token_at:
                first = live.first_token_at - live.request.arrival  # the last engine measured from its own start
                delta.timing = replace(delta.timing, first_token=first, queue=min(delta.timing.queue, first))
            self._drop(delta.request_id)
            if delta.finish_reason is FinishReason.ERROR:
                self.on_error(delta.request_id, delta.error_code or "", delta.error or "")
        live.stream.put(delta)

    def _end(self, request_id: str, reason: FinishReason, error: QuireError | None = None) -> None:
        """End a request without the engine: deliver its last delta."""
        live = self.live[request_id]
        request = live.request
        usage = Usage(request.prompt_len, 0, len(live.delivered))
        first = live.first_token_at - request.arrival if live.first_token_at else 0.0
        timing = Timing(queue=first, first_token=first, total=self._clock() - request.arrival)
        delta = Delta(request_id, finish_reason=reason, usage=usage, timing=timing)
        if error is not None:
            delta.error, delta.error_code = str(error), error.code
        self._deliver(delta)

    def _drop(self, request_id: str) -> None:
        live = self.live.pop(request_id, None)
        if live is not None and not live.delivered:
            self.num_waiting_tokens -= live.request.prompt_len

    def _handle_beat(self, beat: wire.Beat) -> None:
        self._beat_at = self._clock()
        self.throughput.record(beat.busy_seconds, beat.ended)
        is_idle = beat.is_paused or not beat.running + beat.waiting + beat.held
        if beat.computed_tokens != self.beat.computed_tokens or is_idle:
            self._progress_at = self._beat_at
        self.beat = beat
