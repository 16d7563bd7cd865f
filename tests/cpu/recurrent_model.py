"""A small recurrent model that proves the state kind of cache: gated linear recurrences, with or without attention.

Each recurrent layer keeps one vector per row: state = decay * state + update, with decay and update computed from the
token. `plain_logits` runs a whole sequence from a zero state, without pages, slots, chunks or batches: the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.layers.step import PagedInputs, StateInputs, Step
from quire.types import CacheSpec


class RecurrentModel:
    vocab_size = 97
    max_positions = 512
    activation_elements = 512

    def __init__(self, *, hybrid: bool = False, page_tokens: int = 4, snapshot_tokens: int = 16, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.width = 24
        self.embedding = weight(self.vocab_size, self.width) * 3
        self.decay = [weight(self.width, self.width) for _ in range(2)]
        self.update = [weight(self.width, self.width) for _ in range(2)]
        self.head = weight(self.vocab_size, self.width) * 2
        self.specs = [
            CacheSpec("state", "state", (0, 1), (self.width,), "float32", page_tokens=page_tokens,
                      snapshot_tokens=snapshot_tokens)
        ]  # fmt: skip
        self.qkv = weight(3 * self.width, self.width) if hybrid else None
        if hybrid:
            self.specs.append(CacheSpec("full", "paged", (2,), (1, self.width), "float32", page_tokens=page_tokens))

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        x = self.embedding[step.tokens]  # [tokens, width]
        state = step.groups["state"]
        assert isinstance(state, StateInputs)
        starts = step.query_starts.tolist()
        for layer in range(2):
            rows = []
            for row, slot in enumerate(state.slots.tolist()):
                inputs = x[starts[row] : starts[row + 1]]
                out, last = self._scan(layer, inputs, caches["state"][layer, slot])
                caches["state"][layer, slot] = last
                rows.append(out)
            x = x + torch.cat(rows)
        if self.qkv is not None:
            x = x + self._attend(x, step, caches["full"][0])
        return step.wanted(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T

    def plain_logits(self, tokens: list[int]) -> Tensor:
        x = self.embedding[torch.tensor(tokens)]
        for layer in range(2):
            x = x + self._scan(layer, x, torch.zeros(self.width))[0]
        if self.qkv is not None:
            q, k, v = (x @ self.qkv.T).chunk(3, dim=-1)
            scores = (q @ k.T) / self.width**0.5
            causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            x = x + scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v
        return self.logits(x)

    def plain_greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.plain_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _scan(self, layer: int, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.sigmoid(inputs @ self.decay[layer].T + 1.0)
        update = torch.tanh(inputs @ self.update[layer].T)
        out = []
        for place in range(len(inputs)):
            state = decay[place] * state + update[place]
            out.append(state)
        return torch.stack(out), state

    def _attend(self, x: Tensor, step: Step, cache: Tensor) -> Tensor:
        """cache: [2, pages, page_tokens, 1, width]"""
        assert self.qkv is not None
        q, k, v = (x @ self.qkv.T).chunk(3, dim=-1)
        group = step.groups["full"]
        assert isinstance(group, PagedInputs)
        flat = cache.flatten(1, 2)[:, :, 0]  # [2, slots, width], a view
        flat[0, group.slots], flat[1, group.slots] = k, v
        size = cache.shape[2]
        out = torch.empty_like(q)
        starts, lens = step.query_starts.tolist(), step.seq_lens.tolist()
        for row, length in enumerate(lens):
            positions = torch.arange(length)
            slots = group.page_table[row].long()[positions // size] * size + positions % size
            begin, end = starts[row], starts[row + 1]
            scores = (q[begin:end] @ flat[0, slots].T) / self.width**0.5
            seen = positions[None] <= step.positions[begin:end, None]
            out[begin:end] = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ flat[1, slots]
        return out
