"""Grammars on a small made-up vocabulary: masks, ends, replays, reasoning, limits and caching. No model."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from quire.engine.grammar.matcher import Grammar, GrammarCompiler, MaskFiller
from quire.types import GrammarSpec, Plan, PlanRow, QuireError, Request, SamplingParams

WORDS = [b"true", b"false", b'{"', b'":', b'", "', b'"}', b"name", b"age", b"12", b"  ", b"</think>", b"<tool",
         b"_call>", b"</th", b"ink>", b"ink>\n\n", "é".encode(), "日本".encode()]  # fmt: skip
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS + [b"<eos>", b"<end>", b"<special>"]
EOS, END, SPECIAL_STYLES = len(TOKENS) - 3, len(TOKENS) - 2, len(TOKENS) - 1
VOCAB = len(TOKENS) + 37  # a padded output layer


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(
        TOKENS,
        (EOS, END),
        special_ids=(EOS, END, SPECIAL_STYLES),
        vocab_size=VOCAB,
        encode=lambda text: list(text.encode()),
    )
    yield made
    made.close()


def allowed(mask: bytes) -> set[int]:
    return {index for index in range(8 * len(mask)) if mask[index >> 3] >> (index & 7) & 1}


def ids(text: str) -> list[int]:
    return list(text.encode())


def accepts(grammar: Grammar, text: str) -> bool:
    """Does the grammar take this text, byte by byte, and let it end there?"""
    tokens: list[int] = []
    for byte in text.encode():
        if byte not in allowed(grammar.mask(tokens)):
            return False
        tokens.append(byte)
    return EOS in allowed(grammar.mask(tokens)) and grammar.accepts_end


KINDS: list[tuple[GrammarSpec, list[str], list[str]]] = [
    (GrammarSpec("json_object"), ["{}", '{"a": [1, {"b": null}]}', '{"é":"日本"}'], ["[]", "1", "{", '{"a":}']),
    (GrammarSpec("json_schema", '{"type": "object", "properties": {"age": {"type": "integer", "minimum": 3, "maximum": '
                 '12}}, "required": ["age"], "additionalProperties": false}'),
     ['{"age":7}', '{"age": 12}', '{\n  "age": 3\n}'], ['{"age": 2}', "{}", '{"age": "7"}', '{"age": 5, "x": 1}']),
    (GrammarSpec("regex", r"\d{3}-[a-c]+"), ["123-a", "000-cab"], ["12-a", "123-", "123-d", " 123-a"]),
    (GrammarSpec("choice", '["yes", "no", "say \\"é\\"\\n"]'), ["yes", "no", 'say "é"\n'], ["", "y", "yesno", "say"]),
    (GrammarSpec("ebnf", 'start: "a" list\nlist: "(" (list ("," list)*)? ")"'), ["a()", "a((),(()))"], ["a(", "()"]),
    (GrammarSpec("ebnf", 'root ::= "x" ("y" | "z")+'), ["xy", "xzzy"], ["x", "y"]),
]  # fmt: skip


@pytest.mark.parametrize("spec, good, bad", KINDS)
def test_kinds(compiler: GrammarCompiler, spec: GrammarSpec, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(compiler.compile(spec), text), text
    for text in bad:
        assert not accepts(compiler.compile(spec), text), text


def test_masks_have_one_bit_per_logit_and_none_for_specials_and_padding(compiler: GrammarCompiler) -> None:
    mask = compiler.compile(GrammarSpec("regex", r"(?s:.*)")).mask([])
    assert len(mask) == 4 * -(-VOCAB // 32)
    found = allowed(mask)
    assert {EOS, END} <= found and SPECIAL_STYLES not in found and max(found) < len(TOKENS)
    assert TOKENS.index(b"name") in found


def test_the_end_is_allowed_only_where_the_grammar_accepts_and_then_alone(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec("choice", '["no"]'))
    assert allowed(grammar.mask([])) == {ord("n")} and not grammar.accepts_end
    assert allowed(grammar.mask(ids("no"))) == {EOS, END} and grammar.accepts_end
    after = [*ids("no"), EOS]
    assert allowed(grammar.mask(after)) == {EOS, END}  # someone who ignores the end keeps getting it
    assert allowed(grammar.mask([*after, END])) == {EOS, END} and grammar.error is None


def test_shorter_longer_same_and_other_prefixes(compiler: GrammarCompiler) -> None:
    """Whatever prefix is asked for, in whatever order, the mask is that of a grammar that saw only this prefix."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    spec = KINDS[1][0]
    texts = [ids(text) for text in KINDS[1][1]]
    followed = compiler.compile(spec)
    for _ in range(60):
        text = rng.choice(texts)
        prefix = text[: rng.randrange(len(text) + 1)]
        assert followed.mask(prefix) == compiler.compile(spec).mask(prefix)
        assert followed.mask([1, 2, 3, *prefix], 3) == followed.mask(prefix)


def test_fork_starts_anew(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec("choice", '["no"]'))
    grammar.mask(ids("n"))
    assert allowed(grammar.fork().mask([])) == {ord("n")}
    assert allowed(grammar.mask(ids("n"))) == {ord("o")}


def test_token_outside_the_grammar_is_an_error_that_a_replay_forgets(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec("choice", '["no"]'))
    assert allowed(grammar.mask(ids("x"))) == set()
    assert grammar.error is not None and grammar.error.code == "grammar_failed"
    assert allowed(grammar.mask([])) == {ord("n")} and grammar.error is None


@pytest.mark.parametrize("marker", [["</think>"], ["</th", "ink>"]])
def test_grammar_binds_after_reasoning(compiler: GrammarCompiler, marker: list[str]) -> None:
    end = tuple(TOKENS.index(piece.encode()) for piece in marker)
    grammar = compiler.compile(GrammarSpec("choice", '["no"]', end))
    thinking = ids("hm {no} </thin")
    assert allowed(grammar.mask(thinking)) == set(range(VOCAB)) and not grammar.is_binding
    for closing in (["</think>"], ["</th", "ink>"], ["</th", "ink>\n\n"]):
        tokens = [*thinking, *(TOKENS.index(piece.encode()) for piece in closing)]
        assert allowed(grammar.mask(tokens)) == {ord("n")}, closing
        assert allowed(grammar.mask([*tokens, *ids("no")])) == {EOS, END}
    assert allowed(grammar.mask(thinking)) == set(range(VOCAB))


def test_space_may_stand_between_reasoning_and_json(compiler: GrammarCompiler) -> None:
    end = (TOKENS.index(b"</think>"),)
    after = compiler.compile(GrammarSpec("json_object", after_reasoning=end))
    assert {ord("\n"), ord("{")} <= allowed(after.mask([*end])) and ord("x") not in allowed(after.mask([*end]))
    assert ord("\n") not in allowed(compiler.compile(GrammarSpec("json_object")).mask([]))


def test_white_space_in_json_has_an_end(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec("json_object"))
    assert ord(" ") in allowed(grammar.mask(ids("{" + " " * 8)))
    assert ord(" ") not in allowed(grammar.mask(ids("{" + " " * 24)))


@pytest.mark.parametrize("spec", [
    GrammarSpec("json_schema", "{"), GrammarSpec("json_schema", "[]"),
    GrammarSpec("json_schema", '{"type": "nonsense"}'),
    GrammarSpec("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'),
    GrammarSpec("regex", "(unclosed"), GrammarSpec("choice", "[]"), GrammarSpec("choice", '["a", 3]'),
    GrammarSpec("choice", '[""]'), GrammarSpec("ebnf", "start: nowhere"), GrammarSpec("ebnf", "start: start"),
    GrammarSpec("json_schema", '{"$ref": "#/$defs/missing"}'), GrammarSpec("ebnf", "root ::= ("),
    GrammarSpec("ebnf", "root ::= nowhere"),
])  # fmt: skip
def test_what_can_not_be_used_is_refused(compiler: GrammarCompiler, spec: GrammarSpec) -> None:
    with pytest.raises(QuireError) as caught:
        compiler.compile(spec)
    said = str(caught.value)
    assert caught.value.code == "invalid_schema" and "\n" not in said
    assert not any(word in said for word in (" | ", "NoExtension", "guidance", "start: /", "1(", "GBNF", "Lark")), said


def test_a_grammar_that_is_nested_too_deeply_is_refused_as_that(compiler: GrammarCompiler) -> None:
    with pytest.raises(QuireError, match="The grammar is nested too deeply") as caught:
        compiler.compile(GrammarSpec("ebnf", "root ::= " + "(" * 8000 + '"a"' + ")" * 8000))
    assert caught.value.code == "grammar_too_complex"


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"string"}' + "}" * depth


HOSTILE = {
    "deep": GrammarSpec("json_schema", _nested(5000)),
    "deeper than Python": GrammarSpec("json_schema", _nested(8000)),
    "large": GrammarSpec("regex", "a" * 300_000),
    "huge alternation": GrammarSpec("regex", "|".join(f"w{i}x{i * 7919 % 100_003}" for i in range(15_000))),
    "huge enum": GrammarSpec("json_schema", json.dumps({"enum": [f"v{i}-{i * 79 % 100_003}" for i in range(9_000)]})),
    "product of choices": GrammarSpec("json_schema", json.dumps(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in range(8)]} for i in range(8)]})),
    "nested stars": GrammarSpec("regex", "((a*)*)*b"),
    "states double": GrammarSpec("regex", "(a|b)*a(a|b){3000}"),
    "repeated repeats": GrammarSpec("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "ambiguous": GrammarSpec("ebnf", 'start: s\ns: s s | s s s | "a" | ""'),
    "many properties": GrammarSpec("json_schema", json.dumps(
        {"properties": {f"p{i}": {"type": "string", "maxLength": i + 1} for i in range(1000)}})),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_bounded(compiler: GrammarCompiler, name: str) -> None:
    """Refused with a reason, or usable: then a walk through it ends in masks or in this request's own error."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    try:
        grammar = compiler.compile(HOSTILE[name], deadline=60)
    except QuireError as error:
        assert error.code == "grammar_too_complex", error
        return
    tokens: list[int] = []
    for _ in range(40):
        found = sorted(allowed(grammar.mask(tokens)) - {EOS, END})
        if not found:
            assert grammar.accepts_end or grammar.error is not None
            return
        tokens.append(rng.choice(found))


def test_a_deadline_that_passes_is_an_error_and_others_go_on(compiler: GrammarCompiler) -> None:
    slow = GrammarSpec("regex", "|".join(f"q{i}x{i * 7919 % 100_003}" for i in range(16_000)))
    with pytest.raises(QuireError) as caught:
        compiler.compile(slow, deadline=0.0)
    assert caught.value.code == "grammar_too_complex"
    assert accepts(compiler.compile(GrammarSpec("choice", '["yes"]')), "yes")


def test_compiled_once_and_kept_but_not_for_ever() -> None:
    compiler = GrammarCompiler(TOKENS, (EOS,), max_cached=2)
    specs = [GrammarSpec("choice", json.dumps([word])) for word in ("a", "b", "c")]
    first = compiler.compile(specs[0])
    assert compiler.compile(specs[0])._initial is first._initial
    for spec in specs[1:]:
        compiler.compile(spec)
    assert compiler.compile(specs[0])._initial is not first._initial
    compiler.close()


def test_too_many_waiting_are_refused() -> None:
    compiler = GrammarCompiler(TOKENS, (EOS,), num_threads=1, max_pending=1)
    gate = threading.Event()
    compiler._pool.submit(gate.wait)
    try:
        waiting: Future[Grammar] = compiler.submit(GrammarSpec("choice", '["a"]'))
        refused = compiler.submit(GrammarSpec("choice", '["b"]'))
        error = refused.exception(10)  # known at once; without the rule it would wait for the gate
        assert isinstance(error, QuireError) and error.code == "queue_full"
        gate.set()
        assert accepts(waiting.result(30), "a")
    finally:
        gate.set()
        compiler.close()


@pytest.mark.parametrize("num_requests", [2, 9])  # one by one, and in the library's threads
def test_masks_of_a_batch(compiler: GrammarCompiler, num_requests: int) -> None:
    end = (TOKENS.index(b"</think>"),)
    texts = ["", "1", "12", "123", "123-", "123-a"]
    plan, requests = Plan(1), {}
    for index in range(num_requests):
        text = texts[index % len(texts)]
        name = f"r{index}"
        request = Request(name, [9, 9, *ids(text)], 2, SamplingParams(), 100)
        request.grammar = compiler.compile(GrammarSpec("regex", r"\d{3}-[a-c]+"))
        requests[name] = request
        plan.rows.append(PlanRow(name, index, 0, 1, 0, True))
    for index, name in enumerate(("free", "thinks", "chunk", "gone"), num_requests):
        requests[name] = Request(name, [9], 1, SamplingParams(), 100)
        plan.rows.append(PlanRow(name, index, 0, 1, 0, name != "chunk"))
    requests["thinks"].grammar = compiler.compile(GrammarSpec("json_object", after_reasoning=end))
    requests["chunk"].grammar = compiler.compile(GrammarSpec("json_object"))
    del requests["gone"]
    masks = MaskFiller(num_threads=2)(plan, requests)
    assert set(masks) == set(range(num_requests))
    for index in range(num_requests):
        alone = compiler.compile(GrammarSpec("regex", r"\d{3}-[a-c]+"))
        assert masks[index] == alone.mask(ids(texts[index % len(texts)]))


def test_a_grammar_that_outgrows_the_library_is_too_complex_not_broken(compiler: GrammarCompiler) -> None:
    rules = [f'r{i}: "a" q{i} "b{i}"\nq{i}: "a" q{i} "c" | "d"' for i in range(1500)]
    text = "\n".join([f"start: {' | '.join(f'r{i}' for i in range(1500))}", *rules])
    grammar = compiler.compile(GrammarSpec("ebnf", text))
    assert allowed(grammar.mask([])) == {ord("a")}
    for count in range(1, 40):
        if not any(grammar.mask(ids("a" * count))):
            break
    assert grammar.error is not None and grammar.error.code == "grammar_too_complex", grammar.error


def test_a_grammar_that_holds_up_the_batch_is_ended(compiler: GrammarCompiler) -> None:
    slow, quick = (compiler.compile(GrammarSpec("regex", "a{90}")) for _ in range(2))
    for seconds in (0.2, 0.2, 0.001):
        slow.charge(seconds)
        quick.charge(0.05)
    assert any(slow.mask(ids("a"))), "now and then is forgiven"
    slow.charge(0.2)
    assert slow.error is not None and slow.error.code == "grammar_too_complex" and not any(slow.mask(ids("aa")))
    assert any(quick.mask(ids("aa")))


def test_an_ambiguous_grammar_is_found_out_among_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks cost more with every token; the neighbours in the batch must not wait for it for ever."""
    monkeypatch.setattr("quire.engine.grammar.matcher.SLOW_SECONDS", 0.01)
    filler = MaskFiller(num_threads=1)
    specs = [GrammarSpec("ebnf", 'start: s\ns: "a" | s s | s s s\n'), *[GrammarSpec("regex", "a*")] * 5]
    requests = {
        f"r{i}": Request(f"r{i}", [1], 1, SamplingParams(), 10_000, grammar=compiler.compile(spec))
        for i, spec in enumerate(specs)
    }
    plan = Plan(1, [PlanRow(name, place, 0, 1, 0, True) for place, name in enumerate(requests)])
    for _ in range(400):
        masks = filler(plan, requests)
        if requests["r0"].grammar.error is not None:
            break
        for request in requests.values():
            request.tokens.append(ord("a"))
    assert requests["r0"].grammar.error.code == "grammar_too_complex"
    assert all(any(masks[place]) and requests[f"r{place}"].grammar.error is None for place in range(1, 6))
