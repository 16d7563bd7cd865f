"""Tiny random checkpoints with a head for multi-token prediction, in each published form, and the plain mathematics.

The layer of a head is the last layer of a `transformers` model with one layer more than is published, saved under the
head's names. `PlainHead` is written from the formats' descriptions and computes all positions at once, without a
cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu.families.experts import GROUPS, LATENT, draw_sharp
from tests.cpu.families.harness import TINY, Draw, Family, draw_wide, save_checkpoint
from tests.cpu.families.qwen import MiMoConfig
from tests.cpu.families.qwen_hybrid import EXPERTS, RECURRENT, draw

WIDTH = TINY["hidden_size"]
HYBRID = {**RECURRENT, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
QWEN_TEXT = {name: value for name, value in TINY.items() if name != "intermediate_size"}
NORMAL = {"embed": "enorm", "hidden": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}


@dataclass(frozen=True)
class Published:
    """A published form: a config with one layer more than the model has, and the head's names."""

    config: Callable[[], Any]
    draw: Draw
    layer: str  # the layer's prefix in the checkpoint
    names: dict[str, str]  # embed, hidden, project, norm: of the other tensors, without `.weight`
    count: str | None  # field of config.json for the number of such layers
    model_class: str | None = None
    hidden_first: bool = False
    blanks_first: bool = False
    own_tables: bool = False  # an embedding and a head of its own, under the layer's prefix
    norm_offset: float = 0.0


def _under(prefix: str, names: dict[str, str]) -> dict[str, str]:
    return {kind: f"{prefix}.{name}" for kind, name in names.items()}


QWEN_NAMES = _under("mtp", {"embed": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "project": "fc",
                            "norm": "norm"})  # fmt: skip
MIMO_NAMES = _under("model.mtp_layers.0", {"embed": "token_layernorm", "hidden": "hidden_layernorm",
                                           "project": "input_proj", "norm": "final_layernorm"})  # fmt: skip
THREE = {**TINY, "num_hidden_layers": 3}
FORMS = {
    "deepseek_v3": Published(
        lambda: transformers.DeepseekV3Config(**{**LATENT, **GROUPS, "num_hidden_layers": 3}, q_lora_rank=28),
        draw_sharp, "model.layers.2", _under("model.layers.2", NORMAL), "num_nextn_predict_layers",
        blanks_first=True),
    "deepseek_v3, own tables": Published(
        lambda: transformers.DeepseekV3Config(**{**LATENT, **GROUPS, "num_hidden_layers": 3}, q_lora_rank=28),
        draw_sharp, "model.layers.2", _under("model.layers.2", NORMAL), "num_nextn_predict_layers",
        blanks_first=True, own_tables=True),
    "glm4_moe": Published(
        lambda: transformers.Glm4MoeConfig(**THREE, **GROUPS, head_dim=32, use_qk_norm=True, attention_bias=True),
        draw_sharp, "model.layers.2", _under("model.layers.2", NORMAL), "num_nextn_predict_layers",
        blanks_first=True),
    "qwen3_next": Published(
        lambda: transformers.Qwen3NextConfig(**{**TINY, **HYBRID, **EXPERTS}), draw, "mtp.layers.0", QWEN_NAMES, None,
        norm_offset=1.0),
    "qwen3_5_text": Published(
        lambda: transformers.Qwen3_5TextConfig(**{**TINY, **HYBRID, "attention_bias": True}),
        draw, "mtp.layers.0", QWEN_NAMES, "mtp_num_hidden_layers", norm_offset=1.0),
    "qwen3_5_moe_text": Published(
        lambda: transformers.Qwen3_5MoeTextConfig(**{**QWEN_TEXT, **HYBRID, **EXPERTS}),
        draw, "mtp.layers.0", QWEN_NAMES, "mtp_num_hidden_layers", norm_offset=1.0),
    "mimo": Published(
        lambda: MiMoConfig(**THREE), draw_wide, "model.mtp_layers.0", MIMO_NAMES, "num_nextn_predict_layers",
        "Qwen2ForCausalLM", hidden_first=True),
}  # fmt: skip


def save_with_head(form: Published, folder: Path, seed: int = 0) -> PlainHead:
    """Write a checkpoint with a head into `folder`; returns the plain mathematics of its head."""
    family = Family("tiny", form.config, form.draw, form.model_class)
    model = save_checkpoint(family, folder, seed)
    path, config_path = folder / "model.safetensors", folder / "config.json"
    config, tensors = json.loads(config_path.read_text()), load_file(path)
    last = config["num_hidden_layers"] - 1
    old = f"model.layers.{last}."
    tensors = {name.replace(old, f"{form.layer}.") if name.startswith(old) else name: tensor
               for name, tensor in tensors.items()}  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 1)
    more = {name: torch.empty(WIDTH) for kind, name in form.names.items() if kind != "project"}
    for tensor in more.values():
        tensor.normal_(1.0 - form.norm_offset, 0.3, generator=generator)
    more[form.names["project"]] = torch.empty(WIDTH, 2 * WIDTH).normal_(0.0, 0.15, generator=generator)
    tables = {"embed_tokens": model.model.embed_tokens.weight, "shared_head.head": model.lm_head.weight}
    for name, table in tables.items() if form.blanks_first else ():  # these forms repeat both
        own = torch.empty_like(table).normal_(0.0, 0.15, generator=generator) if form.own_tables else table
        more[f"{form.layer}.{name}"] = own.detach().clone()
    tensors |= {f"{name}.weight": tensor for name, tensor in more.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config["num_hidden_layers"] = last
    for kinds in ("layer_types", "mlp_layer_types"):
        if config.get(kinds) is not None:
            config[kinds] = config[kinds][:last]
    if form.count is not None:
        config[form.count] = 1
    config_path.write_text(json.dumps(config))
    layer, model.config.num_hidden_layers = model.model.layers[last], last
    model.model.layers = model.model.layers[:last]
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = model.config.layer_types[:last]
    return PlainHead(form, model, layer, {name: tensor.detach() for name, tensor in more.items()})


class PlainHead:
    """A head as its format is described."""

    def __init__(self, form: Published, model: Any, layer: Any, tensors: dict[str, Tensor]):
        self.form, self.model = form, model
        self._layer, self._tensors = layer, tensors
        self._embedding = tensors.get(f"{form.layer}.embed_tokens", model.model.embed_tokens.weight)
        self._head = tensors.get(f"{form.layer}.shared_head.head", model.lm_head.weight)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The tokens that most likely follow `tokens`, whose last one the model has just sampled."""
        model = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]  # normed
        hidden, shifted, found = model, list(tokens[1:]), []
        for _ in range(count):
            out = self._run(shifted, hidden)
            found.append(int((out[-1] @ self._head.T).argmax()))
            hidden, shifted = torch.cat((hidden, out[-1:])), [*shifted, found[-1]]
        return found

    def _run(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """The normed output of the layer; entry p has the hidden state at p and the token after it."""
        names, num = self.form.names, len(tokens)
        embedded = self._embedding[torch.tensor(tokens)].clone()
        if self.form.blanks_first:
            embedded[0] = 0
        parts = self._norm(embedded, names["embed"]), self._norm(hidden, names["hidden"])
        joined = torch.cat(parts[::-1] if self.form.hidden_first else parts, 1)
        stream = (joined @ self._tensors[names["project"]].T)[None]
        positions = torch.arange(num)[None]
        mask = torch.full((num, num), float("-inf")).triu(1)[None, None]
        angles = self.model.model.rotary_emb(stream, positions)
        out = self._layer(stream, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        return self._norm(out.reshape(num, -1), names["norm"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        weight = self._tensors[name] + self.form.norm_offset
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight
