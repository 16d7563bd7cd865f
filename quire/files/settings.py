"""The hub's address, the token and the offline mode, read once from the caller and the environment.

`source` creates the settings and passes them to `hub` and `builtin`. Imports are light, since every start needs it.
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
    """How to access the hub."""

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool  # no network access
    hub_offline: bool  # no access to the hub; other sources are allowed

    @classmethod
    def from_environment(cls, token: str | None = None, offline: bool = False) -> HubSettings:
        """Returns the caller's settings, completed from `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`."""
        switched_off = os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
        endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        return cls(endpoint, token or os.environ.get("HF_TOKEN") or None, offline, offline or switched_off)

    def client(self) -> WebClient:
        """Returns a client for the hub; raises `offline` if access is disabled."""
        from quire.files.web import WebClient

        if self.hub_offline:
            why = "offline mode" if self.offline else "HF_HUB_OFFLINE"
            raise QuireError(
                "offline", f"{why} forbids access to the hub.", "Disable it, or use a model on this machine."
            )
        return WebClient(self.endpoint, self.token)
