"""Base classes of the bodies of all dialects: strict fields, and sampling parameters beyond each API's own."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator, model_validator

from quire.server.http.errors import bad_request, in_client_words
from quire.types import MAX_BAD_WORDS, MAX_BIASED, MAX_STOPS, QuireError, SamplingParams

MAX_ITEMS = 1 << 20  # per list in a body, unless a field has a lower bound
MAX_PROMPT_TOKENS = 1 << 24  # per prompt given as token ids


class Body(BaseModel):
    """A strict body: unknown fields are errors, and strings are not converted to numbers.

    Validation costs at most a small multiple of the body's size: lists are `Items`, whose validation ends at the first
    invalid item, and only one unknown field of an object is reported."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        fields = cls.model_fields
        if not isinstance(value, dict) or len(value) <= len(fields):
            return value
        known = {field.alias or name for name, field in fields.items()}
        first = next(name for name in value if name not in known)
        return {name: inner for name, inner in value.items() if name in known or name == first}


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ITEMS)]
Name = Annotated[str, Field(max_length=512)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


def _take_packed(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Skip validation of an `array`: only the text worker produces one, after validation."""
    return value if isinstance(value, array) else validate(value)


TokenList = Annotated[list[Token], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS), WrapValidator(_take_packed)]
TokenPrompt = Annotated[TokenList, Field(min_length=1)]
Stop = str | Annotated[Items[str], Field(max_length=MAX_STOPS)]


def _keep_one_wrong_bias(value: Any) -> Any:
    """Keep one invalid value only, because pydantic reports every invalid value of an object."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASED:
        raise ValueError(f"it has {len(value)} entries, the limit is {MAX_BIASED}")
    wrong = next((token for token, bias in value.items() if type(bias) not in (int, float)), None)
    return value if wrong is None else {wrong: value[wrong]}


LogitBias = Annotated[dict[str, float], BeforeValidator(_keep_one_wrong_bias)]


class Service(Body):
    """Fields about the treatment of a request."""

    model: Name | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    def salt(self) -> bytes:
        if self.cache_salt is None:
            return b""
        return blake2b(self.cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()


class Sampling(Service):
    """Sampling parameters that every API accepts under Quire's names. Those with names of each API (stop, max_tokens,
    n, logprobs) are in the dialects' bodies."""

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_len: int | None = None
    dry_range: int | None = None
    dry_breakers: Annotated[Items[str], Field(max_length=MAX_STOPS)] | None = None
    bad_words: Annotated[Items[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    stop_token_ids: Annotated[Items[Token], Field(max_length=MAX_STOPS)] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    speculate: bool | None = None
    repeat_penalty: float | None = None  # llama.cpp's name of repetition_penalty
    include_stop_str_in_output: bool | None = None  # vLLM's name of include_stop
    cache_prompt: Literal[True] | None = None  # llama.cpp's; prompts are always cached


OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "include_stop_str_in_output": "include_stop"}
_SHARED = [name for name in Sampling.model_fields if name not in {*Service.model_fields, *OTHER_NAMES, "cache_prompt"}]
UNBOUNDED = -1  # what other servers call "as many as there is room for", and for top_k "off"


def sampling_params(body: Sampling, **own: Any) -> SamplingParams:
    """Sampling parameters from the dialect's fields, under Quire's names, and the shared ones. None keeps the model's
    default."""
    given = {name: getattr(body, name) for name in _SHARED} | {"logit_bias": _token_bias(body.logit_bias)} | own
    renamed = {}
    for theirs, ours in OTHER_NAMES.items():
        value = getattr(body, theirs)
        if value is not None and given[ours] not in (None, value):
            raise bad_request("invalid_value", f"{theirs} and {ours} are one parameter and differ here.", theirs)
        if value is not None and given[ours] is None:
            given[ours], renamed[ours] = value, theirs
    if given["top_k"] == UNBOUNDED:
        given["top_k"] = 0
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except QuireError as error:
        raise in_client_words(error, renamed) from None


def length_of(max_tokens: int | None) -> int | None:
    """The wanted number of tokens; None, the rest of the context, for -1."""
    return None if max_tokens == UNBOUNDED else max_tokens


def stops_of(stop: str | list[str] | None) -> tuple[str, ...] | list[str] | None:
    """The stop strings. An empty text, which some clients send for none, stops nothing."""
    if isinstance(stop, str):
        return (stop,) if stop else None
    return stop


def _token_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise bad_request("invalid_value", f"logit_bias: {token[:50]!r} is not a token id.", "logit_bias")
        bias[int(token)] = float(value)
    return bias


def schema_text(schema: dict[str, Any], where: str) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise bad_request("invalid_schema", "The schema is nested too deeply or holds NaN.", where) from None
