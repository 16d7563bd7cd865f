"""Proves a family equal to `transformers` on the same tiny random weights, whatever the schedule.

A family is a line: `Family("llama", LlamaConfig(...))` in the `FAMILIES` of a file of this folder. `test_families`
finds it and runs every check of `CHECKS` over it. Each check also asserts that it forced what it is named after.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from quire.assemble import build_engine, memory_report
from quire.cache.tree import ABSENT
from quire.config import Config
from quire.config_build import override_config
from quire.engine.loop import Engine
from quire.layers.linear import Linear
from quire.layers.step import Step
from quire.models import loader
from quire.models.registry import FAMILIES as REGISTRY
from quire.models.registry import Model
from quire.types import Plan, SamplingParams
from tests.cpu import rig
from tests.cpu.families.fp8_in_torch import STORED, fp8_scheme
from tests.cpu.rig import CPU, load, make_engine, make_request

NOT_FAMILIES = ("harness", "table", "cpu_paths", "fp8_in_torch")  # files of this folder that hold none
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
    small_pool: int | None = None  # pages for the longest request, not for all; None: worked out from the specs
    knobs: Mapping[str, Any] = field(default_factory=dict)  # of the engine, for every check
    without: frozenset[str] = frozenset()  # checks that do not apply to it

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

    def __init__(self, family: Family, folder: Path):
        self.family = family
        self.folder = folder
        self.reference = save_checkpoint(family, folder)
        self.model = load(folder, PAGE_TOKENS)
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

    def engine(self, model: Model | None = None, **knobs: Any) -> Engine:
        knobs = {"page_tokens": PAGE_TOKENS, "max_rows": 8, "num_pages": 400, **self.family.knobs, **knobs}
        return make_engine(model or self.model, **knobs)

    @property
    def small_pool(self) -> int:
        """Pages for the longest request, not for all."""
        if self.family.small_pool is not None:
            return self.family.small_pool
        return 40 if any(spec.window is None for spec in self.model.specs if spec.kind == "paged") else 24


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


# ---------------------------------------------------------------------------------------------------------------------
# Checks: each takes a case and raises where the family fails


def check_logits(case: Case) -> None:
    """All positions of a ragged, chunked batch to 1e-4 relative; the second time over what the cache kept."""
    rng = random.Random(3)
    num = len(PROMPT_LENS)
    prompts = [[rng.randrange(VOCAB // num) * num + i for _ in range(n)] for i, n in enumerate(PROMPT_LENS)]
    want = [case.reference_logits(prompt) for prompt in prompts]
    recorder = Recorder(case.model, num)
    engine = case.engine(recorder, chunk_tokens=CHUNK, max_batch_tokens=32)
    for warm in (False, True):
        recorder.logits_at.clear()
        run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        for (prompt, position), got in recorder.logits_at.items():
            error = (got - want[prompt][position]).abs().max() / want[prompt].abs().max()
            assert error <= 1e-4, f"prompt {prompt}, position {position}, warm={warm}: {error:.1e}"
        assert warm == (len(recorder.logits_at) < sum(PROMPT_LENS)), "cold all positions, warm fewer"


def check_chunks(case: Case) -> None:
    """Prompts computed in pieces, among rows that decode."""
    engine, witness, tokens = case.first_run
    assert tokens == case.expected
    assert max(witness.chunks.values()) >= 60 // CHUNK and witness.mixed_steps > 3
    assert engine.scheduler.stats.preemptions == 0


def check_warm_prefix(case: Case) -> None:
    """The same prompts again, and longer ones: what was computed is not computed again, and nothing changes."""
    engine, _, tokens = case.first_run
    assert tokens == case.expected
    cold, hits = engine.scheduler.stats.computed_tokens, engine.scheduler.cache.stats.hit_tokens
    assert run(engine, case.prompts) == case.expected
    assert engine.scheduler.cache.stats.hit_tokens > hits
    assert engine.scheduler.stats.computed_tokens - cold < cold
    longer = [prompt + tokens[:20] for prompt, tokens in zip(case.prompts, case.expected, strict=True)]
    rest = [tokens[20:] for tokens in case.expected]
    short = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - 20, ignore_eos=True)
    assert run(engine, longer, short) == rest


def run_pushing_out(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Half of the prompts run and decode; then the other half comes with a higher priority and takes their rows."""
    low = [make_request(f"low-{i}", prompt, GREEDY, priority=5) for i, prompt in enumerate(prompts)][::2]
    high = [make_request(f"high-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)][1::2]
    for request in low:
        engine.add(request)
    coming = list(high)
    while engine.has_work:
        if coming and all(request.num_sampled >= 6 for request in low):
            for request in coming:
                engine.add(request)
            coming = []
        for delta in engine.turn():
            assert delta.error is None, delta.error
    engine.scheduler.check()
    return [(high if i % 2 else low)[i // 2].tokens[len(prompt) :] for i, prompt in enumerate(prompts)]


def _check_pushed_out(case: Case, preemption: str, depth: int) -> None:
    """At depth 1 nothing is kept in the tree, so that bytes really come back from the host or are computed again; at
    depth 2 the pool is also small."""
    more: dict[str, Any] = {"prefix_cache": False} if depth == 1 else {"num_pages": case.small_pool, "late": True}
    engine = case.engine(
        preemption=preemption,
        depth=depth,
        chunk_tokens=CHUNK,
        max_rows=len(case.prompts) // 2,
        order="priority",
        **more,
    )
    assert run_pushing_out(engine, case.prompts) == case.expected
    stats, computed_once = engine.scheduler.stats, sum(map(len, case.prompts)) + len(case.prompts) * (NUM_TOKENS - 1)
    assert stats.preemptions >= len(case.prompts) // 2
    if preemption == "swap":
        assert stats.swaps > 0 and engine.scheduler.cache.stats.swapped_in > 0
    else:
        assert stats.swaps == 0 and stats.recomputes > 0
    if depth == 1:
        assert (stats.computed_tokens == computed_once) == (preemption == "swap"), "swapped: nothing computed twice"
    else:
        assert engine.workers.submitted_ahead > 10, "steps really were submitted before the last one's tokens existed"


def check_swap(case: Case) -> None:
    """Victims go to the host and come back; nothing is computed twice."""
    _check_pushed_out(case, "swap", depth=1)


def check_recompute(case: Case) -> None:
    """Victims give all back and compute it again."""
    _check_pushed_out(case, "recompute", depth=1)


def check_overlap(case: Case) -> None:
    """Depth 2 on a device that finishes late, cold and warm."""
    engine = case.engine(chunk_tokens=CHUNK, depth=2, late=True)
    assert run(engine, case.prompts) == case.expected
    hits = engine.scheduler.cache.stats.hit_tokens
    assert run(engine, case.prompts) == case.expected
    assert engine.scheduler.cache.stats.hit_tokens > hits
    assert engine.workers.submitted_ahead > 20


def check_overlap_swap(case: Case) -> None:
    """Depth 2, a small pool, by swap."""
    _check_pushed_out(case, "swap", depth=2)


def check_overlap_recompute(case: Case) -> None:
    """Depth 2, a small pool, by recompute."""
    _check_pushed_out(case, "recompute", depth=2)


def check_memory(case: Case) -> None:
    """What `quire doctor` says before anything is loaded is what is then allocated. Windows give their pages back."""
    config = override_config(Config(), {"model": str(case.folder), "cache_memory": 1 << 22, "max_rows": 4,
                                        "page_tokens": PAGE_TOKENS, "dtype": "float32"})  # fmt: skip
    said = memory_report(config)
    engine, _ = build_engine(case.model, config, said.max_model_len, CPU)
    caches = sum(tensor.nbytes for tensor in engine.workers._inner._store.tensors.values())
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in _weights(case.model)}.values())
    assert abs(said.cache - caches) <= 0.02 * caches
    assert abs(said.weights - weights) <= 0.02 * weights
    windows = {group: spec.window for group, spec in enumerate(case.model.specs) if spec.window is not None}
    if windows:
        _check_windows(case, windows)


def _weights(model: Any) -> Iterator[torch.Tensor]:
    """Parameters, and matrices packed for the native kernels, which are lists where a parameter was."""
    yield from model.parameters()
    for module in model.modules():
        packed = getattr(module, "weight", None)
        if isinstance(packed, list):
            yield from (matrix.memory for matrix in packed)


def _check_windows(case: Case, windows: dict[int, int]) -> None:
    """No page is held that no coming token can see, but for the one it begins in."""
    engine = case.engine(chunk_tokens=CHUNK, prefix_cache=False)
    cache = engine.scheduler.cache
    request = make_request("long", case.prompts[-1], GREEDY)
    engine.add(request)
    while engine.has_work:
        engine.turn()
        for group, window in windows.items():
            held = sum(unit != ABSENT for unit in request.lease.units[group]) if request.lease else 0
            assert held <= (window + CHUNK) // PAGE_TOKENS + 2, f"{held} pages for a window of {window}"
            pool = cache.pools[group]
            assert pool.num_units - 1 - pool.num_free <= held + 2, "what fell out is free again, or soon will be"
    assert len(request.tokens) > 2 * max(windows.values()) + CHUNK


def check_float16(case: Case) -> None:
    """Weights in float16 on a CPU: nearly the same logits."""
    error = _error(case, load(case.folder, PAGE_TOKENS, dtype="float16"))
    assert 1e-7 < error <= 0.05, "other bits give other logits, but not many"


def check_fp8(case: Case) -> None:
    """Linear layers through the FP8 scheme, with kernels in CUDA's place that keep all bits: the same logits."""
    scheme = (torch.float32, fp8_scheme())
    with patch.object(loader, "_choose_scheme", lambda *unused: scheme):
        model: Any = load(case.folder, PAGE_TOKENS, kernels="torch")
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert sum(linear.weight.dtype == STORED for linear in linears) > len(linears) / 2
    assert _error(case, model) <= 1e-4


def _error(case: Case, model: Any) -> float:
    """How far the logits of the longest prompt are off, as a share of the largest. Its last token comes alone: schemes
    may have a way of their own for one row."""
    prompt, recorder = case.prompts[-1], Recorder(model, 1)
    run(case.engine(recorder, chunk_tokens=len(prompt) - 1), [prompt], replace(GREEDY, max_tokens=1))
    got = torch.stack([recorder.logits_at[0, position] for position in range(len(prompt))])
    want = case.reference_logits(prompt)
    return ((got - want).abs().max() / want.abs().max()).item()


CHECKS: dict[str, Callable[[Case], None]] = {
    "logits": check_logits,
    "chunks": check_chunks,
    "warm prefix": check_warm_prefix,
    "swap": check_swap,
    "recompute": check_recompute,
    "depth 2": check_overlap,
    "depth 2, swap": check_overlap_swap,
    "depth 2, recompute": check_overlap_recompute,
    "memory": check_memory,
    "float16": check_float16,
    "fp8": check_fp8,
}
