"""Where the hub is, who asks, and whether asking is allowed: read once from the caller and the environment.

`source` builds it, `hub` and `builtin` carry it. It stays light: a warm start needs it and nothing else of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.types import QuireError

if TYPE_CHECKING:
    from quire.files.web import WebClient

DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class HubSettings:
    endpoint: str
    token: str | None = field(repr=False)
    offline: bool  # no network at all
    hub_offline: bool  # not the hub; other sources are still allowed

    @classmethod
    def from_environment(cls, token: str | None = None, offline: bool = False) -> HubSettings:
        """What the caller says, then `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`."""
        switched_off = os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
        endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        return cls(endpoint, token or os.environ.get("HF_TOKEN") or None, offline, offline or switched_off)

    def client(self) -> WebClient:
        from quire.files.web import WebClient

        if self.hub_offline:
            why = "offline mode" if self.offline else "HF_HUB_OFFLINE"
            raise QuireError("offline", f"{why} forbids asking the hub.", "Switch it off, or use a model already here.")
        return WebClient(self.endpoint, self.token)
