"""Puts stores below an engine's host memory, as the config says: a local folder, a shared one, or both."""

from __future__ import annotations

from pathlib import Path

from quire.cache.chain import LINK_TOKENS
from quire.cache.index import CacheIndex
from quire.cache.tiers.blocks import layouts_of
from quire.cache.tiers.folder import BlockStore, FolderStore
from quire.cache.tiers.objects import SCHEMES, ObjectStore
from quire.cache.tiers.sessions import SessionFolder
from quire.cache.tiers.stored import StoredTier
from quire.config import Config
from quire.engine.speculation.history_file import HistoryFile
from quire.files.source import ModelFiles
from quire.files.weights_digest import weights_digest
from quire.runtime.host_units import StoreHostUnits
from quire.runtime.store import CacheStore
from quire.types import QuireError

NOTE = "digests.json"


def has_stores(config: Config) -> bool:
    return config.cache.cache_dir is not None or config.cache.shared_cache is not None


def refuse_stores(config: Config, what: str) -> None:
    """Raises if the config has stores, for an engine of a kind that can't have any."""
    if has_stores(config):
        hint = "Leave cache_dir and shared_cache out, or run the model in one process."
        raise QuireError("invalid_parameter", f"{what} keeps no cache in folders yet.", hint, "cache_dir")


def weights_version(config: Config, files: ModelFiles) -> bytes:
    """Returns the digest of the weights, which is part of the keys of blocks in stores; empty without stores."""
    if not has_stores(config):
        return b""
    model, engine = config.model, config.engine
    settings = [
        model.dtype,
        model.quant,
        model.max_model_len,
        config.cache.kv_dtype,
        config.cache.kv_dtype_skip,
        engine.speculate,
    ]
    note = None
    if config.cache.cache_dir is not None:
        folder = Path(config.cache.cache_dir).expanduser()
        FolderStore(folder)  # refuses a folder of something else before anything is written to it
        note = folder / NOTE
    return weights_digest(files, repr(settings), note)


def history_file(config: Config, weights: bytes, vocab_size: int) -> HistoryFile | None:
    """Returns where outputs of earlier requests are kept, which drafts are made of; None without a cache folder."""
    if config.cache.cache_dir is None:
        return None
    return HistoryFile(Path(config.cache.cache_dir).expanduser(), weights, vocab_size)


def attach_stores(cache: CacheIndex, store: CacheStore, config: Config) -> None:
    """Attaches the config's stores to a cache. Raises where it has no host memory or an unsuitable page size."""
    if not has_stores(config):
        return
    if not cache.host.keeps_blocks:
        what = "A cache folder needs the prefix cache, the host cache and host memory."
        raise QuireError("invalid_parameter", what, "Leave them on, and raise host_memory.", param="cache_dir")
    if cache.page_tokens % LINK_TOKENS:
        what = f"A cache folder keeps {LINK_TOKENS} tokens at a time, and pages have {cache.page_tokens}."
        raise QuireError("invalid_parameter", what, f"Choose a multiple of {LINK_TOKENS}.", param="page_tokens")
    memory = StoreHostUnits(store, LINK_TOKENS)
    layouts = layouts_of(cache.specs, cache.weights)
    tiers = []
    folders: list[Path] = []  # sessions are kept in the first
    if config.cache.cache_dir is not None:
        folder = FolderStore(Path(config.cache.cache_dir).expanduser())
        folders.append(folder.folder)
        quota = config.cache.cache_dir_size
        tiers.append(StoredTier("disk", folder, layouts, cache.page_tokens, memory, quota=quota))
    if config.cache.shared_cache is not None:
        shared = open_shared(config.cache.shared_cache)
        if isinstance(shared, FolderStore):
            folders.append(shared.folder)
        tiers.append(StoredTier("shared", shared, layouts, cache.page_tokens, memory))
    sessions = SessionFolder(folders[0]) if folders else None
    cache.attach(tiers, memory, sessions)


def open_shared(place: str) -> BlockStore:
    """Returns the store at a folder's path or at the URL of an object store."""
    scheme = place.partition("://")[0] if "://" in place else "file"
    if scheme in SCHEMES:
        return ObjectStore(place)
    if scheme != "file":
        what = f"The shared cache {place.split('?')[0]!r} is neither a folder nor an object store."
        raise QuireError("invalid_parameter", what, "Give a path, or a URL as s3://bucket/prefix.", "shared_cache")
    return FolderStore(Path(place.removeprefix("file://")).expanduser(), is_shared=True)
