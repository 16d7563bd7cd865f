"""Reads a model's pooling rule from the files of sentence-transformers (`modules.json` and a config) or from a GGUF.

`LLM.embed` and the HTTP process call `read_pooling`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from quire.files.source import ModelFiles
from quire.types import PoolingRule, QuireError

MAX_FILE = 1 << 20
MODULES = "modules.json"
DEFAULT_CONFIG = "1_Pooling/config.json"
_GGUF_KINDS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_KINDS = {"mean": "mean", "lasttoken": "last", "last": "last"}  # sentence-transformers -> engine
_MODE = re.compile(r"pooling_mode_(\w+?)(?:_tokens?)?")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")


def read_pooling(files: ModelFiles) -> PoolingRule | None:
    """Returns the pooling rule in the model's files; None if there is none."""
    if files.kind == "gguf":
        from quire.files.gguf import open_gguf

        return _from_gguf(open_gguf(files.path).metadata)
    return _from_folder(Path(files.path))


def _from_gguf(metadata: Any) -> PoolingRule | None:
    kind = _GGUF_KINDS.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))
    return None if kind is None else _rule(kind, True, "The GGUF file")


def _from_folder(folder: Path) -> PoolingRule | None:
    modules = _read(folder / MODULES)
    if modules is None:
        config = _read(folder / DEFAULT_CONFIG)
        return None if config is None else _rule(_kind_of(config), True, DEFAULT_CONFIG)
    if not isinstance(modules, list):
        raise _bad(folder / MODULES, "it is not a list")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules if isinstance(module, dict)}
    if "Pooling" not in kinds:
        return None
    place = str(kinds["Pooling"].get("path", ""))
    if not _FOLDER.fullmatch(place):
        raise _bad(folder / MODULES, f"the pooling's path is {place[:100]!r}")
    name = f"{place}/config.json"
    config = _read(folder / name)
    if config is None:
        raise QuireError("bad_config", f"{MODULES} names {name}, which is not there.", "Fetch the model again.")
    rule = _rule(_kind_of(config), "Normalize" in kinds, name)
    others = sorted(set(kinds) - set(_SUPPORTED_MODULES))
    if others:
        what = f"The model's {MODULES} has a module of type {others[0][:50]!r}, which is not supported."
        return PoolingRule(rule.kind, rule.normalize, "model", what)
    return rule


def _kind_of(config: Any) -> str:
    """Returns the pooling mode: named in the newer format, one boolean per mode in the older one."""
    if not isinstance(config, dict):
        return "none"
    named = config.get("pooling_mode")
    if named is not None:
        return "+".join(map(str, named)) if isinstance(named, list) else str(named)
    modes = [found[1] for key, value in config.items() if value is True and (found := _MODE.fullmatch(key))]
    return "+".join(modes) or "mean"


def _rule(kind: str, normalize: bool, where: str) -> PoolingRule:
    known = _KINDS.get(kind)
    if known is not None:
        return PoolingRule(known, normalize, "model")
    return PoolingRule(kind, normalize, "model", f"{where} requires the pooling {kind[:50]!r}, which is not supported.")


def _read(path: Path) -> Any:
    """Returns the content of a JSON file; None if it does not exist."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise _bad(path, "it is too large")
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise _bad(path, str(error)) from None
    except OSError as error:
        raise QuireError(
            "bad_config", f"{path.name} of the model cannot be read: {error.strerror}.", "Check its permissions."
        ) from None


def _bad(path: Path, why: str) -> QuireError:
    return QuireError("bad_config", f"{path.name} of the model is not valid: {why}.", "Fetch the model again.")
