"""Downloads the files of a hub repository that Quire reads into the store, in one folder per commit.

Files that are in the Hugging Face cache already are used from there. `source` calls `fetch_repo`, `builtin` calls
`download_file`. The listing of a commit is stored beside its files, so
that a repository that was fetched once resolves without a network.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quire.files.fetch import RemoteFile, download
from quire.files.gguf_parts import list_parts, models_among
from quire.files.hf_cache import find_snapshot
from quire.files.progress import Progress, format_bytes
from quire.files.safetensors import INDEX_NAME, choose_shards, read_index
from quire.files.settings import HubSettings
from quire.files.store import cache_dir, check_space, exclusive, write_text
from quire.files.web import HubRefusal, Unreachable, WebClient
from quire.types import QuireError

MAX_NAMES_SHOWN = 12
# Files of a model folder besides the weights. Pickled weights (.bin, .pth) are never downloaded.
FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "hf_quant_config.json",
    "quantize_config.json",
)
EMBEDDING_FILES = ("modules.json", "1_Pooling/config.json")  # optional

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:/(?P<file>.+\.gguf)|:(?P<quant>[A-Za-z0-9_.-]+))?", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubRef:
    """A repository, optionally with a GGUF file by path (`owner/name/file.gguf`) or by type (`owner/name:Q4_K_M`)."""

    repo: str
    file: str | None = None
    quant: str | None = None

    @property
    def key(self) -> str:
        """Name of the repository's folder in the store."""
        return self.repo.replace("/", "--")


def parse_hub_id(text: str) -> HubRef | None:
    """Returns the reference in a hub id; None if the text is not one."""
    match = _HUB_ID.fullmatch(text)
    if match is None or ".." in match["repo"] or "--" in match["repo"]:
        return None
    if match["file"] and not is_safe_name(match["file"]):
        return None
    return HubRef(match["repo"], match["file"], match["quant"])


def is_safe_name(name: str) -> bool:
    """Whether a file name of a repository stays inside the folder it is joined to, on any system."""
    return name.isprintable() and "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


@dataclass(frozen=True, slots=True)
class RepoListing:
    """The files of one commit."""

    commit: str
    files: dict[str, RemoteFile]


def fetch_repo(
    ref: HubRef, revision: str | None, settings: HubSettings, progress: Progress, with_weights: bool = True
) -> tuple[Path, str]:
    """Returns the model's folder or GGUF file in the store, and its commit, after downloading missing files."""
    revision = revision or "main"
    if not re.fullmatch(r"[\w./+-]{1,200}", revision) or revision.strip(".") == "":
        raise QuireError(
            "invalid_parameter", f"revision={revision!r:.200} is not a branch, tag or commit.", param="revision"
        )
    try:
        snapshot = _Snapshot.find(ref, revision, settings, progress)
    except QuireError as error:
        found = _from_hf_cache(ref, revision, with_weights) if error.code in ("hub_unreachable", "offline") else None
        if found is None:
            raise
        path, commit = found
        progress.note(f"{error.what} Using {ref.repo} from the Hugging Face cache (commit {commit[:12]}).")
        return path, commit
    if not snapshot.folder.is_dir():
        found = _from_hf_cache(ref, snapshot.listing.commit, with_weights, snapshot.listing)
        if found is not None:
            return found
    gguf = choose_gguf(ref, snapshot.listing, with_weights)
    if gguf is not None:
        snapshot.ensure(list_parts(gguf))
    else:
        snapshot.ensure([name for name in FOLDER_FILES if name in snapshot.listing.files])
        if snapshot.unreachable is None and not settings.offline:
            snapshot.ensure([name for name in EMBEDDING_FILES if name in snapshot.listing.files])
        if with_weights:
            snapshot.ensure(snapshot.weight_files())
    snapshot.remember(revision)
    return (snapshot.folder / gguf if gguf else snapshot.folder), snapshot.listing.commit


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One commit of a repository, with its listing and the folder of its files."""

    ref: HubRef
    listing: RepoListing
    settings: HubSettings
    progress: Progress
    unreachable: QuireError | None  # why the listing is a stored one; None: it is current

    @classmethod
    def find(cls, ref: HubRef, revision: str, settings: HubSettings, progress: Progress) -> _Snapshot:
        """Resolves a revision to a commit through the hub; if it is unreachable, from the last download."""
        known = _load_listing(_repo_dir(ref), revision)
        if known is not None and known.commit == revision:
            return cls(ref, known, settings, progress, None)  # a commit never changes
        try:
            return cls(ref, _request_listing(ref, revision, settings), settings, progress, None)
        except QuireError as error:
            if error.code not in ("hub_unreachable", "offline"):
                raise
            if known is None:
                raise QuireError(
                    error.code, f"{ref.repo} is not on this machine, and {error.what}", error.hint
                ) from None
            if error.code == "hub_unreachable":
                progress.note(f"{error.what} Using {ref.repo} as fetched before (commit {known.commit[:12]}).")
            return cls(ref, known, settings, progress, error)

    @property
    def folder(self) -> Path:
        """Folder of the commit's files in the store."""
        return _repo_dir(self.ref) / self.listing.commit

    def ensure(self, names: list[str]) -> None:
        """Downloads the files that are missing or incomplete."""
        missing = [name for name in names if not self._is_here(name)]
        if not missing:
            return
        if self.unreachable is not None:
            what = f"{self.ref.repo} lacks {missing[0]} on this machine, and {self.unreachable.what}"
            raise QuireError(self.unreachable.code, what, self.unreachable.hint)
        with exclusive(f"hub-{self.ref.key}", self.ref.repo, self.progress):
            missing = [name for name in missing if not self._is_here(name)]
            num_bytes = sum(self.listing.files[name].size or 0 for name in missing)
            if len(missing) > 1:
                self.progress.note(f"fetching {self.ref.repo}: {len(missing)} files, {format_bytes(num_bytes)}")
            check_space(_existing(self.folder), num_bytes)
            for name in missing:
                remote, target = self.listing.files[name], self.folder / name
                download_file(self.settings, self.ref.repo, self.listing.commit, remote, target, self.progress)

    def _is_here(self, name: str) -> bool:
        """Whether a file is complete. It gets its name only after verification, so a check of its size is enough."""
        try:
            size = (self.folder / name).stat().st_size
        except OSError:
            return False
        return self.listing.files[name].size in (None, size)

    def weight_files(self) -> list[str]:
        """Returns the names of the weight files, after downloading the index if there is one."""
        files = self.listing.files
        if INDEX_NAME in files:
            self.ensure([INDEX_NAME])
            names = read_index(self.folder / INDEX_NAME)
        else:
            names = choose_shards(files)
        for name in names:
            if name not in files:
                raise QuireError(
                    "missing_shard", f"{self.ref.repo} lacks its weight file {name}.", "Use another model."
                )
        return names

    def remember(self, revision: str) -> None:
        """Stores listing and revision. Called last, so that a stored revision has all of its files."""
        listing = self.listing
        files = {name: [remote.size, remote.sha256] for name, remote in sorted(listing.files.items())}
        folder = _repo_dir(self.ref)
        write_text(folder / "listings" / f"{listing.commit}.json", json.dumps(files, indent=0) + "\n")
        write_text(folder / "refs" / quote(revision, safe=""), listing.commit + "\n")


def _from_hf_cache(
    ref: HubRef, revision: str, with_weights: bool, listing: RepoListing | None = None
) -> tuple[Path, str] | None:
    """Returns the model in the Hugging Face cache and its commit; None if a file of it is missing there.

    `listing`: the hub's, which says what the files should be; without it the cache's own files count."""
    cached = find_snapshot(ref.repo, revision)
    if cached is None:
        return None
    if listing is None:
        files = {name: RemoteFile(name, size) for name, size in cached.sizes.items() if is_safe_name(name)}
        listing = RepoListing(cached.commit, files)
    try:
        gguf = choose_gguf(ref, listing, with_weights)
        if gguf is not None:
            names = list_parts(gguf)
        else:
            names = [name for name in FOLDER_FILES if name in listing.files]
            if with_weights:
                index = cached.folder / INDEX_NAME
                names += read_index(index) if INDEX_NAME in listing.files else choose_shards(listing.files)
    except (QuireError, OSError):
        return None  # no model, or not all of it: the hub's answer, or the lack of one, says more
    sizes = {name: listing.files[name].size if name in listing.files else None for name in names}
    if not names or not all(cached.has(name, size) for name, size in sizes.items()):
        return None
    return (cached.folder if gguf is None else cached.folder / gguf), cached.commit


def _repo_dir(ref: HubRef) -> Path:
    return cache_dir() / "hub" / ref.key


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _load_listing(folder: Path, revision: str) -> RepoListing | None:
    commit = revision
    with suppress(OSError, ValueError):
        commit = (folder / "refs" / quote(revision, safe="")).read_text("utf-8").strip()
    if not _COMMIT.fullmatch(commit):
        return None
    try:
        entries = json.loads((folder / "listings" / f"{commit}.json").read_bytes())
        files = {name: RemoteFile(name, size, sha256) for name, (size, sha256) in entries.items() if is_safe_name(name)}
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # unusable, so the repository counts as not fetched
    return RepoListing(commit, files)


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the GGUF file


def choose_gguf(ref: HubRef, listing: RepoListing, with_weights: bool = True) -> str | None:
    """Returns the GGUF file to use; None for a folder of safetensors. Raises an error with the choices if ambiguous."""
    files = listing.files
    names = models_among(files)
    if ref.file is not None:
        if ref.file not in files:
            raise _unclear(ref, f"has no file {ref.file}", names)
        chosen = list_parts(ref.file)[:1]
    elif ref.quant is not None:
        ending = re.compile(rf"(?:^|[-._/]){re.escape(ref.quant)}(?:-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
        chosen = [name for name in names if ending.search(name)]
        if not chosen:
            raise _unclear(ref, f"has no GGUF file of kind {ref.quant}", names)
    elif "config.json" in files and (not with_weights or any(name.endswith(".safetensors") for name in files)):
        return None
    elif not names:
        if any(name.endswith((".bin", ".pth", ".pt")) for name in files):
            what = f"{ref.repo} has its weights in pickle files only, which can run code and are not read."
            raise QuireError("not_a_model", what, "Choose a repository with safetensors or GGUF files.")
        raise _unclear(ref, "is not a model Quire can read: no config.json with safetensors, and no GGUF file", [])
    else:
        chosen = names
    if len(chosen) > 1:
        raise _unclear(ref, "has several GGUF files", chosen)
    missing = [name for name in list_parts(chosen[0]) if name not in files]
    if missing:
        raise QuireError("missing_shard", f"{ref.repo} lacks {missing[0]}, a part of its model.", "Use another model.")
    return chosen[0]


def _unclear(ref: HubRef, problem: str, names: list[str]) -> QuireError:
    shown = ", ".join(f"{ref.repo}/{name}" for name in names[:MAX_NAMES_SHOWN])
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return QuireError("not_a_model", f"{ref.repo} {problem}.", f"Choose one: {shown}{more}." if names else "")


# ---------------------------------------------------------------------------------------------------------------------
# Requests to the hub


def _request_listing(ref: HubRef, revision: str, settings: HubSettings) -> RepoListing:
    client = settings.client()
    try:
        answer = client.get_json(f"/api/models/{ref.repo}/revision/{quote(revision, safe='')}?blobs=true")
    except (Unreachable, HubRefusal) as error:
        raise _as_quire_error(error, client, settings, ref.repo, f"revision {revision}") from None
    try:
        return _read_listing(answer)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{client.host} describes {ref.repo} in a way Quire does not understand ({error})."
        raise QuireError("hub_error", what, "Check HF_ENDPOINT.") from None


def _read_listing(answer: Any) -> RepoListing:
    commit = answer["sha"]
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError("its commit is not a hash")
    files = {}
    for sibling in answer["siblings"]:
        name = sibling["rfilename"]
        if not isinstance(name, str) or not is_safe_name(name):
            raise ValueError(f"the file name {name!r:.100} is not safe")
        lfs = sibling.get("lfs") or {}
        size, sha256 = lfs.get("size", sibling.get("size")), lfs.get("sha256")
        if not (size is None or (isinstance(size, int) and size >= 0)):
            raise ValueError(f"{name} has the size {size!r:.100}")
        if not (sha256 is None or (isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256))):
            raise ValueError(f"{name} has the SHA-256 {sha256!r:.100}")
        files[name] = RemoteFile(name, size, sha256)
    return RepoListing(commit, files)


def download_file(
    settings: HubSettings, repo: str, commit: str, remote: RemoteFile, target: Path, progress: Progress
) -> None:
    """Downloads one file of one commit; every failure is a `QuireError`. The caller holds the lock."""
    client = settings.client()
    try:
        download(client, f"/{repo}/resolve/{commit}/{quote(remote.name)}", remote, target, progress)
    except (Unreachable, HubRefusal) as error:
        raise _as_quire_error(error, client, settings, repo, remote.name) from None


def _as_quire_error(
    error: Unreachable | HubRefusal, client: WebClient, settings: HubSettings, repo: str, thing: str
) -> QuireError:
    host = client.host
    if isinstance(error, Unreachable):
        hint = "Check the network and try again; partial downloads are kept."
        return QuireError("hub_unreachable", f"{host} cannot be reached ({error}).", hint)
    if error.status in (401, 403):
        given = "the token given does not open it" if settings.token else "no token was given"
        if error.reason_code == "GatedRepo":
            hint = f"Accept its terms at {client.endpoint}/{repo}, then set HF_TOKEN or --hub-token."
            return QuireError("hub_denied", f"{repo} is gated, and {given}.", hint)
        what = f"{host} gives no access to {repo}: it does not exist, or is private or gated, and {given}."
        return QuireError("hub_denied", what, "Check the name, or set HF_TOKEN or --hub-token.")
    if error.status == 404:
        missing = {"RevisionNotFound": f"no {thing}", "EntryNotFound": f"no file {thing}"}.get(error.reason_code)
        what = f"{repo} has {missing} on {host}." if missing else f"{host} has no model {repo} (looked for {thing})."
        return QuireError("hub_not_found", what, "Check the name and the revision.")
    if error.status == 429 or error.status >= 500:
        return QuireError("hub_unreachable", f"{host} is unavailable or busy ({error}).", "Try again later.")
    return QuireError("hub_error", f"{host} returned {error} for {thing} of {repo}.", "Check HF_ENDPOINT.")
