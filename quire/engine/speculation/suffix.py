"""Drafts by suffix matching: the tokens that followed earlier occurrences of the longest context, chosen by vote.

Contexts are looked up in the request's own prompt and output, and in the outputs of earlier requests with the same
salt, so that no tenant's timing reveals texts of another. Earlier outputs are kept in two generations of bounded
size: when the young one is full it becomes the old one, whose predecessor is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.engine.speculation.history_file import HistoryFile
from quire.engine.speculation.occurrences import MAX_MATCH, Occurrences
from quire.engine.speculation.seam import NO_DRAFT, Draft
from quire.types import Request

CATCH_UP = 1024  # tokens indexed per request and call, so that a long prompt never holds up a step
GENERATION = 1 << 14  # tokens of one generation of a salt's earlier outputs
MAX_HISTORY = 1 << 17  # tokens of all salts together
MAX_SALTS = 4096
MAX_PROMPTS = 1 << 20  # prompt tokens of running requests that are indexed; further requests are not
MAX_OUTPUT = 4096  # last tokens of an output that are kept
BOUNDARY = -1  # stands between two outputs; no token has this id
# Probability that the next token is right, by the number of matching tokens before it. Measured rates correct it.
BY_MATCH = (0.0, 0.2, 0.4, 0.55, 0.65, 0.72, 0.77, 0.8, 0.83)
LONG_MATCH, SURE = 16, 0.92  # matches of at least 16 tokens have this probability
CHANCES = (*BY_MATCH, *[BY_MATCH[-1]] * (LONG_MATCH - len(BY_MATCH)))


def chance_by_match(num_matching: int) -> float:
    """Return the probability that the token after a match of this length is the one that followed before."""
    return CHANCES[num_matching] if num_matching < LONG_MATCH else SURE


class OutputHistory:
    """The outputs of one salt's earlier requests, in a young and an old generation."""

    def __init__(self) -> None:
        self.generations = [_new_index()]

    def add(self, output: Sequence[int]) -> None:
        young = self.generations[0]
        if len(young.tokens) + len(output) > GENERATION and young.tokens:
            young = _new_index()
            self.generations = [young, self.generations[0]]
        tokens = young.tokens
        assert isinstance(tokens, list)
        tokens.extend(output)
        tokens.append(BOUNDARY)

    @property
    def num_tokens(self) -> int:
        return sum(len(index.tokens) for index in self.generations)


class SuffixProposer:
    """Implements `Proposer`."""

    def __init__(
        self,
        name: str = "suffix",
        *,
        earlier_requests: bool = True,
        own_output: bool = True,
        file: HistoryFile | None = None,
    ) -> None:
        """`earlier_requests`: also match outputs of earlier requests. `own_output`: also match the request's output.
        `file`: where outputs are kept when the engine is closed."""
        self.name = name
        self._own: dict[str, Occurrences] = {}
        self._num_own = 0  # tokens of these when they were begun
        self.num_history_tokens = 0
        self._histories: OrderedDict[bytes, OutputHistory] = OrderedDict()  # by salt, least recently used first
        self._earlier = earlier_requests
        self._file = file if earlier_requests else None
        for salt, tokens in self._file.read(BOUNDARY) if self._file is not None else []:
            self._remember(salt, tokens[:-1] if tokens[-1:] == [BOUNDARY] else tokens)
        self._own_output = own_output

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        return [self._propose(request, budget) for request in requests]

    def end(self, request: Request) -> None:
        if self._own.pop(request.id, None) is not None:
            self._num_own -= request.prompt_len
        if not self._earlier or request.num_sampled < 1:
            return
        self._remember(request.salt, request.tokens[max(request.prompt_len, len(request.tokens) - MAX_OUTPUT) :])

    def save(self) -> None:
        """Write the outputs of earlier requests to the file, if there is one."""
        if self._file is not None:
            self._file.write(
                [
                    (salt, list(index.tokens))
                    for salt, history in self._histories.items()
                    for index in reversed(history.generations)
                    if index.tokens
                ]
            )

    def _remember(self, salt: bytes, output: Sequence[int]) -> None:
        """Add an output, or several with boundaries between them, to a salt's history, and keep the bounds."""
        history = self._histories.setdefault(salt, OutputHistory())
        self._histories.move_to_end(salt)
        before = history.num_tokens
        history.add(output)
        self.num_history_tokens += history.num_tokens - before
        while (self.num_history_tokens > MAX_HISTORY or len(self._histories) > MAX_SALTS) and len(self._histories) > 1:
            _, oldest = self._histories.popitem(last=False)
            self.num_history_tokens -= oldest.num_tokens

    def check(self) -> None:
        """Assert the bounds. Called by tests."""
        assert self.num_history_tokens == sum(history.num_tokens for history in self._histories.values())
        assert len(self._histories) <= MAX_SALTS and self._num_own <= MAX_PROMPTS
        for history in self._histories.values():
            assert len(history.generations) <= 2
            assert history.num_tokens <= 2 * (GENERATION + MAX_OUTPUT + 1)

    def _propose(self, request: Request, budget: int) -> Draft:
        end = request.tokens[-MAX_MATCH:]
        found: list[tuple[Sequence[int], int, int]] = []
        for index in self._indexes(request):
            for place, matching in index.find(end):
                found.append((index.tokens, place, matching))
        return vote(found, budget, self.name) if found else NO_DRAFT

    def _indexes(self, request: Request) -> list[Occurrences]:
        """Return the indexes to search, brought up to date. None of the request's own while it catches up."""
        own = self._own.get(request.id)
        indexes = []
        if own is None and self._num_own + request.prompt_len <= MAX_PROMPTS:
            self._num_own += request.prompt_len
            tokens = request.tokens if self._own_output else request.tokens[: request.prompt_len]
            own = self._own[request.id] = Occurrences(tokens)
        if own is not None:
            if self._own_output and own.tokens is not request.tokens:
                own.tokens = request.tokens  # the same tokens in another list
            if own.extend(CATCH_UP):
                indexes.append(own)
        history = self._histories.get(request.salt) if self._earlier else None
        if history is not None:
            indexes += [index for index in history.generations if index.extend(CATCH_UP) or index.length]
        return indexes


def vote(found: Sequence[tuple[Sequence[int], int, int]], budget: int, source: str) -> Draft:
    """Return the draft that most of the matches support. `found`: (tokens, place, matching tokens before it).

    Each match votes for its next token with the square of its length; those that lose a vote drop out.
    """
    draft, survival, step = Draft(source=source), 1.0, 0
    matches = [m for m in found if m[1] < len(m[0])]
    while len(matches) > 1 and step < budget:
        votes: dict[int, int] = {}
        total = 0
        for tokens, place, matching in matches:
            token, weight = tokens[place + step], matching * matching
            votes[token] = votes.get(token, 0) + weight
            total += weight
        if len(votes) > 1:
            token = max(votes, key=votes.__getitem__)
            matches = [m for m in matches if m[0][m[1] + step] == token]
        if token == BOUNDARY:
            return draft
        survival *= votes[token] / total * chance_by_match(max(m[2] for m in matches) + step)
        draft.tokens.append(token)
        draft.survival.append(survival)
        step += 1
        matches = [m for m in matches if m[1] + step < len(m[0])]
    if matches and step < budget:
        tokens, place, matching = matches[0]
        rest = list(tokens[place + step : place + budget])
        if BOUNDARY in rest:
            del rest[rest.index(BOUNDARY) :]
        draft.tokens += rest
        for more in range(step, step + len(rest)):
            survival *= chance_by_match(matching + more)
            draft.survival.append(survival)
    return draft


def _new_index() -> Occurrences:
    return Occurrences([])
