"""Heads for multi-token prediction (MTP): a layer after a checkpoint's last, which proposes the token after the next.

The input of the layer at a position is the model's hidden state there and the embedding of the token after it: both
normed, joined, and projected to the model's width. A family returns its published form from `Model.head_form`;
`models.loading.head` builds an `MTPHead` of it and fills its weights. Drafts after the first take the head's own normed
output in place of the model's hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.layers.attention import AttentionPlan, plan_attention, plan_sampled_attention
from quire.layers.build import Build
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rope import Rope
from quire.layers.step import Step
from quire.types import CacheSpec

GROUP = "mtp"


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How a family publishes its head. Names are those of the checkpoint, without `.weight`."""

    embed_norm: str
    hidden_norm: str
    project: str
    norm: str  # after the layer
    width: int
    norm_eps: float
    make_layer: Callable[[Build], nn.Module]  # called with stream, angles and plan; its cache index is 0
    spec: CacheSpec  # of the model's attention layers
    rope: Rope
    norm_offset: float = 0.0  # added to the checkpoint's norm weights
    hidden_first: bool = False  # the hidden state precedes the embedding in the product
    blanks_first: bool = False  # the embedding is zero at position 0
    # Tensors that some checkpoints repeat: (the head's, the model's). A repeated one is shared.
    embedding: tuple[str, str] | None = None
    head: tuple[str, str] | None = None

    @property
    def repeats(self) -> list[tuple[str, str]]:
        return [names for names in (self.embedding, self.head) if names is not None]


def deepseek_form(
    layer: str,
    width: int,
    norm_eps: float,
    make_layer: Callable[[Build], nn.Module],
    spec: CacheSpec,
    rope: Rope,
    *,
    tied: bool,
) -> HeadForm:
    """Returns the form that DeepSeek V3 and GLM-4.5 publish. `layer`: prefix of the layer after the model's last."""
    embedding = "model.embed_tokens"
    return HeadForm(
        embed_norm=f"{layer}.enorm",
        hidden_norm=f"{layer}.hnorm",
        project=f"{layer}.eh_proj",
        norm=f"{layer}.shared_head.norm",
        width=width,
        norm_eps=norm_eps,
        make_layer=make_layer,
        spec=spec,
        rope=rope,
        blanks_first=True,
        embedding=(f"{layer}.embed_tokens", embedding),
        head=(f"{layer}.shared_head.head", embedding if tied else "lm_head"),
    )


class AttentionThenMLP(nn.Module):
    """A layer of an attention block and a feed-forward block."""

    def __init__(self, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        stream = self.attention(stream, angles, plan)
        return self.mlp(stream) if len(stream) else stream


class MTPHead(nn.Module):
    """Implements `DraftNetwork` with a checkpoint's head."""

    takes_hidden = True

    def __init__(self, form: HeadForm, model: Any, build: Build, own: Container[str] = ()):
        """`model`: the model whose embedding and head are shared. `own`: the head's names of tensors that differ from
        the model's, so that it needs its own."""
        super().__init__()
        self._form = form
        self.ops = build.ops
        self.vocab_size: int = model.vocab_size
        self.activation_elements: int = model.activation_elements + 2 * form.width
        self.specs = [replace(form.spec, group=GROUP, layers=(0,))]
        self.embed_norm = self._norm(form.embed_norm, build)
        self.hidden_norm = self._norm(form.hidden_norm, build)
        self.project = Linear(2 * form.width, [(form.project, form.width)], build=build)
        self.layer = form.make_layer(build)
        self.norm = self._norm(form.norm, build)
        self._shared: tuple[Any, Any] = (model.embedding, model.head)  # a tuple, so that they are no modules of its own
        self.embedding = self.head = None
        if form.embedding is not None and form.embedding[0] in own:
            self.embedding = Embedding(form.embedding[0], self.vocab_size, form.width, build)
        if form.head is not None and form.head[0] in own:
            self.head = Head(form.head[0], self.vocab_size, form.width, build)

    def forward(self, step: Step, hidden: Tensor | None, caches: Mapping[str, Tensor]) -> Tensor:
        """Computes the entries of a step; returns the normed hidden states `step.wanted`, [n, width]. hidden [tokens,
        width]"""
        assert hidden is not None
        form, spec = self._form, self.specs[0]
        plan = plan_attention(step, spec, caches[spec.group], self.ops)
        plan = plan_sampled_attention(plan, step, spec, caches[spec.group], self.ops)
        embedded = (self.embedding or self._shared[0])(step.tokens)
        if form.blanks_first:
            embedded = embedded.masked_fill(step.positions[:, None] == 0, 0)
        parts = self.embed_norm(embedded), self.hidden_norm(hidden)
        stream = self.project(torch.cat(parts[::-1] if form.hidden_first else parts, 1))
        stream = self.layer(stream, form.rope.angles(step.positions), plan)
        return self.norm(stream) if len(stream) else stream

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = (self.head or self._shared[1])(hidden)
        return logits

    def ignored_prefixes(self) -> tuple[str, ...]:
        return ()

    def ignored_patterns(self) -> tuple[str, ...]:
        return (".",)  # all that is not the head's is the model's

    def _norm(self, name: str, build: Build) -> RMSNorm:
        return RMSNorm(name, self._form.width, self._form.norm_eps, build, self._form.norm_offset)
