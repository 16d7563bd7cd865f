"""Block files in an object store that several machines share: S3-compatible ones, through the extra `obstore`.

An object is visible when its upload is complete, so no temporary names are needed. Credentials come from the
environment, as the URL's service defines it (AWS_ACCESS_KEY_ID, AWS_ENDPOINT, …); they are in no setting and no log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.cache.tiers.folder import NAME, StoredFile, check_name
from quire.types import QuireError

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "memory")
MARKER, VERSION = "quire-cache", b"1\n"


class ObjectStore:
    """Implements `BlockStore`. Errors of the service become `OSError`, as `StoredTier` expects them."""

    is_shared = True

    def __init__(self, url: str, store: Any = None):
        """`store`: an obstore store to use in place of the URL's. Raises if the store can't be used."""
        self._url = url.split("?")[0]
        try:
            import obstore

            self._obstore = obstore
        except ImportError:
            what = f"The shared cache {self._url!r} needs the Python package obstore."
            raise QuireError("missing_package", what, "Install it: pip install 'quire[objects]'.") from None
        try:
            self._store = store if store is not None else obstore.store.from_url(url)
            self._check_marker()
        except QuireError:
            raise
        except Exception as error:  # obstore's errors have no base class for a wrong URL
            what = f"The shared cache {self._url!r} can't be used: {_first_line(error)}."
            hint = "Check the URL, the credentials in the environment and the network."
            raise QuireError("cache_folder", what, hint) from None

    def _check_marker(self) -> None:
        try:
            found = bytes(self._obstore.get(self._store, MARKER).bytes())
        except FileNotFoundError:
            self._obstore.put(self._store, MARKER, VERSION)
            return
        if found != VERSION:
            shown = found[:100].decode("utf-8", "replace").strip()
            what = f"The shared cache {self._url!r} has format {shown!r}, this Quire writes '1'."
            raise QuireError("cache_folder", what, "Choose another prefix in the store.")

    def scan(self) -> Iterator[StoredFile]:
        try:
            for batch in self._obstore.list(self._store):
                for meta in batch:
                    name = str(meta["path"]).rpartition("/")[2]
                    if NAME.fullmatch(name):
                        yield StoredFile(name, int(meta["size"]), meta["last_modified"].timestamp())
        except OSError:
            raise
        except Exception as error:
            raise OSError(_first_line(error)) from None

    def read(self, name: str, max_bytes: int) -> bytes | None:
        path = _path(name)
        try:
            result = self._obstore.get(self._store, path)
            if result.meta["size"] > max_bytes:  # longer than the block that is wanted: refused as such
                return bytes(self._obstore.get_range(self._store, path, start=0, end=max_bytes))
            return bytes(result.bytes())
        except FileNotFoundError:
            return None
        except OSError:
            raise
        except Exception as error:
            raise OSError(_first_line(error)) from None

    def write(self, name: str, data: bytes) -> None:
        path = _path(name)
        try:
            self._obstore.put(self._store, path, data)
        except OSError:
            raise
        except Exception as error:
            raise OSError(_first_line(error)) from None

    def delete(self, name: str) -> None:
        path = _path(name)
        try:
            self._obstore.delete(self._store, path)
        except FileNotFoundError:
            pass
        except OSError:
            raise
        except Exception as error:
            raise OSError(_first_line(error)) from None


def _path(name: str) -> str:
    return f"{name[:2]}/{check_name(name)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
