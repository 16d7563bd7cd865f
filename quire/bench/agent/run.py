"""Replays a session against an engine: each request with the messages it had, after the time its tools took.

A model writes other words than those of the trace, so the next request continues with the recorded ones: the cached
prefix of a request can be at most the prompt of the one before. Sessions side by side share no prefix.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from quire.agent.engines.seam import ChatEngine, ModelAnswer, Question
from quire.agent.tools.toolbox import Toolbox, choose_tools
from quire.bench.agent.trace import AgentTrace, TracedRequest
from quire.bench.stats import Bar, Report, percentiles
from quire.types import QuireError

MIN_MATCHED = 0.9  # of the prompt before, for requests after the first


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """How a trace is replayed."""

    sessions: int = 1  # side by side
    delay_scale: float = 1.0  # of the tools' times; 0: no pauses
    max_output: int | None = None  # most tokens of an answer


def bench_agent(open_engine: Callable[[], ChatEngine], trace: AgentTrace, load: AgentLoad) -> Report:
    """Replays the trace in `load.sessions` sessions at once. `open_engine` is called for each; a model in this process
    serves one session."""
    engines = [open_engine() for _ in range(load.sessions)]
    results: list[list[Report]] = [[] for _ in engines]
    errors: list[BaseException] = []

    def replay(number: int) -> None:
        try:
            _replay(engines[number], trace, load, number, results[number])
        except BaseException as error:
            errors.append(error)

    began = time.monotonic()
    if len(engines) == 1:
        replay(0)  # in the thread that can be interrupted
    else:
        threads = [threading.Thread(target=replay, args=(number,), daemon=True) for number in range(len(engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    if errors:
        raise errors[0]
    return _report(engines[0].name, trace, load, results, time.monotonic() - began)


def _replay(engine: ChatEngine, trace: AgentTrace, load: AgentLoad, number: int, results: list[Report]) -> None:
    known = {tool.name: tool for tool in choose_tools(["all", "web_fetch"])}
    tools = Toolbox([known[name] for name in trace.tools if name in known]).schemas() if engine.takes_tools else []
    for request in trace.requests:
        time.sleep(request.delay * load.delay_scale)
        tokens = min(request.output_tokens, load.max_output or request.output_tokens)
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        question = Question(_apart(request, number), tools, strict=False, sampling=sampling)
        answer = _ask(engine, question)
        engine.keep(question)
        results.append(_figures(request, answer, results[-1] if results else None))


def _apart(request: TracedRequest, number: int) -> list[dict[str, Any]]:
    """The messages with a first word of its own for each session but the first, so that no two share a prefix."""
    if not number:
        return request.messages
    first, *rest = request.messages
    return [{**first, "content": f"({number}) {first.get('content') or ''}"}, *rest]


def _ask(engine: ChatEngine, question: Question) -> ModelAnswer:
    with closing(engine.ask(question)) as stream:
        while True:
            try:
                next(stream)
            except StopIteration as ended:
                answer: ModelAnswer = ended.value
                return answer


def _figures(request: TracedRequest, answer: ModelAnswer, before: Report | None) -> Report:
    possible = min(before["prompt_tokens"], answer.prompt_tokens) if before is not None else 0
    return {
        "turn": request.turn,
        "after_tools": request.is_follow_up,
        "delay_s": request.delay,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "matched": min(1.0, answer.cached_tokens / possible) if possible else None,  # of the prompt before
        "output_tokens": answer.output_tokens,
        "ttft_s": answer.first_token_seconds,
        "seconds": answer.seconds,
        "tokens_per_s": answer.tokens_per_second,
    }


def _report(model: str, trace: AgentTrace, load: AgentLoad, results: Sequence[Sequence[Report]], wall: float) -> Report:
    every = [one for session in results for one in session]
    if not every:
        raise QuireError("bench_failed", "No request was answered.")
    first = [session[0]["ttft_s"] for session in results]
    later = [one["ttft_s"] for session in results for one in session[1:]]
    possible = [(one["matched"], one["prompt_tokens"]) for one in every if one["matched"] is not None]
    weight = sum(tokens for _, tokens in possible)
    matched = sum(share * tokens for share, tokens in possible) / weight if weight else None
    knows_cache = any(one["cached_tokens"] for one in every)
    bars = (
        [Bar("prefix of the request before that was matched", matched, MIN_MATCHED, "at least")]
        if (matched is not None and knows_cache)
        else []
    )
    return {
        "benchmark": "agent",
        "model": model,
        "trace": trace.name,
        "sessions": load.sessions,
        "delay_scale": load.delay_scale,
        "wall_s": wall,
        "requests": [one for session in results for one in session],
        "first_ttft_s": percentiles(first),
        "later_ttft_s": percentiles(later),
        "matched": matched if knows_cache else None,
        "computed_tokens": sum(one["prompt_tokens"] - one["cached_tokens"] for one in every),
        "prompt_tokens": sum(one["prompt_tokens"] for one in every),
        "output_tokens": sum(one["output_tokens"] for one in every),
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }
