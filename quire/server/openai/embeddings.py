"""`/v1/embeddings`: the pooled hidden states of texts, as numbers or base64."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.files.pooling import read_pooling
from quire.files.source import ModelFiles
from quire.server.collector import SampleCollector
from quire.server.generation import GenerationRun
from quire.server.http.errors import bad_request
from quire.server.http.replies import whole_reply
from quire.server.http.route_parts import api_router, job_of
from quire.server.schemas import Items, Name, Service, TokenPrompt
from quire.server.state import Server
from quire.types import PoolingRule, SamplingParams, choose_pooling


class EmbeddingsBody(Service):
    model: Name | None = None
    input: (
        str
        | TokenPrompt
        | Annotated[Items[str], Field(min_length=1)]
        | Annotated[Items[TokenPrompt], Field(min_length=1)]
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    pooling: Literal["mean", "last"] | None = None  # None: --pooling, or the model's files
    normalize: bool | None = None  # None: the model's files
    user: str | None = None


def embeddings_router(server: Server) -> APIRouter:
    router = api_router(server, "OpenAI", "openai")
    own = OwnPooling(server.files)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
        model = server.check_model(body.model)
        given: Any = body.input
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        server.generation.check_samples(len(texts), 1)
        prompts = [await server.chat.encode(text) for text in texts]
        rule = choose_pooling(await own.get(), server.config.model.pooling, body.pooling, body.normalize)
        # The step that ends the prompt samples one token, which is not part of the reply.
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=rule.kind)
        run = await server.generation.open(job_of(request, body, prompts, params))
        whole = EmbeddingsWhole(run, model, body, rule)
        return await whole_reply(request, run, whole.take, whole.body, server)

    return router


class OwnPooling:
    """The pooling rule in the model's files, read at first use."""

    def __init__(self, files: ModelFiles):
        self._files = files
        self._found: list[PoolingRule | None] = []

    async def get(self) -> PoolingRule | None:
        if not self._found:
            self._found = [await asyncio.to_thread(read_pooling, self._files)]
        return self._found[0]


class EmbeddingsWhole:
    """The reply as one body."""

    def __init__(self, run: GenerationRun, model: str, body: EmbeddingsBody, rule: PoolingRule):
        self._run, self._model, self._given, self._rule = run, model, body, rule
        self._gather = SampleCollector(run.num_samples)
        self.take = self._gather.take

    async def body(self) -> dict[str, Any]:
        vectors = [self._shown(whole.embedding) for whole in self._gather.samples]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
        count = self._run.totals.prompt_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        told = {"type": self._rule.kind, "normalize": self._rule.normalize, "source": self._rule.source}
        return {"object": "list", "data": data, "model": self._model, "usage": usage, "pooling": told}

    def _shown(self, vector: list[float]) -> list[float] | str:
        wanted = self._given.dimensions
        if wanted is not None and wanted > len(vector):
            message = f"dimensions={wanted} is more than the {len(vector)} this model has."
            raise bad_request("invalid_value", message, "dimensions")
        vector = self._rule.scaled(vector[:wanted])
        if self._given.encoding_format == "base64":
            return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
        return vector
