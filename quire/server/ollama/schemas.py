"""Bodies of Ollama's API. Options about the machine are settings of this server, and ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quire.server.openai.schemas import Function, JsonObject
from quire.server.schemas import Body, Items, Name, Service, Stop


class Options(Body):
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Values of samplers that are off:
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None
    mirostat: Literal[0] | None = None
    repeat_last_n: Literal[-1] | None = None
    # Settings of the machine, ignored:
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    numa: bool | None = None


class OllamaFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: JsonObject | None = None
    description: str | None = None
    index: int | None = None


class OllamaCall(Body):
    function: OllamaFunction
    id: Name | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Items[str] | None = None
    tool_calls: Annotated[Items[OllamaCall], Field(max_length=256)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None


class OllamaTool(Body):
    type: Literal["function"] | None = None
    function: Function


class Generated(Service):
    """Fields that `/api/chat` and `/api/generate` share."""

    model: Name
    stream: bool | None = True
    format: Literal["", "json"] | JsonObject | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | int | float | None = None  # ignored: the model stays


class OllamaChatBody(Generated):
    messages: Items[OllamaMessage] | None = None
    tools: Items[OllamaTool] | None = None


class GenerateBody(Generated):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Items[str] | None = None
    template: str | None = None
    context: Items[int] | None = None


class EmbedBody(Service):
    model: Name
    input: str | Items[str] = ""
    truncate: bool | None = True
    dimensions: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    options: Options | None = None
    keep_alive: str | int | float | None = None


class ShowBody(Body):
    model: Name | None = None
    name: Name | None = None  # the field's older name
    verbose: bool | None = None
