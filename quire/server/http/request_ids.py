"""Request ids: the client's id if it is well-formed, else a random one. Every reply carries it."""

from __future__ import annotations

import re
import secrets

_USABLE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id(given: str) -> str:
    return given if _USABLE.fullmatch(given) else f"req_{secrets.token_hex(12)}"
