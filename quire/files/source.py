"""Resolves a model name to files on disk: a built-in name, a folder, a GGUF file or a hub id.

`startup` and the commands call `resolve_model`. Modules for networks and archives are imported only for a download, so
that other starts stay fast.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quire.files.builtin import BUILT_IN, fetch_builtin
from quire.files.gguf_parts import first_part, is_vision_part, list_parts, models_among
from quire.files.progress import Progress, default_progress
from quire.files.safetensors import list_shards
from quire.files.settings import HubSettings
from quire.types import QuireError

MAX_CONFIG_BYTES = 16 << 20
GGUF_MAGIC = b"GGUF"
QUANTIZED_ELSEWHERE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}  # file -> method
_PICKLES = ("*.bin", "*.pth", "*.pt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk."""

    kind: Literal["folder", "gguf"]
    path: Path  # the folder, or the GGUF file
    name: str  # "smollm2", "owner/name", or the name of the folder or file
    config: dict[str, Any] | None  # config.json; None for a GGUF file, which includes its config
    generation_config: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # origin, for display
    vision_part: str | None = None  # name of the GGUF file beside the model with its vision part, which is not loaded


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    random_weights: bool = False,
    progress: Progress | None = None,
) -> ModelFiles:
    """Returns the files of `model`, downloading them if needed. With `random_weights`, config.json is enough."""
    model = os.fspath(model)
    if not model or "\0" in model:
        raise QuireError("model_not_found", "No model was named.", _known_names(), param="model")
    progress = progress or default_progress()
    if model in BUILT_IN or _is_local(model):
        if revision is not None:
            what = f"revision={revision!r} makes no sense for {model}, which is not a hub id."
            raise QuireError("invalid_parameter", what, "Leave it out.", param="revision")
        if model in BUILT_IN:
            return _from_builtin(model, token, offline, progress)
        return _from_path(Path(os.path.expanduser(model)), random_weights)
    return _from_hub(model, revision, token, offline, random_weights, progress)


def _known_names() -> str:
    return f"Give a built-in name ({', '.join(BUILT_IN)}), a folder, a GGUF file or a hub id such as owner/name."


def _is_local(model: str) -> bool:
    """Whether the name exists as a path or is written like one."""
    return model.startswith(("/", ".", "~")) or os.path.isabs(model) or os.path.lexists(model)


def _from_builtin(model: str, token: str | None, offline: bool, progress: Progress) -> ModelFiles:
    built_in = BUILT_IN[model]
    path = fetch_builtin(built_in, HubSettings.from_environment(token, offline), progress)
    title = f"built-in model {built_in.title} ({built_in.license})"
    return ModelFiles("gguf", path, model, None, dict(built_in.sampling), title)


def _from_hub(
    model: str, revision: str | None, token: str | None, offline: bool, random_weights: bool, progress: Progress
) -> ModelFiles:
    from quire.files.hub import fetch_repo, parse_hub_id

    ref = parse_hub_id(model)
    if ref is None or (ref.file is None and model.endswith(".gguf")):
        raise _unknown(model)
    settings = HubSettings.from_environment(token, offline)
    path, commit = fetch_repo(ref, revision, settings, progress, with_weights=not random_weights)
    source = f"hub model {ref.repo} at commit {commit}"
    if path.is_dir():
        return _read_folder(path, model, source, random_weights)
    return _read_gguf(path, model, source)


def _unknown(model: str) -> QuireError:
    near = difflib.get_close_matches(model.lower(), BUILT_IN, n=1, cutoff=0.5)
    if near:
        hint = f"Did you mean {near[0]}?"
    elif model.endswith(".gguf"):
        hint = "Check the path."
    else:
        hint = _known_names()
    return QuireError(
        "model_not_found", f"There is no model, file or folder named {model!r:.200}.", hint, param="model"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Local files


def _from_path(path: Path, random_weights: bool) -> ModelFiles:
    try:
        if path.name == "config.json" and path.is_file():
            path = path.parent
        if path.is_dir():
            path = _lone_gguf(path, random_weights) or path
        if path.is_dir():
            return _read_folder(path, path.resolve().name, f"folder {path}", random_weights)
        if not path.exists():
            raise QuireError("model_not_found", f"{path} does not exist.", "Check the path.", param="model")
        return _read_gguf(path, path.stem, f"file {path}")
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror or error}."
        raise QuireError("model_not_found", what, "Check the path and its permissions.", param="model") from None


def _lone_gguf(folder: Path, random_weights: bool) -> Path | None:
    """Returns the only GGUF file of a folder; None if it has none or is a safetensors model."""
    if (folder / "config.json").is_file() and (random_weights or next(folder.glob("*.safetensors"), None)):
        return None
    ggufs = models_among(path.name for path in folder.glob("*.gguf"))
    if len(ggufs) > 1:
        names = ", ".join(ggufs[:12])
        raise QuireError("not_a_model", f"{folder} holds {len(ggufs)} GGUF files.", f"Name one of them: {names}.")
    if not ggufs:
        return None
    parts = [folder / name for name in list_parts(ggufs[0])]
    return next((path for path in parts if path.exists()), parts[0])


def _vision_part(path: Path) -> str | None:
    """Returns the name of the one vision part beside the only model of a folder."""
    names = [other.name for other in path.parent.glob("*.gguf")]
    visions = [name for name in names if is_vision_part(name)]
    return visions[0] if len(visions) == 1 and len(models_among(names)) == 1 else None


def _read_gguf(path: Path, name: str, source: str) -> ModelFiles:
    """Checks the magic bytes of a GGUF file; `open_gguf` checks the rest."""
    if not path.is_file():
        raise QuireError("not_a_model", f"{path} is neither a file nor a folder.", param="model")
    path = first_part(path)
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != GGUF_MAGIC:
        hint = "Give its folder." if path.suffix == ".safetensors" else "Give a GGUF file or a model folder."
        raise QuireError("not_a_model", f"{path} is not a GGUF file.", hint, param="model")
    return ModelFiles("gguf", path, name, None, source=source, vision_part=_vision_part(path))


def _read_folder(path: Path, name: str, source: str, random_weights: bool) -> ModelFiles:
    config_path = path / "config.json"
    if not config_path.is_file():
        looked_for = "config.json" if random_weights else "config.json with *.safetensors, or one *.gguf"
        raise QuireError("not_a_model", f"{path} is not a model folder: looked for {looked_for}.", param="model")
    config = _read_json(config_path)
    if not config.get("quantization_config"):
        config |= _quantized_elsewhere(path)
    generation_path = path / "generation_config.json"
    generation_config = _read_json(generation_path) if generation_path.is_file() else {}
    if not random_weights and not list_shards(path):
        if any(next(path.glob(pattern), None) for pattern in _PICKLES):
            what = f"{path} has its weights in pickle files only, which can run code and are not read."
            raise QuireError("not_a_model", what, "Convert them to safetensors.", param="model")
        what = f"{path} has a config.json but no weights: looked for model.safetensors or *.safetensors with an index."
        raise QuireError("not_a_model", what, "Add them, or use random_weights for a speed measurement.", param="model")
    return ModelFiles("folder", path, name, config, generation_config, source)


def _quantized_elsewhere(folder: Path) -> dict[str, Any]:
    """Returns the quantization settings that older tools of NVIDIA and GPTQ wrote to separate files."""
    for name, method in QUANTIZED_ELSEWHERE.items():
        if (folder / name).is_file():
            return {"quantization_config": {"quant_method": method, **_read_json(folder / name)}}
    return {}


def named_float(found: dict[str, Any]) -> Any:
    """Decodes {"__float__": "Infinity"}, which transformers writes because JSON has no infinity."""
    named = found.get("__float__")
    return float(named) if len(found) == 1 and isinstance(named, str) else found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError("it is too large")
        content = json.loads(path.read_bytes(), object_hook=named_float)
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise QuireError("bad_config", f"{path} is not valid JSON: {error}.", "Fetch the model again.") from None
    except OSError as error:
        raise QuireError("bad_config", f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from None
    return content
