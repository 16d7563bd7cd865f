"""LoRA adapters: a batch of the base model and four adapters of different ranks, against PEFT on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.engine.loop import Engine
from quire.files.adapters import read_adapter
from quire.layers.adapters import padded_rank
from quire.types import Request
from tests.cpu.families.harness import (
    CHUNK,
    GREEDY,
    NUM_TOKENS,
    PAGE_TOKENS,
    Family,
    all_families,
    ragged_prompts,
    save_checkpoint,
)
from tests.cpu.lora_folders import adapted, check_greedy, linear_names, save_adapter
from tests.cpu.rig import CPU, LateDevice, load_whole, make_engine, make_request

NAMES = ("llama", "qwen2", "qwen3", "phi3", "glm4", "olmo2", "granite", "gpt_neox", "gemma", "mistral")
RANKS = (2, 5, 8, 24)
FAMILIES = {family.name: family for family in all_families() if family.name in NAMES}


class AdapterCase:
    """A tiny model of one family with four adapters of it, and the engine that serves them."""

    def __init__(self, family: Family, folder: Path, kernels: str):
        self.reference = save_checkpoint(family, folder / "base")
        self.loaded = load_whole(folder / "base", PAGE_TOKENS, CPU, kernels=kernels)
        self.prompts = ragged_prompts()
        names = linear_names(self.reference)
        self.folders: list[Path | None] = [None]
        for place, rank in enumerate(RANKS):
            saved = save_adapter(
                self.reference, folder / f"lora{place}", names, rank=rank, seed=place + 1, use_rslora=place == 1
            )
            self.folders.append(saved)
        self.digests = [None if path is None else read_adapter(path).digest for path in self.folders]

    def engine(self, late: bool = False, **knobs: object) -> Engine:
        knobs = {"page_tokens": PAGE_TOKENS, "max_rows": 8, "num_pages": 400, **knobs}
        engine = make_engine(self.loaded.model, late=late, places=self.loaded.places, **knobs)
        for path in self.folders[1:]:
            assert path is not None
            files = read_adapter(path)
            engine.adapters.read(files)
            engine.adapters.register(files.digest)
        return engine

    def run(self, engine: Engine, pushes_out: bool = False) -> list[list[int]]:
        return run_mixed(engine, self.prompts, self.digests, pushes_out=pushes_out)

    def check(self, tokens: list[list[int]]) -> None:
        """Row by row, what PEFT's model with the adapter merged into its weights samples."""
        for which, folder in enumerate(self.folders):
            with adapted(self.reference, folder) as model:
                for place in range(which, len(self.prompts), len(self.folders)):
                    assert len(tokens[place]) == NUM_TOKENS
                    check_greedy(model, self.prompts[place], tokens[place])


def run_mixed(
    engine: Engine, prompts: Sequence[list[int]], digests: Sequence[str | None], *, pushes_out: bool = False
) -> list[list[int]]:
    """Runs the prompts, each with the next adapter in turn: at once, or half of them while the others decode, with a
    higher priority, so that these are preempted."""
    base = engine.scheduler.stats.ended
    requests: list[Request] = []
    for place, prompt in enumerate(prompts):
        request = make_request(f"{base}-{place:04d}", prompt, GREEDY, priority=5 * (place % 2) * pushes_out)
        request.arrival, request.adapter = float(place), digests[place % len(digests)]
        requests.append(request)
    coming = [request for request in requests if pushes_out and not request.priority]
    for request in requests:
        if request not in coming:
            engine.add(request)
    while engine.has_work:
        if coming and any(request.num_sampled >= 6 for request in requests):
            for request in coming:
                engine.add(request)
            coming = []
        for delta in engine.turn():
            assert delta.error is None, delta.error
    engine.scheduler.check()
    return [request.tokens[request.prompt_len :] for request in requests]


@pytest.fixture(
    scope="module",
    params=[(name, kernels) for name in NAMES for kernels in ("torch", "auto")],
    ids=lambda pair: "-".join(pair),
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AdapterCase:
    name, kernels = request.param
    return AdapterCase(FAMILIES[name], tmp_path_factory.mktemp(name), kernels)


def test_a_mixed_batch_equals_each_adapter_merged_into_the_weights(case: AdapterCase) -> None:
    engine = case.engine(chunk_tokens=CHUNK)
    cold = case.run(engine)
    case.check(cold)
    assert len({tuple(tokens[:8]) for tokens in cold}) == len(cold), "adapters that say the same prove nothing"
    hits = engine.scheduler.cache.stats.hit_tokens
    assert case.run(engine) == cold
    assert engine.scheduler.cache.stats.hit_tokens > hits, "warm prefixes"
    late = case.engine(late=True, depth=2, chunk_tokens=CHUNK, adapter_slots=3, max_rows=4, order="priority")
    assert isinstance(late.workers, LateDevice)
    assert case.run(late, pushes_out=True) == cold
    assert late.scheduler.stats.preemptions > 0
    drafting = case.engine(speculate="suffix", max_batch_tokens=128)
    assert case.run(drafting) == cold


def test_equal_prompts_with_other_adapters_share_no_page(case: AdapterCase) -> None:
    engine = case.engine()
    prompt = case.prompts[-1]
    tokens = [run_mixed(engine, [prompt], [digest]) for digest in case.digests]
    assert engine.scheduler.cache.stats.hit_tokens == 0
    assert len({tuple(one[0]) for one in tokens}) == len(tokens)
    assert run_mixed(engine, [prompt], case.digests[2:3]) == tokens[2]
    assert engine.scheduler.cache.stats.hit_tokens > 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> AdapterCase:
    return AdapterCase(FAMILIES["llama"], tmp_path_factory.mktemp("llama"), "auto")


def test_a_head_and_an_embedding_are_adapted_as_peft_does(llama: AdapterCase, tmp_path: Path) -> None:
    low, whole = ["embed_tokens", "lm_head", "q_proj"], ["embed_tokens", "lm_head"]
    made = [
        save_adapter(llama.reference, tmp_path / "low", low, rank=3, seed=9),
        save_adapter(deepcopy(llama.reference), tmp_path / "whole", ["v_proj"], rank=3, seed=8, modules_to_save=whole),
    ]
    engine = llama.engine()
    for folder in made:
        files = read_adapter(folder)
        engine.adapters.read(files)
        engine.adapters.register(files.digest)
    digests = [read_adapter(folder).digest for folder in made]
    prompts = llama.prompts[3:7]
    tokens = run_mixed(engine, prompts, [*digests, None])
    for which, folder in enumerate([*made, None]):
        # a copy, because PEFT leaves what replaces a module in its place
        with adapted(deepcopy(llama.reference), folder, merges=False) as model:
            for place in range(which, len(prompts), 3):
                check_greedy(model, prompts[place], tokens[place])


def test_prompt_logprobs_and_vectors_are_those_of_the_adapter(llama: AdapterCase) -> None:
    engine = llama.engine(chunk_tokens=CHUNK)
    prompt, params = llama.prompts[-1], replace(GREEDY, max_tokens=2, prompt_logprobs=1, pooling="last")
    requests = []
    for place, digest in enumerate(llama.digests[:3]):
        request = make_request(f"r{place}", prompt, params)
        request.adapter = digest
        requests.append(request)
        engine.add(request)
    scored: dict[str, list[float]] = {request.id: [] for request in requests}
    while engine.has_work:
        for delta in engine.turn():
            scored[delta.request_id] += [one.logprob for one in delta.prompt_logprobs or ()]
    for request, folder in zip(requests, llama.folders, strict=False):
        with adapted(llama.reference, folder) as model, torch.inference_mode():
            logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
        want = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(scored[request.id]), want, atol=1e-4)


def test_more_adapters_than_slots_take_turns(llama: AdapterCase) -> None:
    engine = llama.engine(adapter_slots=1)
    assert run_mixed(engine, llama.prompts, llama.digests) == run_mixed(llama.engine(), llama.prompts, llama.digests)
    assert len(engine.scheduler.adapters.resident) == 1


def test_a_removed_adapter_leaves_with_its_last_request(llama: AdapterCase) -> None:
    engine, digest = llama.engine(), llama.digests[1]
    assert digest is not None
    request = make_request("last", llama.prompts[4], GREEDY)
    request.adapter = digest
    engine.add(request)
    engine.turn()
    assert engine.adapters.remove(digest) == 1
    engine.run_until_idle()
    assert request.num_sampled == NUM_TOKENS and digest not in engine.scheduler.adapters.known
    with adapted(llama.reference, llama.folders[1]) as model:
        check_greedy(model, llama.prompts[4], request.tokens[request.prompt_len :])
    engine.scheduler.check()


def test_ranks_are_padded_by_class() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 9, 24, 64, 65, 512, 513)] == [8, 8, 16, 32, 64, 128, 512, 1024]
