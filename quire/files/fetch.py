"""Downloads one file from the hub into the store: resumable, verified by size and hash, renamed when complete.

`hub` and `builtin` call `download` under the store's lock. A broken connection is retried at once as long as each
attempt brings bytes. After a failure the partial file stays on disk for the next attempt.
"""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass
from pathlib import Path

from quire.files.progress import Progress
from quire.files.store import CHUNK_BYTES, PartFile, check_space
from quire.files.web import HubRefusal, Unreachable, WebClient, explain
from quire.types import QuireError

MAX_ATTEMPTS = 20  # every attempt must bring bytes; bounds a connection that keeps breaking


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in the hub's listing. Size and hash are None if the listing lacks them, and are then not checked."""

    name: str
    size: int | None = None
    sha256: str | None = None


def download(client: WebClient, url_path: str, remote: RemoteFile, target: Path, progress: Progress) -> None:
    """Downloads `remote` to `target`. Raises `Unreachable` or `HubRefusal`, and `QuireError` for wrong bytes."""
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
    """Requests the missing bytes once; returns the file's full size when it is complete."""
    if remote.size is not None and part.done == remote.size:
        return remote.size
    try:
        response = client.open(url_path, start=part.done)
    except HubRefusal as error:
        if error.status == 416 and part.done:  # the partial file is longer than the remote one
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
    """Returns the full size from the listing, or else from the response; raises if they differ."""
    offered: int | None = None
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d{1,18})-\d+/(\d{1,18})", response.headers.get("Content-Range") or "")
        if match is None or int(match[1]) != part.done:
            part.restart()
            raise Unreachable("it cannot continue a partial download")
        offered = int(match[2])
    else:
        part.restart()  # the server ignores the range and sends the whole file
        length = response.headers.get("Content-Length") or ""
        offered = int(length) if re.fullmatch(r"\d{1,18}", length) else None
    size = remote.size if remote.size is not None else offered
    if size is None:
        raise QuireError("hub_error", f"{host} does not report the size of {remote.name}.", "Try another endpoint.")
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
    what = f"{host} sent wrong bytes for {remote.name}: {found}{wanted}."
    raise QuireError("hash_mismatch", what, "The file was deleted; try again later.")
