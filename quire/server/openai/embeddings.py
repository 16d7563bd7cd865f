"""`/v1/embeddings`: the pooled hidden states of texts, as numbers or in base64."""

from __future__ import annotations

import base64
import math
import struct
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.server.errors import bad_request
from quire.server.gather import Gather
from quire.server.generation import Run
from quire.server.replies import whole_reply
from quire.server.route_parts import api_router, job_of
from quire.server.schemas import Items, Name, Service, TokenPrompt
from quire.server.state import Server
from quire.types import SamplingParams


class EmbeddingsBody(Service):
    model: Name | None = None
    input: str | TokenPrompt | Annotated[Items[str], Field(min_length=1)] | Annotated[
        Items[TokenPrompt], Field(min_length=1)
    ]  # fmt: skip
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    user: str | None = None


def embeddings_router(server: Server) -> APIRouter:
    router = api_router(server, "OpenAI", "openai")

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
        model = server.check_model(body.model)
        given: Any = body.input
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        server.generation.check_samples(len(texts), 1)
        prompts = [await server.chat.encode(text) for text in texts]
        # The one token that ends the prompt's last step is sampled all the same, and shown to nobody.
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=body.pooling)
        run = await server.generation.open(job_of(request, body, prompts, params))
        whole = EmbeddingsWhole(run, model, body)
        return await whole_reply(request, run, whole.take, whole.body, server)

    return router


class EmbeddingsWhole:
    def __init__(self, run: Run, model: str, body: EmbeddingsBody):
        self._run, self._model, self._given = run, model, body
        self._gather = Gather(run.num_samples)
        self.take = self._gather.take

    async def body(self) -> dict[str, Any]:
        vectors = [self._shown(whole.embedding) for whole in self._gather.samples]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
        count = self._run.totals.prompt_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _shown(self, vector: list[float]) -> list[float] | str:
        wanted = self._given.dimensions
        if wanted is not None and wanted > len(vector):
            message = f"dimensions={wanted} is more than the {len(vector)} this model has."
            raise bad_request("invalid_value", message, "dimensions")
        vector = vector[:wanted]
        if self._given.normalize:
            length = math.sqrt(sum(value * value for value in vector)) or 1.0
            vector = [value / length for value in vector]
        if self._given.encoding_format == "base64":
            return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
        return vector
