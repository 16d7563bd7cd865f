"""Thinking budgets: reasoning is ended by its own marker once the budget is spent, and what follows is unharmed."""

from __future__ import annotations

import pytest

from quire.engine.grammar.matcher import GrammarCompiler, MaskFiller
from quire.types import GrammarSpec
from tests.pure.shadow import VOCAB, Rig

pytest.importorskip("llguidance")

TOKENS = [bytes([ord("A") + i]) for i in range(VOCAB - 1)] + [b"<eos>"]
CLOSE = (7, 11)  # two tokens end reasoning
PROMPT = [5, 9, 2, 4, 4]


def grammar(spec: GrammarSpec) -> object:
    compiler = GrammarCompiler(TOKENS, (VOCAB - 1,))
    try:
        return compiler.compile(spec)
    finally:
        compiler.close()


def rig(depth: int) -> Rig:
    made = Rig(depth=depth, late=depth == 2, num_pages=200, max_batch_tokens=64, chunk_tokens=64)
    made.engine._fill_masks = MaskFiller()
    return made


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [0, 1, 6])
def test_reasoning_ends_when_its_budget_is_spent(budget: int, depth: int) -> None:
    free = rig(depth)
    free.add(PROMPT, max_tokens=14)
    free.finish()
    made = rig(depth)
    made.add(PROMPT, max_tokens=14, grammar=grammar(GrammarSpec("free", after_reasoning=CLOSE, budget=budget)))
    made.add(PROMPT[::-1], max_tokens=14)
    made.finish()
    out = made.outputs["r1"]
    assert out[:budget] == free.outputs["r1"][:budget], "up to the budget nothing is changed"
    assert tuple(out[budget : budget + 2]) == CLOSE
    assert len(out) == 14 and CLOSE[1] not in out[budget + 2 : budget + 3], "and then it goes on freely"
    assert len(made.outputs["r2"]) == 14


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_binds_after_the_forced_end(depth: int) -> None:
    made = rig(depth)
    spec = GrammarSpec("choice", '["BC", "CB"]', after_reasoning=CLOSE, budget=3)
    made.add(PROMPT, max_tokens=14, grammar=grammar(spec), stop=frozenset({VOCAB - 1}))
    made.finish()
    out = made.outputs["r1"]
    assert tuple(out[3:5]) == CLOSE
    assert b"".join(TOKENS[t] for t in out[5:]) in (b"BC<eos>", b"CB<eos>")


def test_who_ends_in_time_is_left_alone() -> None:
    made = grammar(GrammarSpec("free", after_reasoning=CLOSE, budget=8))
    assert made.advance([1, 2, *CLOSE]) is None and made.forced is None
    assert made.advance([1, 2, *CLOSE, *range(20)]) is None and made.forced is None
    assert made.advance([1] * 8) is None and made.forced == CLOSE[0], "asked about other tokens it starts over"


OPEN = (3, 8)  # and two begin it, where the model does so itself


def allowed(made: object, tokens: list[int]) -> set[int]:
    mask = made.mask(tokens)
    return {token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1}


def test_a_model_that_opens_its_reasoning_is_counted_from_there() -> None:
    made = grammar(GrammarSpec("free", after_reasoning=CLOSE, opens_reasoning=OPEN, budget=2))
    everything = set(range(VOCAB))
    for tokens in ([], [OPEN[0]], [*OPEN], [*OPEN, 1]):
        assert allowed(made, tokens) == everything
    assert allowed(made, [*OPEN, 1, 1]) == {CLOSE[0]} and allowed(made, [*OPEN, 1, 1, CLOSE[0]]) == {CLOSE[1]}
    assert allowed(made, [*OPEN, 1, 1, *CLOSE]) == everything
    assert allowed(made, [*OPEN, *CLOSE, 1, 1, 1, 1]) == everything, "it ended in time"
    assert allowed(made, [1, *OPEN, 1, 1, 1, 1]) == everything, "only at the beginning is it reasoning"
    assert allowed(made, [OPEN[0], 1, 1, 1, 1, 1]) == everything, "half a marker is none"


def test_a_grammar_waits_for_reasoning_that_the_model_may_open() -> None:
    made = grammar(GrammarSpec("choice", '["BC", "DD"]', after_reasoning=CLOSE, opens_reasoning=OPEN, budget=1))
    b, c, d = 1, 2, 3
    assert OPEN[0] == d, "the marker begins like an answer"
    assert allowed(made, []) == {b, d}
    assert allowed(made, [b]) == {c} and allowed(made, [d]) == {d}, "what the grammar allows is its own"
    made = grammar(GrammarSpec("choice", '["BC", "CB"]', after_reasoning=CLOSE, opens_reasoning=OPEN, budget=1))
    assert allowed(made, []) == {b, c, OPEN[0]}, "answer at once, or reason first"
    assert allowed(made, [OPEN[0]]) == {OPEN[1]} and allowed(made, [*OPEN]) == set(range(VOCAB))
    assert allowed(made, [*OPEN, 20]) == {CLOSE[0]}
    assert allowed(made, [*OPEN, 20, *CLOSE]) == {b, c} and allowed(made, [*OPEN, 20, *CLOSE, c]) == {b}
    assert allowed(made, [c]) == {b}, "asked about other tokens it starts over"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_budget_of_reasoning_that_the_model_opens_holds_in_the_engine(depth: int) -> None:
    free = rig(depth)
    free.add(PROMPT, max_tokens=20)
    free.finish()
    first = free.outputs["r1"][0]  # what this device says first is taken for the marker that opens reasoning
    spec = GrammarSpec("free", after_reasoning=CLOSE, opens_reasoning=(first,), budget=4)
    made = rig(depth)
    made.add(PROMPT, max_tokens=20, grammar=grammar(spec))
    made.finish()
    out = made.outputs["r1"]
    assert out[:5] == free.outputs["r1"][:5] and tuple(out[5:7]) == CLOSE and len(out) == 20
