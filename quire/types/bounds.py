"""The limits of what a message between processes may hold, as constrained types that decoding checks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_TOKENS = 1 << 24  # token ids in one message
MAX_VALUES = 1 << 16  # entries of any other list in one message
MAX_DRAFTS = 64  # drafts of one row in one step
MAX_UNITS = 1 << 24  # pages or copies in one plan
MAX_ERROR = 1 << 20  # characters of an error text in one message
RequestId = Annotated[str, Meta(max_length=256)]
AdapterDigest = Annotated[str, Meta(max_length=256)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKENS)]
Vector = Annotated[list[float], Meta(max_length=MAX_VALUES)]
ErrorText = Annotated[str, Meta(max_length=MAX_ERROR)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]  # an index, a length or a number of tokens
StepNumber = Annotated[int, Meta(ge=0)]
