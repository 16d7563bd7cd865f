"""The body of `/v1/responses`. Known fields without a function here are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.openai.schemas import StructuredOutputs
from quire.server.schemas import Body, Items, Name, Sampling, Stop

JsonObject = dict[str, Any]


class InputPart(Body):
    type: Literal[
        "input_text",
        "output_text",
        "text",
        "refusal",
        "reasoning_text",
        "summary_text",
        "input_image",
        "input_file",
        "input_audio",
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: Items[JsonObject] | None = None
    logprobs: Items[JsonObject] | None = None
    image_url: Any = None
    detail: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    input_audio: JsonObject | None = None
    cache_control: JsonObject | None = None


class InputItem(Body):
    """A message, a call, a call's result or earlier reasoning. Its type decides which fields are required."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: Name | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Items[InputPart] | None = None
    phase: str | None = None
    call_id: Name | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Items[InputPart] | None = None
    summary: Items[InputPart] | None = None
    encrypted_content: str | None = None
    cache_control: JsonObject | None = None


class ResponseTool(Body):
    type: str
    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9_.:-]+$")] | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: JsonObject | None = None
    tools: Annotated[Items[ResponseTool], Field(max_length=4096)] | None = None  # functions of a namespace


class NamedResponseTool(Body):
    type: Literal["function"]
    name: Name


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a variable of some templates; else only medium


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesBody(Sampling):
    model: Name | None = None
    input: str | Annotated[Items[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    stop: Stop | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = True
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    metadata: JsonObject | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: JsonObject | None = None
    include: Annotated[Items[str], Field(max_length=16)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # bounds tools that run at the provider: here are none
    truncation: Literal["auto", "disabled"] | None = None  # auto: the oldest turns are left out of a full context
    # Accepted and ignored:
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None
    safety_identifier: str | None = None
    client_metadata: JsonObject | None = None
