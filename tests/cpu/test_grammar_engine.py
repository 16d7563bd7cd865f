"""Structured output through the whole engine: a random model under a grammar writes nothing else, however it is
scheduled; and the real small model, under a few hundred schemas, writes valid JSON or ends by length."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.grammar.matcher import GrammarCompiler, MaskFiller
from quire.engine.loop import Engine
from quire.engine.trace import Tracer
from quire.files.gguf import open_gguf
from quire.files.source import resolve_model
from quire.models.loading.loader import load_model
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, GrammarSpec, QuireError, Request, SamplingParams
from tests.cpu.rig import CPU, load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny
from tests.pure.test_grammar_made import make_schemas

jsonschema = pytest.importorskip("jsonschema")

WORDS = [b'":', b'", "', b'"}', b"name", b"city", b"12", b"true", b"null", b"\xc3\xa9", b"</think>"]
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS + [b"<eos>"]
END_OF_THINKING, EOS = len(TOKENS) - 2, len(TOKENS) - 1
VOCAB = 288  # padded
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth 2, late": {"depth": 2, "late": True, "chunk_tokens": 7},
    "pushed out": {"num_pages": 120, "preemption": "recompute"},
    "swapped, depth 2": {"num_pages": 120, "preemption": "swap", "depth": 2, "late": True},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny("llama", tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, eos_token_id=EOS)[1])


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENS, (EOS,), special_ids=(END_OF_THINKING, EOS), vocab_size=VOCAB)
    yield made
    made.close()


class Spans(Tracer):
    """Remembers which part of the loop came after which."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def span(self, name: str, plan: Any = None) -> Any:
        self.names.append(name)
        return super().span(name, plan)


def run(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], Delta]]:
    """Each request's tokens and its last delta."""
    engine._fill_masks = MaskFiller(num_threads=2)
    found: dict[str, list[Delta]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.turn():
            found[delta.request_id].append(delta)
        engine.scheduler.check()
    return {name: ([t for d in deltas for t in d.token_ids], deltas[-1]) for name, deltas in found.items()}


def requests_for(compiler: GrammarCompiler, schemas: list[str], max_tokens: int, rng: random.Random) -> list[Request]:
    made = []
    for index, schema in enumerate(schemas):
        params = SamplingParams(temperature=rng.choice([0.0, 1.0, 1.5]), max_tokens=max_tokens, seed=index + 1)
        prompt = [rng.randrange(3, 256) for _ in range(rng.randrange(1, 30))]
        request = make_request(f"r{index:04d}", prompt, params, stop_ids=frozenset([EOS]))
        request.grammar = compiler.compile(GrammarSpec("json_schema", schema))
        made.append(request)
    return made


def check_valid(schema: str, text: str, reason: FinishReason | None) -> bool:
    """True if it is whole and valid, False if it ended by length; anything else is a failure."""
    if reason is FinishReason.LENGTH:
        return False
    assert reason is FinishReason.STOP
    jsonschema.validate(json.loads(text), json.loads(schema))
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_models_write_valid_json(tiny: Any, compiler: GrammarCompiler, schedule: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    schemas = make_schemas(50, seed)
    engine = make_engine(tiny, **SCHEDULES[schedule])
    found = run(engine, requests_for(compiler, schemas, 100, random.Random(seed)))
    whole = 0
    for schema, (tokens, last) in zip(schemas, found.values(), strict=True):
        assert last.error is None, last.error
        text = b"".join(TOKENS[token] for token in tokens if token != EOS).decode("utf-8", "replace")
        whole += check_valid(schema, text, last.finish_reason)
    assert whole >= 3
    if "num_pages" in SCHEDULES[schedule]:
        assert engine.scheduler.stats.preemptions > 0


def test_reasoning_first_and_neighbours_without_a_grammar(tiny: Any, compiler: GrammarCompiler) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    alone = run(make_engine(tiny), [make_request("free", [5, 6, 7], params)])["free"][0]
    thinks = make_request("thinks", [9, 8], SamplingParams(max_tokens=60, seed=3), stop_ids=frozenset([EOS]))
    thinks.tokens += [70, 71, END_OF_THINKING]  # as if it had thought already, and was pushed out
    thinks.grammar = compiler.compile(GrammarSpec("choice", '["yes", "no"]', (END_OF_THINKING,)))
    still = make_request("still", [9, 9], SamplingParams(temperature=0.0, max_tokens=20), stop_ids=frozenset([EOS]))
    still.grammar = compiler.compile(GrammarSpec("choice", '["yes", "no"]', (END_OF_THINKING,)))
    free_of = make_request("free of", [9, 9], SamplingParams(temperature=0.0, max_tokens=20), stop_ids=frozenset([EOS]))
    found = run(make_engine(tiny), [make_request("free", [5, 6, 7], params), thinks, still, free_of])
    assert found["free"][0] == alone
    assert bytes(found["thinks"][0][:-1]) in (b"yes", b"no") and found["thinks"][0][-1] == EOS
    assert found["still"][0] == found["free of"][0]  # it never stopped thinking, so nothing was masked


def test_masks_are_filled_after_the_forward_has_started(tiny: Any, compiler: GrammarCompiler) -> None:
    engine = make_engine(tiny, depth=2, late=True)
    engine.tracer = spans = Spans()
    run(engine, requests_for(compiler, make_schemas(3, 1), 20, random.Random(1)))
    order = "".join(name[0] for name in spans.names if name in ("forward", "wait", "mask", "sample"))
    # Step N+1's forward is under way, N's tokens come in, N+1's masks are filled from them, N+1 is sampled.
    assert order.startswith("fms" + "fwms" * 10)


def test_a_failing_grammar_ends_its_own_request_only(tiny: Any, compiler: GrammarCompiler) -> None:
    requests = requests_for(compiler, make_schemas(4, 2), 30, random.Random(2))
    broken = requests[1].grammar
    broken.advance([ord("x")])  # not what an object starts with
    broken._restart = lambda: None  # and it does not find back
    found = run(make_engine(tiny), requests)
    assert found["r0001"][1].finish_reason is FinishReason.ERROR
    for name in ("r0000", "r0002", "r0003"):
        assert found[name][1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


# -- the real small model


def _real_file() -> Path:
    try:
        return Path(resolve_model("smollm2", offline=True).path)
    except QuireError:
        pytest.skip("the built-in model is not on this machine")


@pytest.mark.slow
def test_the_real_model_under_a_few_hundred_schemas() -> None:
    path = _real_file()
    loaded = load_model(resolve_model(str(path)), dtype="float32", device=CPU, max_model_len=1024, page_tokens=16)
    tokenizer = Tokenizer.from_gguf(open_gguf(path).metadata)
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    compiler = GrammarCompiler(
        tokens,
        tokenizer.eos_ids,
        special_ids=special,
        vocab_size=loaded.model.vocab_size,
        encode=tokenizer.encode_inside,
    )
    engine = make_engine(loaded.model, max_len=1024, max_rows=32, max_batch_tokens=512, page_tokens=16, num_pages=2000)
    schemas = make_schemas(200, seed=11)
    requests = []
    for index, schema in enumerate(schemas):
        keys = ", ".join(json.loads(schema)["properties"])
        prompt = f"<|im_start|>user\nWrite short JSON with the keys {keys}.<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(temperature=0.7, max_tokens=80, seed=index)
        request = make_request(f"r{index:04d}", tokenizer.encode(prompt, add_special=False), params,
                               stop_ids=frozenset(tokenizer.eos_ids))  # fmt: skip
        request.grammar = compiler.compile(GrammarSpec("json_schema", schema))
        requests.append(request)
    found = run(engine, requests)
    whole = 0
    for schema, (ids, last) in zip(schemas, found.values(), strict=True):
        assert last.error is None, last.error
        whole += check_valid(schema, tokenizer.decode(ids), last.finish_reason)
    print(f"{whole} of {len(schemas)} ended on their own")
    assert whole >= 20
