"""`/infill`, llama.cpp's route for editors: writes the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.server.collector import SampleCollector
from quire.server.generation import GenerationRun
from quire.server.http.encoding import COMMENT, data_event
from quire.server.http.errors import ApiError, error_body
from quire.server.http.replies import stream_reply, whole_reply
from quire.server.http.route_parts import api_router, job_of
from quire.server.infill.prompt import ended_infill, infill_prompt
from quire.server.sample import Piece
from quire.server.schemas import Body, Items, Name, Sampling, Stop, length_of, sampling_params, stops_of
from quire.server.state import Server
from quire.text.channels.events import TextDelta


class ExtraFile(Body):
    """Another file of the project, written before the prefix."""

    filename: str | None = None
    text: str


class InfillBody(Sampling):
    model: Name | None = None
    input_prefix: str
    input_suffix: str = ""
    input_extra: Annotated[Items[ExtraFile], Field(max_length=256)] | None = None
    prompt: str | None = None  # text after the prefix, such as the line's indentation
    n_predict: int | None = None
    stop: Stop | None = None
    stream: bool | None = False


def infill_router(server: Server) -> APIRouter:
    router = api_router(server, "Text", "openai")

    @router.post("/infill", response_model=None)
    async def infill(request: Request, body: InfillBody) -> Response:
        """The text between a prefix and a suffix, by a model with fill-in-the-middle tokens."""
        model = server.check_model(body.model)
        tokenizer = server.generation.tokenizer
        params = sampling_params(body, max_tokens=length_of(body.n_predict), stop=stops_of(body.stop))
        params = ended_infill(params, tokenizer)
        before = "".join(f"{one.filename or ''}\n{one.text}\n" for one in body.input_extra or ())
        before += body.input_prefix + (body.prompt or "")
        prompt = await infill_prompt(server.chat, tokenizer, before, body.input_suffix)
        run = await server.generation.open(job_of(request, body, [prompt], params))
        reply = InfillReply(run, model)
        if body.stream:
            return await stream_reply(request, run, reply, server)
        return await whole_reply(request, run, reply.take, reply.body, server)

    return router


class InfillReply:
    """The reply in llama.cpp's form, as one body or as events."""

    keep_alive = COMMENT

    def __init__(self, run: GenerationRun, model: str):
        self._run, self._model = run, model
        self._gather = SampleCollector(run.num_samples)
        self.take = self._gather.take

    async def body(self) -> dict[str, Any]:
        return self._last(self._gather.samples[0].message.content)

    def start(self) -> bytes:
        return b""

    def push(self, pieces: Iterable[Piece]) -> bytes:
        pieces = list(pieces)
        self.take(pieces)
        text = "".join(event.text for piece in pieces for event in piece.events if isinstance(event, TextDelta))
        return data_event({"index": 0, "content": text, "stop": False}) if text else b""

    async def finish(self) -> bytes:
        return data_event(self._last(""))

    def fail(self, error: ApiError) -> bytes:
        return data_event(error_body("openai", error))

    def _last(self, text: str) -> dict[str, Any]:
        end, totals = self._gather.samples[0].end, self._run.totals
        kind = "limit" if end.reason == "length" else "word" if end.stop_text is not None else "eos"
        return {
            "index": 0,
            "content": text,
            "model": self._model,
            "stop": True,
            "stop_type": kind,
            "stopping_word": end.stop_text or "",
            "tokens_predicted": totals.completion_tokens,
            "tokens_evaluated": totals.prompt_tokens,
            "tokens_cached": totals.cached_tokens,
            "truncated": False,
        }
