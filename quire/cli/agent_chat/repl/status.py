"""The line below the prompt: model, context used, speed, and how much of the last prompt came from the cache."""

from __future__ import annotations

from dataclasses import dataclass

from quire.agent.loop.agent import Agent, TurnOutcome


@dataclass(slots=True)
class StatusLine:
    """Updated after each turn."""

    model: str = ""
    used: int = 0
    limit: int | None = None
    output_tokens: int = 0  # of the session
    tokens_per_second: float = 0.0
    cache_share: float | None = None  # of the last turn's prompts
    is_weak: bool = False  # the sandbox does not protect from everything

    def update(self, agent: Agent, outcome: TurnOutcome | None = None) -> None:
        self.model, self.limit = agent.engine.name, agent.engine.context_len
        self.used, self.output_tokens = agent.context_used(), agent.session.state.output_tokens
        self.is_weak = agent.sandbox is not None and not agent.sandbox.is_whole
        if outcome is not None and outcome.last_answer is not None:
            self.tokens_per_second = outcome.last_answer.tokens_per_second
            self.cache_share = outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else None

    def text(self) -> str:
        parts = [self.model]
        share = f" ({100 * self.used / self.limit:.0f}%)" if self.limit else ""
        of = f" of {self.limit}" if self.limit else ""
        parts.append(f"context {self.used}{of}{share}")
        if self.output_tokens:
            parts.append(f"{self.output_tokens} tokens written")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:.1f} tok/s")
        if self.cache_share is not None:
            parts.append(f"cache hit {100 * self.cache_share:.0f}%")
        if self.is_weak:
            parts.append("weak sandbox: /permissions")
        return " · ".join(parts)
