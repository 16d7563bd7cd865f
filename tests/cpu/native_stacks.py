"""Small random decoders as `StackPlan`s, from named float weights that a test may change before they are packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.kernels.expert_types import GatedActivation, Routing
from quire.kernels.native.experts import PackedExperts
from quire.kernels.native.hooks import Hook
from quire.kernels.native.library import Native
from quire.kernels.native.matrix import PackedLinear, PackedMatrix, pack_floats
from quire.kernels.native.mixture import MixturePlan
from quire.kernels.native.stack import GroupInputs, LayerPlan, NormPlan, Stack, StackPlan

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS, EXPERTS = 64, 4, 2, 32, 96, 50, 3, 5
Q_WIDTH, KV_WIDTH = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
PAGE_TOKENS, NUM_PAGES = 8, 16

Name = tuple[str, int, int]  # product, layer (-1: the head), expert (-1: none)


@dataclass(frozen=True)
class Shape:
    mixture: bool = False
    shared: bool = False  # the mixture has a shared expert
    weighted: bool = False  # and that has a weight of its own for each token
    gated: bool = True
    after_norms: bool = False
    parallel: bool = False
    biases: bool = False


SHAPES = {
    "dense": Shape(),
    "biases": Shape(biases=True),
    "no-gate": Shape(gated=False),
    "after-norms": Shape(after_norms=True),
    "parallel": Shape(parallel=True),
    "mixture": Shape(mixture=True),
    "shared": Shape(mixture=True, shared=True),
    "weighted": Shape(mixture=True, shared=True, weighted=True, after_norms=True),
}


def list_products(shape: Shape) -> dict[Name, tuple[int, int]]:
    """Every product of a stack and of the head, with its (rows, columns)."""
    found: dict[Name, tuple[int, int]] = {("head", -1, -1): (VOCAB, WIDTH)}
    gates = ("gate", "up") if shape.gated else ("up",)
    for layer in range(LAYERS):
        found["query", layer, -1] = (Q_WIDTH, WIDTH)
        found["key", layer, -1] = found["value", layer, -1] = (KV_WIDTH, WIDTH)
        found["out", layer, -1] = (WIDTH, Q_WIDTH)
        if not shape.mixture:
            found |= {(name, layer, -1): (INNER, WIDTH) for name in gates} | {("down", layer, -1): (WIDTH, INNER)}
            continue
        found["router", layer, -1] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            found["gate", layer, expert] = found["up", layer, expert] = (INNER, WIDTH)
            found["down", layer, expert] = (WIDTH, INNER)
        if shape.shared:
            found["shared_gate", layer, -1] = found["shared_up", layer, -1] = (INNER, WIDTH)
            found["shared_down", layer, -1] = (WIDTH, INNER)
        if shape.weighted:
            found["shared_weight", layer, -1] = (1, WIDTH)
    return found


def draw_weights(shape: Shape, seed: int) -> dict[Name, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) * 0.15 for name, size in list_products(shape).items()}


@dataclass
class SmallStack:
    """A stack and a head with these weights; runs prompts of several rows, each from its first token."""

    native: Native
    shape: Shape
    weights: dict[Name, Tensor]
    form: str = "F32"
    reduction: Hook | None = None
    seed: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        vocab = self.draw(VOCAB, WIDTH)
        layers = [self.plan_layer(index) for index in range(LAYERS)]
        plan = StackPlan(
            embedding=self.pack(vocab),
            width=WIDTH,
            layers=layers,
            norm=self.norm(),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            inner_width=0 if self.shape.mixture else INNER,
            frequencies=1e4 ** -(torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM).unsqueeze(0).contiguous(),
            rope_scales=torch.ones(1),
            activation="silu" if self.shape.gated else "gelu",
            has_gate=self.shape.gated,
            takes_mean=False,
            is_parallel=self.shape.parallel,
            is_wide=False,
            eps=1e-5,
            attention_scale=HEAD_DIM**-0.5,
            softcap=None,
            embedding_scale=1.0,
            residual_scale=1.0,
        )
        self.stack = Stack(self.native, plan, self.reduction)
        self.head = PackedLinear([self.pack(self.weights["head", -1, -1])])

    def draw(self, *size: int) -> Tensor:
        drawn = torch.randn(size, generator=self.random)
        self.kept.append(drawn)
        return drawn

    def norm(self) -> NormPlan:
        weight = 1 + 0.2 * torch.randn(WIDTH, generator=self.random)
        self.kept.append(weight)
        return NormPlan(weight)

    def pack(self, matrix: Tensor, form: str | None = None) -> PackedMatrix:
        read = lambda first, count: matrix[first : first + count]  # noqa: E731
        return pack_floats(self.native, form or self.form, *matrix.shape, read)

    def linear(self, *names: Name, form: str | None = None, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear([self.pack(self.weights[name], form) for name in names], bias)

    def bias(self, rows: int) -> Tensor | None:
        return self.draw(rows) if self.shape.biases else None

    def plan_layer(self, layer: int) -> LayerPlan:
        shape, after = self.shape, self.shape.after_norms
        qkv = [(name, layer, -1) for name in ("query", "key", "value")]
        up = [(name, layer, -1) for name in (("gate", "up") if shape.gated else ("up",))]
        dense = not shape.mixture
        return LayerPlan(
            before_attention=self.norm(),
            after_attention=self.norm() if after else None,
            before_mlp=self.norm(),
            after_mlp=self.norm() if after else None,
            qkv=self.linear(*qkv, bias=self.bias(Q_WIDTH + 2 * KV_WIDTH)),
            out=self.linear(("out", layer, -1), bias=self.bias(WIDTH)),
            up=self.linear(*up, bias=self.bias(INNER * len(up))) if dense else None,
            down=self.linear(("down", layer, -1), bias=self.bias(WIDTH)) if dense else None,
            mixture=None if dense else self.plan_mixture(layer),
            q_norm=None,
            k_norm=None,
            sinks=None,
            group=0,
            cache_index=layer,
            rope=0,
        )

    def plan_mixture(self, layer: int) -> MixturePlan:
        shape = self.shape
        ups = [self.linear(("gate", layer, e), ("up", layer, e)) for e in range(EXPERTS)]
        downs = [self.linear(("down", layer, e)) for e in range(EXPERTS)]
        shared: dict[str, Any] = {}
        if shape.shared:
            shared["shared_up"] = self.linear(("shared_gate", layer, -1), ("shared_up", layer, -1))
            shared["shared_down"] = self.linear(("shared_down", layer, -1))
        if shape.weighted:
            shared["shared_gate"] = self.linear(("shared_weight", layer, -1), form="F32")
        router = self.linear(("router", layer, -1), form="F32")
        return MixturePlan(PackedExperts(ups, downs, GatedActivation()), router, Routing(EXPERTS, 2), **shared)

    def run(self, counts: list[int], wanted: list[int] | None = None, adapters: Hook | None = None) -> Tensor:
        """Returns the logits of the wanted tokens (None: all) of rows of so many tokens."""
        total = sum(counts)
        tokens = (torch.arange(total) * 7 + 3) % VOCAB
        positions = torch.cat([torch.arange(count) for count in counts])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        pages = torch.arange(len(counts) * 4, dtype=torch.int32).view(len(counts), 4)
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        slots = pages[rows, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS
        cache = torch.zeros(LAYERS, 2, NUM_PAGES, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        group = GroupInputs(pages, slots, cache, PAGE_TOKENS, None)
        index = None if wanted is None else torch.tensor(wanted)
        hidden = self.stack.run(tokens, positions, starts, [group], index, adapters)
        return self.head(hidden, adapters=adapters)
