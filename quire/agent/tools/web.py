"""`web_fetch`: the text of a public web page. Off by default, since it runs outside the sandbox.

Addresses of this machine and of private networks are refused, also behind a redirect and behind a name: the address
that was checked is the one that is connected to.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin, urlsplit

from quire.agent.sandbox.output import clean_text
from quire.agent.tools.seam import Risk, ToolContext, ToolResult, object_schema

MAX_BYTES = 4 << 20
MAX_REDIRECTS = 5
SECONDS = 20.0


class FetchError(Exception):
    """Why a page could not be fetched, in words for the model."""


class WebFetchTool:
    name = "web_fetch"
    description = "Fetch a public web page and return its text."
    parameters = object_schema(("url",), url={"type": "string", "description": "an http or https address"})
    risk = Risk.OUTSIDE

    def describe(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments["url"])

    def preview(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult | None:
        return None

    def run(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        started = time.monotonic()
        try:
            text = fetch(str(arguments["url"]), started + SECONDS)
        except FetchError as error:
            return ToolResult(str(error), True, seconds=time.monotonic() - started)
        except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
            return ToolResult(f"The page could not be fetched: {error}.", True, seconds=time.monotonic() - started)
        return ToolResult(clean_text(text) or "[no text]", seconds=time.monotonic() - started)

    def close(self) -> None:
        pass


def fetch(url: str, deadline: float) -> str:
    for _ in range(MAX_REDIRECTS + 1):
        status, headers, body = _get(url, deadline)
        if status in (301, 302, 303, 307, 308) and headers.get("location"):
            url = urljoin(url, headers["location"])
            continue
        if status != 200:
            raise FetchError(f"{url} answered {status}.")
        kind = headers.get("content-type", "")
        text = body.decode(_charset(kind), "replace")
        return page_text(text) if "html" in kind else text
    raise FetchError(f"More than {MAX_REDIRECTS} redirects.")


def _get(url: str, deadline: float) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise FetchError(f"{url[:200]!r} is not an http or https address.")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = public_address(parts.hostname, port)
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=max(0.1, deadline - time.monotonic()))
    connection.sock = socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
    try:
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=parts.hostname)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"User-Agent": "quire-agent", "Accept": "text/html, text/*"})
        reply = connection.getresponse()
        body = b""
        while part := reply.read1(1 << 16):
            body += part
            if len(body) > MAX_BYTES:
                raise FetchError(f"The page has more than {MAX_BYTES} bytes.")
            if time.monotonic() > deadline:
                raise FetchError(f"The page did not arrive within {SECONDS:.0f} s.")
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, body
    finally:
        connection.close()


def public_address(host: str, port: int) -> str:
    """Returns an address of this host, all of which must be public."""
    try:
        found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise FetchError(f"{host} has no address: {error}.") from None
    for address in found:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        if not (mapped or parsed).is_global or (mapped or parsed).is_multicast:
            raise FetchError(f"{host} is not a public address.")
    return found[0]


def _charset(kind: str) -> str:
    found = re.search(r"charset=[\"']?([\w\-]+)", kind)
    try:
        return "".encode(found[1]).decode() or found[1] if found else "utf-8"
    except LookupError:
        return "utf-8"


class _PageText(HTMLParser):
    """Collects the text of a page, without scripts and styles."""

    _HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "head"})
    _BREAKS = frozenset({"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "section", "article", "pre", "table"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self._HIDDEN
        if tag in self._BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self._HIDDEN))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def page_text(html: str) -> str:
    parser = _PageText()
    parser.feed(html)
    parser.close()
    lines = [" ".join(line.split()) for line in "".join(parser.parts).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
