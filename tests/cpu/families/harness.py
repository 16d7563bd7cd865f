"""A family to prove, its tiny random checkpoint, and the model of `transformers` that it must equal.

A family is a line: `Family("llama", LlamaConfig(...))` in the `FAMILIES` of a file of this folder. `test_families`
finds it, makes a `Case` of it and runs every check of `checks` over that.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from quire.engine.loop import Engine
from quire.layers.step import Step
from quire.models.model import Model
from quire.models.registry import FAMILIES as REGISTRY
from quire.types import Plan, SamplingParams
from tests.cpu import rig
from tests.cpu.rig import load, make_engine

# Files here that hold none.
NOT_FAMILIES = ("harness", "checks", "table", "cpu_paths", "decoded", "fp8_in_torch", "more_types")
VOCAB = 256
NUM_TOKENS = 48  # sampled per prompt
PROMPT_LENS = (1, 4, 9, 16, 23, 31, 40, 60)
CHUNK = 7
PAGE_TOKENS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# What the dense-like families have in common; a config takes it and says what differs.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

Draw = Callable[[str, Tensor, torch.Generator], None]


def draw_wide(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Weights wide, biases and norms away from their neutral values: logits then differ clearly from token to token,
    and a forgotten bias or norm shows."""
    is_norm = ("norm" in name and name.endswith("weight")) or name.endswith("layer_scalar")
    parameter.normal_(1.0 if is_norm else 0.0, 0.3 if is_norm else 0.15, generator=generator)


@dataclass(frozen=True)
class Family:
    """A kind of model to prove. `name` may be a variant of a model type (`llama3`); the type itself is the config's."""

    name: str
    config: Callable[[], Any]  # makes the transformers config
    draw: Draw = draw_wide  # fills one parameter
    model_class: str | None = None  # of transformers, where AutoModelForCausalLM does not find it
    knobs: Mapping[str, Any] = field(default_factory=dict)  # of the engine, for every check
    without: frozenset[str] = frozenset()  # checks that do not apply to it
    slow: bool = False  # much like another family: all its checks are slow ones

    def __str__(self) -> str:
        return self.name


def all_families() -> list[Family]:
    """Every family of every file in this folder."""
    found: list[Family] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("test_") and module.name not in NOT_FAMILIES:
            found += importlib.import_module(f"tests.cpu.families.{module.name}").FAMILIES
    return found


def model_type(family: Family) -> str:
    """By what it is found in the registry; a model of text and images stands there as its language model."""
    config = family.config()
    text = getattr(config, "text_config", None)
    return config.model_type if config.model_type in REGISTRY or text is None else text.model_type


def save_checkpoint(family: Family, folder: Path, seed: int = 0) -> Any:
    """Write a tiny float32 checkpoint into `folder`; returns the transformers model it was saved from."""
    config = family.config()
    if family.model_class is None:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        config._attn_implementation = "eager"
        model = getattr(transformers, family.model_class)(config)
    model = model.to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        saved = model.state_dict()
        biases = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if name in saved and name.endswith(("bias", "layer_scalar"))
        ]
        for name, parameter in [*model.named_parameters(), *biases]:
            family.draw(name, parameter, generator)
    model.save_pretrained(folder)
    return model


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Without the scheduler's self-check at every turn: no family can disturb it, and it costs as much as the rest."""
    tokens = rig.run(engine, prompts, params, check=False)
    engine.scheduler.check()
    return tokens


def ragged_prompts(seed: int = 5) -> list[list[int]]:
    """Prompts of 1 to 60 tokens; one begins like another."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in PROMPT_LENS]
    prompts[5] = prompts[6][:20] + prompts[5][:11]
    return prompts


class Case:
    """One family, saved, loaded and ready to be run. Tokens to compare with are worked out once."""

    def __init__(self, family: Family, folder: Path, device: torch.device = rig.CPU, page_tokens: int = PAGE_TOKENS,
                 **how: Any):  # fmt: skip
        self.family = family
        self.folder = folder
        self.device = device
        self.page_tokens = page_tokens
        self.reference = save_checkpoint(family, folder)
        self.model = load(folder, page_tokens, device, **how)
        self.prompts = ragged_prompts()

    @cached_property
    def first_run(self) -> tuple[Engine, Witness, list[list[int]]]:
        """The prompts run cold in chunks: the engine, which is warm now, what its schedule was, and the tokens."""
        engine = self.engine(chunk_tokens=CHUNK)
        witness = Witness(engine)
        tokens = run(engine, self.prompts)
        engine.workers = witness.inner
        return engine, witness, tokens

    @cached_property
    def expected(self) -> list[list[int]]:
        """What transformers samples greedily. The engine proposes; each token must be the reference's own choice given
        all before it, so the sequence is the one the reference alone would have come to, at the price of a forward."""
        proposed = self.first_run[2]
        for prompt, tokens in zip(self.prompts, proposed, strict=True):
            assert len(tokens) == NUM_TOKENS
            logits = self.reference_logits(prompt + tokens[:-1])[len(prompt) - 1 :]
            chosen = logits.argmax(-1).tolist()
            wrong = next((i for i, pair in enumerate(zip(tokens, chosen, strict=True)) if pair[0] != pair[1]), None)
            assert wrong is None, f"token {wrong} after a prompt of {len(prompt)} is not what transformers samples"
        assert len({token for tokens in proposed for token in tokens}) > 16, "a model that says more than one thing"
        return proposed

    def reference_logits(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens]), use_cache=False).logits[0].float()

    def logits(self, model: Any, chunk_tokens: int) -> Tensor:
        """What our model says at every position of the longest prompt, [tokens, vocab]."""
        prompt, recorder = self.prompts[-1], Recorder(model, 1)
        run(self.engine(recorder, chunk_tokens=chunk_tokens), [prompt], replace(GREEDY, max_tokens=1))
        return torch.stack([recorder.logits_at[0, position] for position in range(len(prompt))])

    def engine(self, model: Model | None = None, **knobs: Any) -> Engine:
        knobs = {"page_tokens": self.page_tokens, "max_rows": 8, "num_pages": 400, **self.family.knobs, **knobs}
        return make_engine(model or self.model, device=self.device, **knobs)

    @property
    def small_pool(self) -> int:
        """Pages for the longest request, not for all."""
        sees_all = any(spec.window is None for spec in self.model.specs if spec.kind == "paged")
        return max(12, (160 if sees_all else 96) // self.page_tokens)


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return ((got - want).abs().max() / want.abs().max()).item()


class Witness:
    """Stands before the device and sees every plan: what the schedule really was."""

    def __init__(self, engine: Engine):
        self.inner = engine.workers
        self.chunks: Counter[str] = Counter()  # steps of several tokens, per request
        self.mixed_steps = 0  # a catch-up and a decode in one step
        engine.workers = self

    def forward(self, plan: Plan) -> Any:
        several = [row.request_id for row in plan.rows if row.count > 1]
        self.chunks.update(several)
        self.mixed_steps += bool(several) and len(several) < len(plan.rows)
        return self.inner.forward(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Recorder:
    """A model that keeps the logits of every token it computes. Tokens tell which prompt they are of: each prompt's
    are all equal modulo the number of prompts."""

    def __init__(self, model: Any, num_prompts: int):
        self._inner = model
        self._num_prompts = num_prompts
        self.logits_at: dict[tuple[int, int], Tensor] = {}  # (prompt, position) -> [vocab]

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        hidden = self._inner.forward(replace(step, samples=None), caches)
        logits = self._inner.logits(hidden).float()
        for place, (token, position) in enumerate(zip(step.tokens.tolist(), step.positions.tolist(), strict=True)):
            self.logits_at[token % self._num_prompts, position] = logits[place]
        return step.wanted(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
