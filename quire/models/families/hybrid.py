"""A decoder with several kinds of blocks: attention, recurrent layers and feed-forward blocks, in any order.

Families define the order of blocks and build them. `HybridModel` runs them and declares their caches: pages for
attention, of keys and values or of latents, and a state slot per row for the recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from quire.kernels.recurrent_types import ConvShape, RecurrentShape
from quire.layers.attention import AttentionShape, plan_attention, plan_sampled_attention
from quire.layers.build import Build
from quire.layers.embedding import Embedding, Head
from quire.layers.kv_specs import kv_specs, refuse_whole_layers
from quire.layers.latent import LatentShape, latent_spec
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.state import plan_recurrent, state_spec
from quire.layers.rope import Rope
from quire.layers.step import Step
from quire.models.fields import check_heads, check_layer_types, flag, whole
from quire.models.model import Model
from quire.models.stages import WHOLE, Stage, keep_layers
from quire.types import CacheSpec, QuireError

BlockKind = Literal["attention", "recurrent", "parallel", "plain"]  # parallel: attention and a recurrent layer
KINDS_OF_CACHE: dict[str, tuple[BlockKind, ...]] = {
    "attention": ("attention", "parallel"),
    "recurrent": ("recurrent", "parallel"),
}
ATTENTION, STATE = "full", "state"  # cache groups; latent attention has its own name


@dataclass(frozen=True, slots=True)
class HybridShape:
    """What all hybrid families have. Other sizes are in the family's own config."""

    vocab_size: int
    width: int
    norm_eps: float
    max_positions: int
    tied: bool  # the head is the embedding
    attention: AttentionShape | LatentShape | None  # None: no layer attends
    recurrent: RecurrentShape | ConvShape | None
    blocks: tuple[BlockKind, ...]  # in order of execution; several may belong to one layer of the checkpoint
    embedding_scale: float = 1.0
    logit_scale: float = 1.0

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        *,
        norm_eps: float,
        max_positions: int,
        attention: AttentionShape | LatentShape | None,
        recurrent: RecurrentShape | ConvShape,
        blocks: tuple[BlockKind, ...],
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
    ) -> HybridShape:
        """Reads the fields with common names and adds what the family has read. `max_positions`: used if the config has
        none.
        """
        if all(kind == "plain" for kind in blocks):
            what = "No layer of this model attends or keeps a state: it would see one token at a time."
            raise QuireError("bad_config", what, "Check config.json.")
        return cls(
            vocab_size=whole(config, "vocab_size"),
            width=whole(config, "hidden_size"),
            norm_eps=norm_eps,
            max_positions=whole(config, "max_position_embeddings", max_positions),
            tied=flag(config, "tie_word_embeddings", False),
            attention=attention,
            recurrent=recurrent,
            blocks=blocks,
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
        )


@dataclass(frozen=True, slots=True)
class HybridNames:
    """Checkpoint names of the embedding, the last norm and the head."""

    embedding: str
    norm: str
    head: str = "lm_head"


class HybridModel(nn.Module, Model):
    """Runs the blocks of a `HybridShape`."""

    def __init__(
        self,
        shape: HybridShape,
        names: HybridNames,
        make_block: Callable[[int, int], nn.Module],
        rope: Rope | None,
        activation_elements: int,
        *,
        build: Build,
        norm_offset: float = 0.0,
    ):
        """`make_block(place, cache_index)` builds the block at this place; `cache_index` is its index in its cache
        group (0 for a block without a cache). `norm_offset`: added to the last norm's weights.
        """
        super().__init__()
        self.ops = build.ops
        self.stage = WHOLE
        self.vocab_size = shape.vocab_size
        self.max_positions = shape.max_positions
        self.activation_elements = activation_elements
        self.rope = rope
        self.specs = _cache_specs(shape, build)
        self._spec_of = {spec.kind: spec for spec in self.specs}
        self.kinds = shape.blocks
        self._last_mixer = max(place for place, kind in enumerate(shape.blocks) if kind != "plain")
        self.embedding = Embedding(names.embedding, shape.vocab_size, shape.width, build, shape.embedding_scale)
        seen: dict[BlockKind, int] = {"attention": 0, "recurrent": 0, "parallel": 0, "plain": 0}
        alone = "parallel" not in shape.blocks or {*shape.blocks} <= {"parallel", "plain"}
        assert alone, "the place of such a block is the same in both groups"
        blocks = []
        for place, kind in enumerate(shape.blocks):
            blocks.append(make_block(place, seen[kind]))
            seen[kind] += 1
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(names.norm, shape.width, shape.norm_eps, build, norm_offset)
        head = names.embedding if shape.tied else names.head
        self.head = Head(head, shape.vocab_size, shape.width, build, scale=shape.logit_scale)

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        """Computes the step's tokens and writes their state to `caches`. Returns the normed hidden states, [tokens,
        width], of the selected tokens.
        """
        attention: Any = None
        recurrent: Any = None
        paged, state = self._spec_of.get("paged"), self._spec_of.get("state")
        if paged is not None and paged.layers:
            attention = plan_attention(step, paged, caches[paged.group], self.ops)
        if state is not None and state.layers:
            recurrent = plan_recurrent(step, state, caches[state.group], self.ops)
        angles = None if self.rope is None else self.rope.angles(step.positions)
        stream = self.embedding(step.tokens) if step.stream is None else step.stream
        if self.stage.is_last and self._last_mixer < 0:  # a last stage of blocks that work per token
            stream = step.wanted(stream)
        for place, (kind, block) in enumerate(zip(self.kinds, self.blocks, strict=True)):
            is_last = place == self._last_mixer  # the following blocks work per token
            if is_last and paged is not None and kind in KINDS_OF_CACHE["attention"]:
                attention = plan_sampled_attention(attention, step, paged, caches[paged.group], self.ops)
            if kind == "attention":
                stream = block(stream, angles, attention)
            elif kind == "parallel":
                stream = block(stream, angles, attention, recurrent)
            elif kind == "recurrent":
                stream = block(stream, recurrent)
                stream = step.wanted(stream) if is_last else stream
            else:
                stream = block(stream)
            if not len(stream):
                return stream
        return self.norm(stream) if self.stage.is_last else stream

    def take_stage(self, stage: Stage) -> None:
        kept = stage.layers(len(self.blocks))
        self.stage, blocks = stage, list(self.blocks)[kept.start : kept.stop]
        self.specs = keep_layers(self.specs, kept)
        self._spec_of = {spec.kind: spec for spec in self.specs}
        groups = {kind: spec.layers for kind, spec in self._spec_of.items()}
        for index, block in zip(kept, blocks, strict=True):
            places = [layers.index(index) for layers in groups.values() if index in layers]
            for module in block.modules() if places else ():
                if hasattr(module, "cache_index"):
                    vars(module)["cache_index"] = places[0]  # in both groups the same
        self.kinds, self.blocks = self.kinds[kept.start : kept.stop], nn.ModuleList(blocks)
        mixers = [place for place, kind in enumerate(self.kinds) if kind != "plain"]
        self._last_mixer = mixers[-1] if stage.is_last and mixers else -1
        if not stage.is_first:
            del self.embedding
        if not stage.is_last:
            del self.norm, self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden [n, width] to logits [n, vocab]."""
        return self.head(hidden)


def _cache_specs(shape: HybridShape, build: Build) -> list[CacheSpec]:
    places = {
        kind: tuple(place for place, other in enumerate(shape.blocks) if other in keeping)
        for kind, keeping in KINDS_OF_CACHE.items()
    }
    specs = []
    if places["attention"]:
        assert shape.attention is not None
        specs.append(_paged_spec(shape.attention, places["attention"], build))
    if places["recurrent"]:
        assert shape.recurrent is not None
        specs.append(state_spec(STATE, places["recurrent"], shape.recurrent.slot_elements, build.page_tokens))
    return specs


def _paged_spec(attention: AttentionShape | LatentShape, layers: tuple[int, ...], build: Build) -> CacheSpec:
    if isinstance(attention, LatentShape):
        return latent_spec(attention, "absorbed", layers, build)
    share = build.heads(attention.num_heads, attention.num_kv_heads)
    refuse_whole_layers(build, "hybrid models")
    (spec,) = kv_specs(build, ATTENTION, layers, share.num_kv_heads, attention.head_dim)
    return spec


def block_activations(shape: HybridShape, inner_width: int) -> int:
    """Returns the peak elements alive per token, for feed-forward blocks that hold `inner_width` of them."""
    most = inner_width
    if shape.attention is not None:
        most = max(most, shape.attention.activation_elements)
    if shape.recurrent is not None:
        most = max(most, shape.recurrent.activation_elements)
    return 4 * shape.width + most


def check_attention(num_heads: int, num_kv_heads: int, head_dim: int, rope_dim: int | None = None) -> None:
    """Validates head counts, and how many elements of a head rope rotates."""
    rope_dim = head_dim if rope_dim is None else rope_dim
    check_heads(num_heads, num_kv_heads, head_dim)
    if not 0 < rope_dim <= head_dim or rope_dim % 2:
        what = f"Rope can't rotate {rope_dim} of the {head_dim} elements of a head."
        raise QuireError("bad_config", what, "Check partial_rotary_factor in config.json.")


def check_recurrent(shape: RecurrentShape, values: int | None = None) -> None:
    """Validates a recurrent shape. `values`: total width of heads' values, as other fields of the config give it."""
    if shape.num_heads % shape.num_groups:
        what = f"{shape.num_heads} recurrent heads can't be divided among {shape.num_groups} groups of keys."
        raise QuireError("bad_config", what, "Check config.json.")
    if values is not None and shape.values != values:
        what = f"{shape.num_heads} recurrent heads of {shape.value_dim} do not add up to {values}."
        raise QuireError("bad_config", what, "Check config.json.")


def mixers_with_mlps(
    config: Mapping[str, Any], known: Mapping[str, BlockKind], usual: Callable[[int], str]
) -> tuple[BlockKind, ...]:
    """Returns a mixer and a feed-forward block for every layer; the mixer by `layer_types`, or else by
    `usual(layer)`.
    """
    num_layers = whole(config, "num_hidden_layers", 32)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [usual(layer) for layer in range(num_layers)]
    check_layer_types(kinds, known, num_layers)
    return tuple(block for kind in kinds for block in (known[kind], "plain"))
