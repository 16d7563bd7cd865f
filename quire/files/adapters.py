"""Reads the files of a LoRA adapter, without torch: its config, which of its fields matter, and its digest.

The front process and the engine read the same folder and come to the same digest, which is the adapter's identity:
equal bytes are one adapter, under whatever name. `models.adapters` reads the tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from quire.types import QuireError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ_BYTES = 1 << 22
DIGEST_BYTES = 16
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 4096


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The fields of an adapter_config.json that change what the adapter computes."""

    rank: int
    alpha: float
    is_rank_stabilized: bool = False  # the scale is alpha / sqrt(rank) instead of alpha / rank
    ranks: Mapping[str, int] = field(default_factory=dict)  # of modules whose names match the pattern
    alphas: Mapping[str, float] = field(default_factory=dict)
    saved_modules: tuple[str, ...] = ()  # modules that the adapter replaces as a whole

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of B A in a module, by its name below the model."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _names(pattern, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _names(pattern: str, module: str) -> bool:
    """Returns whether a key of `rank_pattern` or `alpha_pattern` is for this module."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error:
        return False


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter on disk. Its digest is its identity."""

    path: Path
    weights: Path
    digest: str
    config: LoraConfig | None  # None: a GGUF file, which has its own
    base: str = ""  # the name of the model that it was trained on, as the files say

    @property
    def kind(self) -> str:
        return "gguf" if self.config is None else "peft"


def read_adapter(path: str | Path) -> AdapterFiles:
    """Returns the adapter in a PEFT folder or a GGUF file. Raises one clear line for anything else."""
    path = Path(path).expanduser()
    try:
        if path.is_file() and path.suffix == ".gguf":
            return AdapterFiles(path, path, _digest(b"gguf", path), None)
        if not path.is_dir():
            raise _bad(path, "it is neither a folder nor a GGUF file", "Give a PEFT folder or a GGUF adapter.")
        config, weights = path / CONFIG, path / WEIGHTS
        if not config.is_file():
            raise _bad(path, f"it has no {CONFIG}", "Give the folder that PEFT's save_pretrained wrote.")
        if not weights.is_file():
            pickled = " but a pickle, which could run any code" if (path / "adapter_model.bin").exists() else ""
            raise _bad(path, f"it has no {WEIGHTS}{pickled}", "Save it with safe_serialization=True.")
        if config.stat().st_size > MAX_CONFIG_BYTES:
            raise _bad(path, f"its {CONFIG} has more than {MAX_CONFIG_BYTES} bytes", "Fetch it again.")
        text = config.read_bytes()
        fields = _parse(path, text)
        return AdapterFiles(
            path, weights, _digest(b"peft" + text, weights), _read_config(path, fields), _base_of(fields)
        )
    except OSError as error:
        raise _bad(path, f"it can't be read ({error.strerror})", "Check the path and its permissions.") from None


def is_unchanged(files: AdapterFiles) -> bool:
    """Whether the files still have the adapter's digest."""
    try:
        return read_adapter(files.path).digest == files.digest
    except QuireError:
        return False


def _digest(head: bytes, weights: Path) -> str:
    """Returns the digest of a config and a file's bytes."""
    hashed = blake2b(b"quire/adapter/1" + len(head).to_bytes(8, "little") + head, digest_size=DIGEST_BYTES)
    with open(weights, "rb") as file:
        while block := file.read(READ_BYTES):
            hashed.update(block)
    return hashed.hexdigest()


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its {CONFIG} is not valid JSON ({error})", "Fetch it again.") from None
    if not isinstance(fields, dict):
        raise _bad(path, f"its {CONFIG} is not a JSON object", "Fetch it again.")
    return fields


def _base_of(fields: Mapping[str, Any]) -> str:
    base = fields.get("base_model_name_or_path")
    return base if isinstance(base, str) else ""


def _read_config(path: Path, fields: Mapping[str, Any]) -> LoraConfig:
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise _bad(path, f"its type is {kind}", "Only LoRA adapters are supported.")
    for name, what in (
        ("use_dora", "DoRA"),
        ("use_qalora", "QALoRA"),
        ("lora_bias", "a bias of lora_B"),
        ("trainable_token_indices", "single trained tokens"),
        ("arrow_config", "Arrow routing"),
        ("alora_invocation_tokens", "activation by an invocation sequence (aLoRA)"),
    ):
        if fields.get(name):
            raise _bad(
                path, f"it uses {what}, which is not supported", "Merge it into the weights, or train it without."
            )
    if fields.get("bias", "none") != "none":
        raise _bad(path, f"it changes biases (bias={fields['bias']!r})", "Train it with bias='none'.")
    saved = fields.get("modules_to_save") or []
    ranks, alphas = fields.get("rank_pattern") or {}, fields.get("alpha_pattern") or {}
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    good = _is_number(rank) and int(rank) == rank and 1 <= rank <= MAX_RANK and _is_number(alpha)
    good = good and isinstance(ranks, dict) and isinstance(alphas, dict) and all(map(_is_number, alphas.values()))
    if not good or not isinstance(saved, list):
        raise _bad(path, f"its {CONFIG} has no valid r, lora_alpha or patterns", "Fetch it again.")
    return LoraConfig(int(rank), float(alpha), bool(fields.get("use_rslora")), ranks, alphas, tuple(map(str, saved)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bad(path: Path, why: str, hint: str) -> QuireError:
    return QuireError("bad_adapter", f"{path} is not a usable adapter: {why}.", hint, "adapter")


# ---------------------------------------------------------------------------------------------------------------------
# Names

MAX_NAME = 200


class NamedAdapters:
    """The adapters that requests can choose, by name. A name is only a name: caches and slots go by the digest."""

    def __init__(self, taken: Sequence[str] = ()):
        """`taken`: names of the base model."""
        self._taken = frozenset(taken)
        self._files: dict[str, AdapterFiles] = {}
        self._nameless: dict[str, AdapterFiles] = {}  # by digest: those that lost their names

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, name: str) -> AdapterFiles:
        """Returns the adapter of this name; raises for an unknown one."""
        if name not in self._files:
            shown = ", ".join(map(repr, list(self._files)[:8])) or "none"
            what = f"There is no adapter {name[:MAX_NAME]!r}. Loaded are: {shown}."
            raise QuireError("unknown_adapter", what, "Load it first.", "model")
        return self._files[name]

    def check_free(self, name: str, *, replaces: bool = False) -> None:
        """Raises for a name that is not usable or is taken. `replaces`: an adapter may have it."""
        if not name or len(name) > MAX_NAME or any(ord(char) < 32 or char in ",=" for char in name):
            what = f"{name[:40]!r} is not a usable adapter name."
            hint = f"Use 1 to {MAX_NAME} characters without a comma or an equals sign."
            raise QuireError("invalid_parameter", what, hint, "lora_name")
        if name in self._taken:
            raise QuireError("adapter_exists", f"{name!r} is the base model's name.", "Use another one.", "lora_name")
        if name in self._files and not replaces:
            what = f"There is an adapter {name!r} already ({self._files[name].path})."
            raise QuireError("adapter_exists", what, "Unload it first, or use another name.", "lora_name")

    def put(self, name: str, files: AdapterFiles) -> AdapterFiles | None:
        """Gives a name to an adapter; returns the one that had it."""
        before = self._files.get(name)
        self._files[name] = files
        self._nameless.pop(files.digest, None)
        if before is not None and not self.has_digest(before.digest):
            self._nameless[before.digest] = before
        return before

    def remove(self, name: str) -> AdapterFiles:
        """Takes the name away; raises for an unknown one."""
        files = self[name]
        del self._files[name]
        if not self.has_digest(files.digest):
            self._nameless[files.digest] = files
        return files

    def needed(self, digests: Iterable[str | None]) -> dict[str, AdapterFiles]:
        """Returns all adapters with a name, and those without that open requests with these digests use."""
        used = set(digests)
        self._nameless = {digest: files for digest, files in self._nameless.items() if digest in used}
        return self._files | {f"(unloaded) {digest}": files for digest, files in self._nameless.items()}

    def has_digest(self, digest: str) -> bool:
        """Whether any name is for the adapter with this digest."""
        return any(files.digest == digest for files in self._files.values())


def parse_adapters(text: str | None) -> dict[str, str]:
    """Returns name -> path of a setting such as "poet=./poet,clerk=./clerk"."""
    found: dict[str, str] = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        name, equals, path = item.partition("=")
        if not equals or not name.strip() or not path.strip():
            what = f"{item.strip()!r} is not an adapter."
            raise QuireError("invalid_setting", what, "Write name=path.", "adapter")
        if name.strip() in found:
            raise QuireError("invalid_setting", f"The adapter {name.strip()!r} is given twice.", param="adapter")
        found[name.strip()] = path.strip()
    return found
