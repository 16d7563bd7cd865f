"""Real weights small enough to carry to a GPU machine that has no network: all layers of the built-in model as its GGUF
has them, four bits a weight, with the vocabulary cut to what a text uses and the commonest tokens.

    python -m tests.gpu.kl_pack make .scratch/kl/smollm2.npz     (here; takes the model from quire's own cache)

`test_kl` unpacks it there into a bfloat16 checkpoint, which Quire and `transformers` then both read: the cut vocabulary
changes the distribution, but the same for both. The text's token ids are in the pack too, under their new numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.files.gguf import open_gguf
from quire.files.source import resolve_model
from quire.kernels.formats.gguf_blocks import FORMATS, dequantize
from quire.models.gguf import checkpoint as gguf
from quire.models.gguf.tensor_names import hf_name
from quire.text.loading import load_tokenizer

NUM_WINDOWS, WINDOW = 8, 256  # of text
COMMON_IDS = 2000  # the first ones: a byte-pair vocabulary is in order of frequency
TEXT = ("README.md", "docs/architecture.md", "docs/performance.md", "CONTRIBUTING.md")
EMBEDDING = "model.embed_tokens.weight"


def make(target: Path, model: str = "smollm2") -> None:
    files = resolve_model(model, offline=True)
    file, tokenizer = open_gguf(files.path), load_tokenizer(files)
    assert tokenizer is not None
    root = Path(__file__).parents[2]
    ids = tokenizer.encode("\n\n".join((root / name).read_text() for name in TEXT))[: NUM_WINDOWS * WINDOW]
    kept = sorted({*ids, *range(COMMON_IDS)})
    config = gguf.read_config(file)
    places = {old: new for new, old in enumerate(kept)}
    parts: dict[str, np.ndarray] = {"tokens": np.array([places[i] for i in ids], np.int32).reshape(-1, WINDOW)}
    for tensor in file.tensors.values():
        name = hf_name(tensor.name)
        form = FORMATS[tensor.type.name]
        row_bytes = int(np.prod(tensor.shape[1:])) // form.elements * form.num_bytes
        raw = torch.from_numpy(np.array(tensor.data)).view(tensor.shape[0], row_bytes) if row_bytes else None
        if raw is None or len(tensor.shape) == 1:
            raw = torch.from_numpy(np.array(tensor.data)).view(1, -1)
        if gguf.is_permuted(file, name):
            raw = gguf.unpermute(raw, config["head_dim"])
        shape = list(tensor.shape)
        if name == EMBEDDING:
            raw, shape = raw[kept], [len(kept), *shape[1:]]
        key = json.dumps({"name": name, "type": tensor.type.name, "shape": shape})
        parts[key.replace("/", "")] = raw.numpy()
    config |= {"vocab_size": len(kept), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config["rope_parameters"] = {k: v for k, v in config["rope_parameters"].items() if v is not None}
    parts["config"] = np.frombuffer(json.dumps(config).encode(), np.uint8)
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **parts)  # type: ignore[arg-type]
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB, {len(kept)} of {file_vocab(file)} tokens kept")


def file_vocab(file: Any) -> int:
    return int(file.tensors["token_embd.weight"].shape[0])


def unpack(pack: Path, folder: Path) -> torch.Tensor:
    """Writes config.json and model.safetensors in bfloat16; returns the text, [windows, tokens]."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    with np.load(pack) as parts:
        for key in parts.files:
            if key.startswith("{"):
                fields = json.loads(key)
                raw = torch.from_numpy(parts[key]).reshape(-1)
                tensors[fields["name"]] = dequantize(raw, fields["type"]).view(fields["shape"]).to(torch.bfloat16)
        config, tokens = json.loads(bytes(parts["config"])), torch.from_numpy(parts["tokens"]).long()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tokens


if __name__ == "__main__":
    assert sys.argv[1:2] == ["make"] and len(sys.argv) == 3, __doc__
    make(Path(sys.argv[2]))
