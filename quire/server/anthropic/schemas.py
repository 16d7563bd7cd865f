"""Request bodies of Anthropic's API. Known fields without a function here are accepted and ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.schemas import Body, Items, Name, Sampling
from quire.types import MAX_STOPS

JsonObject = dict[str, Any]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: JsonObject | None = None
    citations: Items[JsonObject] | None = None


class ImageBlock(Body):
    type: Literal["image", "document", "search_result", "container_upload"]
    source: JsonObject | None = None
    title: str | None = None
    context: str | None = None
    citations: JsonObject | None = None
    content: Any = None
    file_id: str | None = None
    cache_control: JsonObject | None = None


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: JsonObject
    caller: JsonObject | None = None
    cache_control: JsonObject | None = None


class ToolReferenceBlock(Body):
    type: Literal["tool_reference"]
    tool_name: str
    cache_control: JsonObject | None = None


ResultPart = Annotated[TextBlock | ImageBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Items[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: JsonObject | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class AnthropicTool(Body):
    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9_.:-]+$")]
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    cache_control: JsonObject | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Items[str] | None = None
    input_examples: Items[JsonObject] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Sampling):
    """The fields that determine the prompt."""

    model: Name | None = None
    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: str | Items[TextBlock] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Accepted and ignored:
    cache_control: JsonObject | None = None
    context_management: JsonObject | None = None
    mcp_servers: Annotated[Items[JsonObject], Field(max_length=0)] | None = None
    betas: Items[str] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountBody):
    max_tokens: int
    stop_sequences: Annotated[Items[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = False
    # Accepted and ignored:
    metadata: JsonObject | None = None
    service_tier: str | None = None
    container: str | None = None
    inference_geo: str | None = None
    diagnostics: JsonObject | None = None
