"""Downloads one file from the hub into the store: resumed where it broke off, checked by size and hash, renamed whole.

`hub` and `builtin` call `download` under the store's lock. A broken line is taken up again at once while bytes keep
coming; after that the part stays on disk for the next attempt.
"""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass
from pathlib import Path

from quire.files.progress import Progress
from quire.files.store import CHUNK_BYTES, PartFile, check_space
from quire.files.web import Refused, Unreachable, WebClient, explain
from quire.types import QuireError

MAX_ATTEMPTS = 20  # each must have brought bytes, so this bounds a line that breaks every few megabytes


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it. What the hub does not tell is None and cannot be checked."""

    name: str
    size: int | None = None
    sha256: str | None = None


def download(client: WebClient, url_path: str, remote: RemoteFile, target: Path, progress: Progress) -> None:
    """Fetch `remote` to `target`. Raises `Unreachable` or `Refused` as the client does, `QuireError` on wrong bytes."""
    part = PartFile(target)
    try:
        if remote.size is not None and part.done > remote.size:
            part.restart()
        may_restart = True
        for _ in range(MAX_ATTEMPTS):
            before = part.done
            try:
                size = _continue(client, url_path, remote, part, progress)
                break
            except Unreachable:
                restarted = part.done == 0 < before
                if part.done <= before and not (restarted and may_restart):
                    raise
                may_restart = may_restart and not restarted
        else:
            raise Unreachable("the connection keeps breaking")
        _check(part, remote, size, client.host)
        part.publish()
    finally:
        progress.finish()
        part.close()


def _continue(client: WebClient, url_path: str, remote: RemoteFile, part: PartFile, progress: Progress) -> int:
    """One request for what is missing; returns the file's full size once all of it is there."""
    if remote.size is not None and part.done == remote.size:
        return remote.size
    try:
        response = client.open(url_path, start=part.done)
    except Refused as error:
        if error.status == 416 and part.done:  # our part is not a beginning of theirs
            part.restart()
            raise Unreachable("it cannot continue a partial download") from None
        raise
    with response:
        size = _agree_on_size(response, remote, part, client.host)
        check_space(part.path.parent, size - part.done)
        progress.start(f"fetching {remote.name}", size, part.done)
        try:
            while chunk := response.read(min(CHUNK_BYTES, size - part.done + 1)):
                part.write(chunk)
                progress.update(part.done)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(explain(error)) from None
    if part.done < size:
        raise Unreachable(f"the connection broke after {part.done} of {size} bytes")
    return size


def _agree_on_size(response: http.client.HTTPResponse, remote: RemoteFile, part: PartFile, host: str) -> int:
    """The full size, from the listing or else from the answer; the two may not contradict each other."""
    offered: int | None = None
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d{1,18})-\d+/(\d{1,18})", response.headers.get("Content-Range") or "")
        if match is None or int(match[1]) != part.done:
            part.restart()
            raise Unreachable("it cannot continue a partial download")
        offered = int(match[2])
    else:
        part.restart()  # it sends the whole file, whatever was asked for
        length = response.headers.get("Content-Length") or ""
        offered = int(length) if re.fullmatch(r"\d{1,18}", length) else None
    size = remote.size if remote.size is not None else offered
    if size is None:
        raise QuireError("hub_error", f"{host} does not tell the size of {remote.name}.", "Try another endpoint.")
    if offered is not None and offered != size:
        what = f"{host} lists {remote.name} with {size} bytes but offers {offered}."
        raise QuireError("hub_error", what, "Try again later.")
    return size


def _check(part: PartFile, remote: RemoteFile, size: int, host: str) -> None:
    if part.done == size and remote.sha256 in (None, part.sha256):
        return
    found = f"{part.done} bytes instead of {size}" if part.done != size else f"SHA-256 {part.sha256[:16]}…"
    wanted = "" if part.done != size else f" instead of {(remote.sha256 or '')[:16]}…"
    part.discard()
    what = f"What {host} sent as {remote.name} is not the right file: {found}{wanted}."
    raise QuireError("hash_mismatch", what, "It was thrown away; try again later.")
