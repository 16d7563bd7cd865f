"""What proposers guess: suffix matching over prompt, output and earlier requests, and predicted texts."""

from __future__ import annotations

import os
import random
from pathlib import Path

from quire.engine.speculation import suffix
from quire.engine.speculation.history_file import HistoryFile
from quire.engine.speculation.occurrences import MAX_PLACES, Occurrences
from quire.engine.speculation.prediction import PredictionProposer
from quire.engine.speculation.suffix import BOUNDARY, OutputHistory, SuffixProposer, vote
from quire.types import Request, SamplingParams

SEED = int(os.environ.get("TEST_SEED", "7"))


def request(tokens: list[int], prompt_len: int | None = None, *, name: str = "a", salt: bytes = b"",
            prediction: tuple[int, ...] = ()) -> Request:  # fmt: skip
    params = SamplingParams(prediction_ids=prediction)
    return Request(name, tokens, len(tokens) if prompt_len is None else prompt_len, params, 10_000, salt=salt)


def brute_match(tokens: list[int], end: list[int], place: int) -> int:
    count = 0
    while count < min(place, len(end), 32) and tokens[place - 1 - count] == end[len(end) - 1 - count]:
        count += 1
    return count


def test_occurrences_are_all_places_of_the_last_n_gram() -> None:
    rng = random.Random(SEED)
    for _ in range(200):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(3, 120))]
        index = Occurrences(tokens)
        while not index.extend(rng.randrange(1, 9)):
            pass
        end = tokens[-rng.randrange(2, 40) :]
        found = index.find(end)
        places = [p for p in range(3, len(tokens)) if len(end) >= 3 and tokens[p - 3 : p] == end[-3:]]
        if places:
            assert found == [(p, brute_match(tokens, end, p)) for p in places[-MAX_PLACES:]]
        else:
            short = [p for p in range(2, len(tokens)) if tokens[p - 2 : p] == end[-2:]]
            assert found == ([(short[-1], 2)] if short else [])


def test_an_index_grows_with_its_list() -> None:
    tokens = [1, 2, 3, 9]
    index = Occurrences(tokens)
    assert index.extend(100)
    assert index.find([7, 1, 2, 3]) == [(3, 3)]
    tokens += [1, 2, 3, 5]
    assert index.find([7, 1, 2, 3]) == [(3, 3)]
    assert index.extend(100)
    assert index.find([7, 1, 2, 3]) == [(3, 3), (7, 3)]


def test_the_longest_match_is_followed() -> None:
    #          a long match, followed by 5 6            a short one, followed by 8
    tokens = [4, 1, 2, 3, 5, 6, 0, 0, 9, 1, 2, 3, 8, 0, 0, 4, 1, 2, 3]
    (draft,) = SuffixProposer().propose([request(tokens)], 2)
    assert draft.tokens == [5, 6]
    assert 1 > draft.survival[0] > draft.survival[1] > 0


def test_most_occurrences_win_a_vote() -> None:
    tokens = [1, 2, 3, 7, 0, 1, 2, 3, 7, 5, 1, 2, 3, 8]
    found = [(tokens, 3, 3), (tokens, 8, 3), (tokens, 13, 3)]
    draft = vote(found, 1, "suffix")
    assert draft.tokens == [7]
    assert draft.survival[0] < vote(found[:2], 1, "suffix").survival[0], "a lost vote lowers the chance"


def test_outputs_of_earlier_requests_are_matched_within_one_salt() -> None:
    proposer = SuffixProposer()
    first = request([50, 1, 2, 3, 4, 5, 6], 1, name="first", salt=b"x")
    proposer.propose([first], 4)
    proposer.end(first)
    same, other = request([9, 2, 3, 4], name="same", salt=b"x"), request([9, 2, 3, 4], name="other", salt=b"y")
    mine, theirs = proposer.propose([same, other], 4)
    assert mine.tokens == [5, 6]
    assert theirs.tokens == []
    assert SuffixProposer(earlier_requests=False).propose([same], 4)[0].tokens == []


def test_a_draft_ends_where_an_earlier_output_ended() -> None:
    proposer = SuffixProposer()
    for name, output in (("a", [1, 2, 3, 4]), ("b", [7, 8, 9])):
        proposer.end(request([0, *output], 1, name=name))
    (draft,) = proposer.propose([request([5, 1, 2, 3], name="c")], 8)
    assert draft.tokens == [4] and BOUNDARY not in draft.tokens


def test_own_output_can_be_left_out() -> None:
    tokens = [9, 8, 1, 2, 3, 4, 1, 2, 3]
    assert SuffixProposer().propose([request(tokens, 2)], 1)[0].tokens == [4]
    assert SuffixProposer(own_output=False).propose([request(tokens, 2)], 1)[0].tokens == []


def test_a_long_prompt_is_indexed_in_slices() -> None:
    proposer = SuffixProposer()
    tokens = [*range(2 * suffix.CATCH_UP), 5, 6, 7]
    ask = request(tokens)
    answers = [proposer.propose([ask], 1)[0].tokens for _ in range(3)]
    assert answers == [[], [], [8]]


def test_history_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(suffix, "GENERATION", 200)
    monkeypatch.setattr(suffix, "MAX_HISTORY", 1500)
    rng, proposer = random.Random(SEED), SuffixProposer()
    for number in range(400):
        output = [rng.randrange(9) for _ in range(rng.randrange(1, 120))]
        proposer.end(request([0, *output], 1, name=str(number), salt=bytes([rng.randrange(8)])))
        proposer.check()
        assert proposer.num_history_tokens <= 1500
    assert proposer.num_history_tokens > 500


def test_prompts_and_salts_are_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(suffix, "MAX_PROMPTS", 30)
    monkeypatch.setattr(suffix, "MAX_SALTS", 3)
    proposer = SuffixProposer()
    asks = [request([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], name=str(number), salt=bytes([number])) for number in range(5)]
    drafts = proposer.propose(asks, 1)
    assert [draft.tokens for draft in drafts] == [[4], [4], [4], [], []], "three prompts fit"
    proposer.check()
    for ask in asks:
        ask.tokens.append(9)
        proposer.end(ask)
        proposer.check()
    assert len(proposer._histories) == 3 and proposer._num_own == 0
    assert proposer.propose(asks[4:], 1)[0].tokens == [], "its prompt has a place now, and its end is new"


def test_a_generation_is_dropped_as_a_whole(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(suffix, "GENERATION", 10)
    history = OutputHistory()
    for start in range(0, 40, 4):
        history.add([start, start + 1, start + 2])
    kept = [token for index in history.generations for token in index.tokens if token != BOUNDARY]
    assert set(kept) == {24, 25, 26, 28, 29, 30, 32, 33, 34, 36, 37, 38}


def follow(prediction: list[int], output: list[int]) -> tuple[int, int]:
    """Return how many steps an output takes with drafts of four tokens, and how many drafts were wrong."""
    proposer, made, steps, wrong = PredictionProposer(), [1000], 0, 0
    ask = request(made, 1, prediction=tuple(prediction))
    while len(made) - 1 < len(output):
        (draft,) = proposer.propose([ask], 4)
        rest = output[len(made) - 1 :]
        right = 0
        while right < min(len(draft.tokens), len(rest)) and draft.tokens[right] == rest[right]:
            right += 1
        wrong += len(draft.tokens) - right
        made += rest[: right + 1]
        steps += 1
    return steps, wrong


def test_a_right_prediction_takes_a_fifth_of_the_steps() -> None:
    text = list(range(100))
    assert follow(text, text) == (20, 0)


def test_a_prediction_survives_replaced_removed_and_added_tokens() -> None:
    rng = random.Random(SEED)
    text = [rng.randrange(500) for _ in range(300)]
    edits = {
        "replaced": [*text[:100], 900, *text[101:200], 901, 902, *text[201:]],
        "removed": [*text[:100], *text[106:]],
        "added": [*text[:150], 900, 901, 902, 903, *text[150:]],
        "moved": [*text[200:], *text[:200]],
        "everywhere": [901 if place % 20 == 19 else token for place, token in enumerate(text)],
    }
    for name, output in edits.items():
        steps, _ = follow(text, output)
        most = 0.45 if name == "everywhere" else 0.25
        assert steps <= most * len(output), f"{name}: {steps} steps for {len(output)} tokens, seed {SEED}"


def test_an_unrelated_prediction_ends_in_few_wrong_drafts_of_little_survival() -> None:
    rng = random.Random(SEED)
    proposer = PredictionProposer()
    made = [1000]
    ask = request(made, 1, prediction=tuple(rng.randrange(500) for _ in range(300)))
    for token in range(2000, 2040):
        (draft,) = proposer.propose([ask], 4)
        made.append(token)
    assert not draft.tokens or draft.survival[0] <= 0.4


def test_without_a_prediction_there_is_no_draft() -> None:
    assert PredictionProposer().propose([request([1, 2, 3])], 4)[0].tokens == []


def kept_in(folder: Path, weights: bytes = b"w", vocab_size: int = 100) -> SuffixProposer:
    return SuffixProposer(file=HistoryFile(folder, weights, vocab_size))


def test_outputs_of_earlier_requests_are_kept_across_engines(tmp_path: Path) -> None:
    before = kept_in(tmp_path / "new")
    for salt, output in ((b"a", [5, 6, 7, 8]), (b"b", [5, 6, 9, 9]), (b"a", [20, 21, 22])):
        one = request([1, 2, 3], salt=salt)
        one.tokens += output
        before.end(one)
    before.save()
    after = kept_in(tmp_path / "new")
    after.check()
    assert after.num_history_tokens == before.num_history_tokens
    assert after.propose([request([50, 5, 6], salt=b"a")], 3)[0].tokens == [7, 8], "to the end of that output"
    assert after.propose([request([50, 5, 6], salt=b"b")], 3)[0].tokens == [9, 9]
    assert after.propose([request([50, 20, 21], salt=b"a")], 3)[0].tokens == [22]
    assert not after.propose([request([50, 5, 6], salt=b"c")], 3)[0].tokens, "another salt"
    (file,) = (tmp_path / "new").iterdir()
    assert file.stat().st_mode & 0o077 == 0, "its owner only"
    after.save()
    assert kept_in(tmp_path / "new").num_history_tokens == before.num_history_tokens


def test_kept_outputs_that_are_damaged_or_of_another_model_count_as_none(tmp_path: Path) -> None:
    before = kept_in(tmp_path)
    one = request([1, 2, 3], salt=b"a")
    one.tokens += [5, 6, 7, 8, 60]
    before.end(one)
    before.save()
    assert kept_in(tmp_path, b"other").num_history_tokens == 0
    assert kept_in(tmp_path, vocab_size=60).num_history_tokens == 0, "a token that the model does not have"
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    for bad in (good[:-1], b"", good[:45], good[:50] + bytes([good[50] ^ 1]) + good[51:], b"x" * len(good)):
        file.write_bytes(bad)
        assert kept_in(tmp_path).num_history_tokens == 0
    file.write_bytes(good)
    assert kept_in(tmp_path).num_history_tokens > 0
    kept_in(tmp_path / "file" / "below").save()
    (tmp_path / "no folder").write_text("")
    kept_in(tmp_path / "no folder").save()  # nothing is written, and nothing is raised
