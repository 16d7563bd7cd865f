"""The gate's judge: what is lost, doubled or wrong is named so, and only what arithmetic explains is excused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.bench.online.streamed_chat import Choice, StreamedReply
from quire.chaos.compare import MAX_TIE_GAP, NumericTolerance, compare, measure_shift
from quire.chaos.traffic import ScriptedRequest

USAGE = {"prompt_tokens": 7, "completion_tokens": 6}
GREEDY = ScriptedRequest("s", "greedy", {"temperature": 0.0})


def seen(tokens: str, logprobs: Sequence[float] | None = None, **more: Any) -> StreamedReply:
    scores = list(logprobs or [-0.5] * len(tokens))
    choice = Choice([token.encode() for token in tokens], scores, tokens, "", "length")
    return StreamedReply({0: choice}, usage={**USAGE, **more})


WANTED = seen("abcdef")


@pytest.mark.parametrize(
    ("got", "lost", "duplicated", "wrong"),
    [
        (seen("abcdef"), 0, 0, 0),
        (seen("abcd"), 2, 0, 0),
        (seen("abef"), 2, 0, 0),
        (seen("abcdefg"), 0, 1, 0),
        (seen("abcbcdef"), 0, 2, 0),
        (seen("abXdef"), 0, 0, 1),
        (seen("abcdef", prompt_tokens=8), 0, 0, 1),
        (StreamedReply(), 6, 0, 0),
    ],
)
def test_what_is_lost_doubled_or_wrong_is_named_so(got: StreamedReply, lost: int, duplicated: int, wrong: int) -> None:
    for arithmetic in (None, NumericTolerance(0.01, lambda *_: 0.0)):
        if arithmetic is not None and wrong and got.choices[0].tokens[2] == b"X":
            continue  # excused or not: below
        verdict = compare(GREEDY, WANTED, got, arithmetic)
        assert (verdict.lost, verdict.duplicated, verdict.wrong) == (lost, duplicated, wrong), verdict.detail


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_only_a_gap_that_the_arithmetic_explains_is_excused(temperature: float) -> None:
    script = ScriptedRequest("s", "seeded", {"temperature": temperature, "seed": 1})
    arithmetic = NumericTolerance(0.01, lambda seed, index, position, token: {b"c": 0.2, b"X": 0.1}[token])
    bound = 0.02 / (temperature or 1.0)
    for gap, is_excused in ((0.9 * bound, True), (1.1 * bound, False)):
        # what decided: the log-probability over the temperature and the noise of that token, or the former alone
        other = -0.5 - gap if not temperature else temperature * (-0.5 / temperature + 0.2 - gap - 0.1)
        got = seen("abXyzq", [-0.5, -0.5, other, -0.5, -0.5, -0.5])
        verdict = compare(script, WANTED, got, arithmetic)
        assert verdict.is_clean is is_excused, verdict.detail
        assert [(tie.token, round(tie.gap, 6)) for tie in verdict.near_ties] == (
            [(2, round(gap, 6))] if is_excused else []
        )
        assert compare(script, WANTED, got, None).wrong == 1, "the deterministic mode excuses nothing"


def test_nothing_makes_a_wide_gap_a_near_tie() -> None:
    careless = NumericTolerance(0.4, lambda *_: 0.0)
    for gap, is_excused in ((0.9 * MAX_TIE_GAP, True), (1.1 * MAX_TIE_GAP, False)):
        got = seen("abXyzq", [-0.5, -0.5, -0.5 - gap, -0.5, -0.5, -0.5])
        assert compare(GREEDY, WANTED, got, careless).is_clean is is_excused


def test_the_shift_is_measured_up_to_where_two_runs_part() -> None:
    assert measure_shift(WANTED, WANTED) == 0.0
    alone = seen("abXdef", [-0.5, -0.47, -9.0, -9.0, -9.0, -9.0])
    assert measure_shift(WANTED, alone) == pytest.approx(0.03)
