"""Bodies of OpenAI's chat and completion routes, with the names that other servers have for the same fields.

Known fields without a function here are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.schemas import Body, Items, Name, Sampling, Stop, TokenPrompt

JsonObject = dict[str, Any]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # every chunk has the usage so far
    include_obfuscation: bool | None = None


class ContentPart(Body):
    type: Literal["text", "image_url", "input_audio", "file", "refusal"]
    text: str | None = None
    refusal: str | None = None
    image_url: JsonObject | None = None
    input_audio: JsonObject | None = None
    file: JsonObject | None = None
    cache_control: JsonObject | None = None


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = "{}"


class ChatToolCall(Body):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class OldFunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = "{}"


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    name: Name | None = None
    tool_calls: Annotated[Items[ChatToolCall], Field(max_length=256)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Fields of replies, accepted because clients send messages back unchanged:
    refusal: str | None = None
    annotations: Items[JsonObject] | None = None
    audio: JsonObject | None = None
    function_call: OldFunctionCall | None = None
    cache_control: JsonObject | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9_.:-]+$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    cache_control: JsonObject | None = None


class ChatTool(Body):
    type: Literal["function"]
    function: Function
    cache_control: JsonObject | None = None


class NamedFunction(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    name: Name = "output"
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None  # llama.cpp's place of the schema
    structures: Items[JsonObject] | None = None  # of a structural tag, with triggers; or format
    triggers: Items[str] | None = None
    format: JsonObject | None = None


class StructuredOutputs(Body):
    """Constraints on the output without a field in OpenAI's API. Exactly one must be set."""

    json_: Annotated[JsonObject | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[Items[str], Field(min_length=1, max_length=1024)] | None = None  # engine limit: 2000
    grammar: str | None = None
    structural_tag: JsonObject | str | None = None


class PredictedPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """Text that the output is expected to resemble; it makes drafts and never changes a token."""

    type: Literal["content"]
    content: str | Items[PredictedPart]


class OpenAISampling(Sampling):
    model: Name | None = None
    stop: Stop | None = None
    n: int | None = None
    prompt_logprobs: int | None = None  # number of alternatives per prompt token
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None
    return_token_ids: bool | None = None
    # vLLM's and llama.cpp's names; `habits` translates them:
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Items[str], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None
    json_schema: JsonObject | None = None
    grammar: str | None = None
    user: str | None = None


class ChatBody(OpenAISampling):
    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Items[Function] | None = None  # tools, before OpenAI's API had that word
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    thinking_budget: Annotated[int, Field(ge=0)] | None = None  # reasoning tokens after which reasoning is closed
    chat_template_kwargs: JsonObject | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: the oldest turns are left out of a full context
    verbosity: Literal["low", "medium", "high"] | None = None  # a variable of some templates; else only medium
    cache_control: JsonObject | None = None
    # Accepted and ignored:
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: Items[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None
    safety_identifier: str | None = None


class CompletionBody(OpenAISampling):
    prompt: (
        str
        | TokenPrompt
        | Annotated[Items[str], Field(min_length=1)]
        | Annotated[Items[TokenPrompt], Field(min_length=1)]
    )
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
