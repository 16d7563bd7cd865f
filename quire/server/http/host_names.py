"""Checks the names in `Host` and `Origin`, so that the gate can refuse requests that websites direct at this server.

A website can resolve a name of its own to this machine (DNS rebinding) or send its visitors' browsers here; without a
key nothing else distinguishes them from a user. Other programs use the server's own name and send no `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from quire.server.http.errors import ApiError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(.+)")


class HostNames:
    """Checks `Host` and `Origin` if names are configured, and on loopback addresses without keys."""

    def __init__(self, bound: str, configured: str | None, keyless: bool, origins: Collection[str]):
        names = {name.strip().lower().removesuffix(".") for name in (configured or "").split(",")}
        self._names = {*names, bound.lower(), socket.gethostname().lower()} - {""}
        self._origins = frozenset(origins)
        self.active = "*" not in names and (configured is not None or (keyless and is_this_machine(bound)))

    def check(self, host: str | None, origin: str | None, local: str | None) -> None:
        """Raise for a refused name. `host` and `origin` are header values, `local` is the server's address of the
        connection."""
        if not self.active:
            return
        if host is not None and not self._knows(host, local):
            message = f"This server is not called {host[:200]!r}. Use its address, or start it with --allowed-hosts."
            raise ApiError(403, "host_forbidden", message)
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        match = _ORIGIN.fullmatch(origin.lower())
        if match is None or not self._knows(match[1], local):
            message = f"The origin {origin[:200]!r} may not call this server from a browser; see --cors-origins."
            raise ApiError(403, "cors_forbidden", message)

    def _knows(self, host: str, local: str | None) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".")
        return name in self._names or name == local or is_this_machine(name)


def is_this_machine(name: str) -> bool:
    """Whether the name or address denotes the local machine everywhere."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
