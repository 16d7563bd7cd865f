"""Drafts of tokens that a grammar forces, so that a JSON skeleton or a tool call's markers take one step in all."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.grammar.matcher import Grammar
from quire.engine.speculation.seam import NO_DRAFT, Draft
from quire.types import Request


class ForcedProposer:
    """Implements `Proposer`. Its drafts are certain."""

    name = "grammar"

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        return [self._propose(request, budget) for request in requests]

    def end(self, request: Request) -> None:
        pass

    def _propose(self, request: Request, budget: int) -> Draft:
        if not isinstance(request.grammar, Grammar):
            return NO_DRAFT
        forced = request.grammar.forced_tokens(request.tokens, request.prompt_len)[:budget]
        return Draft(forced, [1.0] * len(forced), self.name)


def cut_to_grammar(request: Request, drafts: list[int]) -> list[int]:
    """Return the drafts before the first one that the request's grammar forbids, which can't be accepted."""
    if not isinstance(request.grammar, Grammar):
        return drafts
    return drafts[: request.grammar.count_allowed(request.tokens, request.prompt_len, drafts)]
