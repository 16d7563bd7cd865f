"""Compares a reply under faults with the undisturbed reply: identical, diverged at a near-tie, or wrong.

In the default mode a reply may diverge where two tokens were nearly tied: a stream that another engine resumes has its
prefix computed in other batches, which changes the order of sums. The run measures how far that moves a token: every
request is sent once among others and once alone. Two tokens are tied if their scores differ by at most what both may
have moved, and by at most `MAX_TIE_GAP`. In the deterministic mode any difference is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.bench.online.streamed_chat import Choice, StreamedReply
from quire.chaos.traffic import ScriptedRequest

ROUNDING_GAP = 1e-3  # change of a float32 logit by the order of sums
MAX_TIE_GAP = 0.05  # nats: a larger difference is no near-tie
Noise = Callable[[int, int, int, bytes], float]  # seed, sample index, position, token -> noise added to the score


@dataclass(frozen=True, slots=True)
class Divergence:
    script: str
    token: int
    gap: float


@dataclass(slots=True)
class ReplyDifference:
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    near_ties: tuple[Divergence, ...] = ()
    detail: str = ""

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong)


class SampleNoise:
    """The sampling noise of a seeded request for a token. Imports torch when it is first called."""

    def __init__(self, token_ids: Mapping[bytes, int], vocab_size: int):
        self._token_ids, self._vocab_size = token_ids, vocab_size

    def __call__(self, seed: int, sample_index: int, position: int, token: bytes) -> float:
        import torch

        from quire.sampling.noise import Noise, stream_key

        if token not in self._token_ids:
            return 0.0
        key = torch.tensor([stream_key(seed, sample_index)])
        ids = torch.tensor([[self._token_ids[token]]])
        return float(Noise(self._vocab_size, "cpu").gumbel(key, torch.tensor([position]), ids)[0, 0])


@dataclass(frozen=True, slots=True)
class NumericTolerance:
    """The allowed difference of the default mode: the measured shift of log-probabilities, and the sampling noise."""

    shift: float
    noise: Noise

    def near_tie(self, temperature: float) -> float:
        """Return the largest gap of two scores that may change their order: each may have moved."""
        return min(MAX_TIE_GAP, max(ROUNDING_GAP, 2 * self.shift)) / (temperature or 1.0)


def measure_shift(among_others: StreamedReply, alone: StreamedReply) -> float:
    """Return the largest change of a token's log-probability up to the first different token."""
    shift = 0.0
    for index, want in among_others.choices.items():
        got = alone.choices.get(index, Choice())
        for a, b, before, after in zip(want.tokens, got.tokens, want.logprobs, got.logprobs, strict=False):
            if a != b:
                break
            shift = max(shift, abs(before - after))
    return shift


def compare(
    script: ScriptedRequest, expected: StreamedReply, seen: StreamedReply, tolerance: NumericTolerance | None
) -> ReplyDifference:
    """Compare a reply with the expected one. `tolerance`: None in the deterministic mode, without allowance."""
    difference = ReplyDifference()
    for index, want in expected.choices.items():
        got = seen.choices.get(index, Choice())
        if (got.tokens, got.text, got.calls, got.finish) == (want.tokens, want.text, want.calls, want.finish):
            continue
        _add_difference(difference, script, index, want, got, expected, tolerance)
    if difference.is_clean and not difference.near_ties and expected.usage is not None:
        keys = ("prompt_tokens", "completion_tokens")
        if seen.usage is None or any(seen.usage[key] != expected.usage[key] for key in keys):
            difference.wrong += 1
            difference.detail = f"usage {seen.usage} instead of {expected.usage}"
    return difference


def _add_difference(
    difference: ReplyDifference,
    script: ScriptedRequest,
    index: int,
    want: Choice,
    got: Choice,
    expected: StreamedReply,
    tolerance: NumericTolerance | None,
) -> None:
    place = next((i for i, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=False)) if a != b), None)
    if place is None:
        shorter, longer = len(got.tokens), len(want.tokens)
        if shorter < longer:
            difference.lost += longer - shorter
        elif shorter > longer:
            difference.duplicated += shorter - longer
        else:
            difference.wrong += 1
        difference.detail = f"{shorter} of {longer} tokens, end {got.finish!r} instead of {want.finish!r}"
        return
    for count in range(1, 17):
        if got.tokens[place:] == want.tokens[place + count :]:
            difference.lost += count
            difference.detail = f"{count} tokens are missing at {place}"
            return
        came_before = place >= count and got.tokens[place : place + count] == got.tokens[place - count : place]
        if came_before and got.tokens[place + count :] == want.tokens[place:]:
            difference.duplicated += count
            difference.detail = f"{count} tokens came twice at {place}"
            return
    gap = None if tolerance is None else _score_gap(script, index, place, want, got, expected, tolerance.noise)
    if tolerance is not None and gap is not None and gap <= tolerance.near_tie(script.temperature):
        difference.near_ties += (Divergence(f"{script.name}/{index}", place, gap),)
        return
    difference.wrong += 1
    difference.detail = f"token {place} is {got.tokens[place]!r} instead of {want.tokens[place]!r}, gap {gap}"


def _score_gap(
    script: ScriptedRequest, index: int, place: int, want: Choice, got: Choice, expected: StreamedReply, noise: Noise
) -> float:
    """Return the gap between the scores of the two tokens; the tokens before `place` are the same in both replies."""
    scores: list[float] = []
    for choice in (want, got):
        token, past = choice.tokens[place], want.tokens[:place]
        score = choice.logprobs[place] - script.body.get("frequency_penalty", 0.0) * past.count(token)
        score -= script.body.get("presence_penalty", 0.0) * (token in past)
        if script.temperature:
            position = (expected.usage or {}).get("prompt_tokens", 0) + place
            score = score / script.temperature + noise(script.body["seed"], index, position, token)
        scores.append(score)
    return abs(scores[0] - scores[1])
