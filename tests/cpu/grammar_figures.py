"""What the tokens of forced text are worth: `python -m tests.cpu.grammar_figures [--json]`, with the built-in model.

The same functions and schemas are written greedily three times: with text that a grammar forces in the model's own
tokens, in the longest tokens that fit, and byte by byte. Counted are tokens, outputs that fit their schema, calls
with the arguments the question names, and the mean log-probability of tokens that were the only ones allowed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema

from quire import LLM, GrammarSpec, SamplingParams
from quire.engine.grammar.canonical_tokens import Encode
from quire.engine.grammar.compile_queue import GrammarQueue
from quire.engine.grammar.matcher import GrammarCompiler
from quire.text.tokenizer import Tokenizer
from tests.cpu.grammar_cases import cases

WAYS = ("byte by byte", "longest tokens", "the model's tokens")
MAX_TOKENS = 160
CLOSE = "</tool_call>"


def make_compiler(tokenizer: Tokenizer, way: str) -> GrammarCompiler:
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    special = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id)]
    of_byte = {token: token_id for token_id, token in reversed(list(enumerate(tokens))) if len(token) == 1}

    def spell(text: str) -> list[int]:
        return [of_byte[bytes([byte])] for byte in text.encode()]

    encode: dict[str, Encode | None] = dict(zip(WAYS, (spell, None, tokenizer.encode_inside), strict=True))
    return GrammarCompiler(tokens, tokenizer.eos_ids, special_ids=special, encode=encode[way])


def value_of(kind: str, text: str) -> Any:
    if kind == "schemas":
        return json.loads(text)
    return json.loads(text.partition("{")[2].join(["{", ""]).rpartition(CLOSE)[0])["arguments"]


def forced_places(compiler: GrammarCompiler, spec: GrammarSpec, ids: Sequence[int]) -> list[int]:
    """Where only one token was allowed."""
    grammar = compiler.compile(spec)
    return [at for at in range(len(ids)) if int.from_bytes(grammar.mask(ids[:at]), "little").bit_count() == 1]


def measure(llm: LLM, way: str) -> dict[str, dict[str, float]]:
    tokenizer = llm.edge.tokenizer
    assert tokenizer is not None
    compiler = make_compiler(tokenizer, way)
    llm._parts = replace(llm._parts, grammars=GrammarQueue(lambda: compiler))
    figures: dict[str, dict[str, Any]] = {}
    todo = cases()
    params = [
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0, grammar=spec) for _, _, spec, _, _ in todo
    ]
    outputs = llm.generate([messages for _, messages, *_ in todo], params)
    for (kind, _, spec, schema, expected), output in zip(todo, outputs, strict=True):
        one = figures.setdefault(kind, {"cases": 0, "tokens": 0, "valid": 0, "right": 0, "forced": [], "other": []})
        one["cases"] += 1
        one["tokens"] += len(output.token_ids)
        try:
            value = value_of(kind, output.text)
            jsonschema.validate(value, schema)
        except (ValueError, KeyError, jsonschema.ValidationError):
            value = None
        one["valid"] += value is not None
        one["right"] += value is not None and all(value.get(key) == wanted for key, wanted in expected.items())
        forced = set(forced_places(compiler, spec, output.token_ids))
        for at, found in enumerate(output.logprobs or ()):
            one["forced" if at in forced else "other"].append(found.logprob)
    compiler.close()
    for one in figures.values():
        for name in ("forced", "other"):
            values = one.pop(name)
            one[f"num_{name}"] = len(values)
            one[f"{name}_logprob"] = round(sum(values) / max(1, len(values)), 3)
            one[f"{name}_lowest"] = round(min(values, default=0.0), 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="What the tokens of forced text are worth.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with LLM(args.model) as llm:
        found = {way: measure(llm, way) for way in WAYS}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'':30} {'cases':>6} {'tokens':>7} {'valid':>6} {'right':>6} {'forced':>7} {'logprob':>8} {'lowest':>7}")
    for kind in ("functions", "schemas"):
        for way, figures in found.items():
            one = figures[kind]
            right = one["right"] if kind == "functions" else "-"
            print(
                f"{kind + ', ' + way:30} {one['cases']:6} {one['tokens']:7} {one['valid']:6} {right:>6} "
                f"{one['num_forced']:7} {one['forced_logprob']:8} {one['forced_lowest']:7}"
            )


if __name__ == "__main__":
    main()
