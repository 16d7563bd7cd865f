"""`Agent`: one session's loop. It asks the engine, runs the calls in the answer, and asks again until there are none.

Front ends call `take` for each message of the user and watch events. Ctrl-C ends the turn at any moment; the session
stays, with all that was said and done until then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from quire.agent.engines.seam import ChatEngine, ModelAnswer, Question, TextPiece
from quire.agent.hooks import ToolHooks
from quire.agent.loop import compaction, events
from quire.agent.loop.calls import CallRunner
from quire.agent.loop.prompt import describe_tools
from quire.agent.permissions import Permissions
from quire.agent.repair.reading import CallReading, ReadyCall, explain_problem, read_answer
from quire.agent.sandbox.choose import Sandbox
from quire.agent.session.log import SessionLog
from quire.agent.session.records import Record, without_orphans
from quire.agent.tools.seam import ToolResult
from quire.agent.tools.toolbox import Toolbox
from quire.types import PromptTooLong, QuireError

MAX_CORRECTIONS = 2  # maximum number of consecutive answers with malformed calls that the model may correct
_ROOM_SHARE = 4  # a quarter of the context is kept free for an answer, at most MAX_ROOM
MAX_ROOM = 4096


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Bounds on one turn of the user."""

    max_requests: int = 50  # requests to the model
    max_output_tokens: int = 200_000


@dataclass(slots=True)
class TurnOutcome:
    """How a turn ended."""

    status: str = "completed"  # completed, interrupted, limit, failed
    text: str = ""  # text of the last answer
    error: str = ""
    error_code: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    last_answer: ModelAnswer | None = None
    new_tokens: list[int] = field(default_factory=list)  # per request: prompt tokens that were not in the cache


class Agent:
    """Takes messages of the user and works on them. One thread at a time."""

    def __init__(
        self,
        engine: ChatEngine,
        session: SessionLog,
        *,
        toolbox: Toolbox | None = None,
        permissions: Permissions | None = None,
        sandbox: Sandbox | None = None,
        hooks: ToolHooks | None = None,
        limits: AgentLimits | None = None,
        emit: Callable[[events.Event], None] = lambda event: None,
        sampling: dict[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        self.engine, self.session = engine, session
        self.toolbox = toolbox or Toolbox()
        self.permissions = permissions or Permissions()
        self.sandbox = sandbox
        self.limits = limits or AgentLimits()
        self.sampling = sampling or {}
        self.strict = strict
        self.items = events.ItemStream(emit)
        self.calls = CallRunner(
            self.toolbox, self.permissions, sandbox, hooks or ToolHooks(), self.items, self._max_result()
        )
        self._turn = TurnOutcome()

    # -- one turn -------------------------------------------------------------------------------------------------

    def take(self, text: str) -> TurnOutcome:
        """Works on one message of the user until the model answers without a call."""
        self._turn = TurnOutcome()
        try:
            self.session.add({"type": "message", "message": {"role": "user", "content": text}})
            self.items.event(events.TURN_STARTED)  # once it is seen, a kill no longer loses the message
            self._work()
        except KeyboardInterrupt:
            self._turn.status = "interrupted"
        except QuireError as error:
            self._turn.status, self._turn.error, self._turn.error_code = "failed", str(error), error.code
        self._end_turn()
        return self._turn

    def _work(self) -> None:
        corrections, pinned_tool = 0, None
        while True:
            if self._turn.requests >= self.limits.max_requests:
                self._stop(f"the limit of {self.limits.max_requests} requests to the model for one turn")
                return
            if self._turn.output_tokens >= self.limits.max_output_tokens:
                self._stop(f"the limit of {self.limits.max_output_tokens} tokens for one turn")
                return
            self._make_room()
            answer = self._ask_or_compact(pinned_tool or "auto")
            reading = read_answer(answer, self.toolbox.schemas())
            if reading.problem:
                corrections += 1
                self._keep_malformed(answer, reading, last=corrections > MAX_CORRECTIONS)
                if corrections > MAX_CORRECTIONS:
                    what = f"The model's tool calls can't be read: {reading.problem}."
                    raise QuireError("malformed_calls", what, "Ask in other words, or use a larger model.")
                pinned_tool = reading.tool if self.strict else None
                continue
            corrections, pinned_tool = 0, None
            self._keep_answer(answer, reading)
            if not reading.calls:
                self._turn.text = reading.text
                return
            if not self._run(reading.calls):
                self._turn.status = "interrupted"
                return

    def _stop(self, limit: str) -> None:
        self._turn.status = "limit"
        self._turn.error = f"The turn was ended by {limit}."

    def _end_turn(self) -> None:
        turn = self._turn
        state = self.session.state
        if state.partial or state.partial_reasoning:
            for record in state.closing_records():
                self.session.add(record)
        for call_id in state.open_calls():
            self.session.add({"type": "result", "id": call_id, "content": "The user interrupted this call."})
        self.session.add({"type": "turn", "status": turn.status, "error": turn.error})
        self.session.sync()
        usage = {
            "input_tokens": turn.prompt_tokens,
            "cached_input_tokens": turn.cached_tokens,
            "output_tokens": turn.output_tokens,
        }
        if turn.status == "completed":
            self.items.event(events.TURN_COMPLETED, usage=usage)
        else:
            message = turn.error or "The user interrupted the turn."
            self.items.event(events.TURN_FAILED, error={"message": message, "status": turn.status}, usage=usage)

    # -- asking ---------------------------------------------------------------------------------------------------

    def _question(self, *, tool_choice: str = "auto", messages: list[Record] | None = None) -> Question:
        context = self.session.state.context() if messages is None else messages
        schemas = self.toolbox.schemas()
        if schemas and not self.engine.takes_tools:
            context = _with_tools_in_prompt(context, describe_tools(schemas))
        return Question(context, schemas, tool_choice, self.strict, self.sampling)

    def _ask_or_compact(self, tool_choice: str) -> ModelAnswer:
        """Asks, and once more after compacting where a server says that the context is full: not all say before how
        much it holds."""
        try:
            return self._ask(self._question(tool_choice=tool_choice))
        except QuireError as error:
            if error.code != "context_full" or not self.compact():
                raise
        return self._ask(self._question(tool_choice=tool_choice))

    def _ask(self, question: Question) -> ModelAnswer:
        """Streams one answer. Text that has arrived is in the session's file even if the stream breaks off."""
        item: dict[str, dict[str, Any]] = {}
        self._turn.requests += 1
        with closing(self.engine.ask(question)) as stream:
            while True:
                try:
                    piece = next(stream)
                except StopIteration as ended:
                    answer: ModelAnswer = ended.value
                    break
                kind = "agent_message" if isinstance(piece, TextPiece) else "reasoning"
                if kind not in item:
                    item[kind] = self.items.start(kind, text="")
                self.session.add({"type": "delta", "text" if kind == "agent_message" else "reasoning": piece.text})
                self.items.update(item[kind], delta=piece.text)
        for kind, text in (("reasoning", answer.reasoning), ("agent_message", answer.content)):
            if kind in item:
                self.items.complete(item[kind], text=text)
        turn = self._turn
        turn.last_answer = answer
        turn.prompt_tokens += answer.prompt_tokens
        turn.cached_tokens += answer.cached_tokens
        turn.output_tokens += answer.output_tokens
        turn.new_tokens.append(answer.prompt_tokens - answer.cached_tokens)
        return answer

    def _keep_answer(self, answer: ModelAnswer, reading: CallReading) -> None:
        message: Record = {"role": "assistant", "content": reading.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if reading.calls:
            message["tool_calls"] = [_as_message(call) for call in reading.calls]
        record = {"type": "message", "message": message, "usage": _usage(answer), "finish": answer.finish_reason}
        self.session.add({**record, "repaired": True} if reading.was_repaired else record)
        self.engine.keep(self._question())

    def _keep_malformed(self, answer: ModelAnswer, reading: CallReading, *, last: bool) -> None:
        """Keeps a malformed answer as text, and the words that tell the model what was wrong."""
        text = "\n".join([answer.content, *(f"{call.name}({call.arguments})" for call in answer.calls)]).strip()
        message = {"role": "assistant", "content": text}
        self.session.add({"type": "message", "message": message, "usage": _usage(answer), "malformed": reading.problem})
        self.items.note(f"the model's tool call was malformed: {reading.problem}")
        told = {"role": "user", "content": explain_problem(reading), "agent": True}
        if not last:
            self.session.add({"type": "message", "message": told})

    # -- calls ----------------------------------------------------------------------------------------------------

    def _run(self, calls: list[ReadyCall]) -> bool:
        def on_start(call: ReadyCall) -> None:
            self.session.add({"type": "call", "id": call.id, "name": call.name, "arguments": call.arguments})

        def on_end(call: ReadyCall, result: ToolResult) -> None:
            record = {"type": "result", "id": call.id, "name": call.name, "content": result.content}
            details = {"error": result.is_error, "exit": result.exit_code, "seconds": round(result.seconds, 4)}
            self.session.add({**record, **details})

        return self.calls.run(calls, on_start, on_end)

    def _max_result(self) -> int:
        """Characters of one result: at most about a quarter of the context."""
        context = self.engine.context_len
        return 30_000 if context is None else max(1000, min(30_000, context * compaction.CHARACTERS_PER_TOKEN // 4))

    # -- room -----------------------------------------------------------------------------------------------------

    def context_used(self) -> int:
        """Returns the tokens of the next prompt, counted where the engine can, else estimated."""
        question = self._question()
        try:
            counted = self.engine.count(question)
        except PromptTooLong as error:
            return error.count
        if counted is not None:
            return counted
        last = self.session.state.last_usage
        known = int(last.get("prompt_tokens") or 0) + int(last.get("output_tokens") or 0)
        return max(known, compaction.estimate_tokens(question.messages, question.tools))

    def _make_room(self) -> None:
        limit = self.engine.context_len
        if limit is None:
            return
        wanted = min(int(self.sampling.get("max_tokens") or MAX_ROOM), MAX_ROOM, limit // _ROOM_SHARE)
        while self.context_used() + wanted > limit:
            if not self.compact():
                return  # the engine reports that the prompt does not fit

    def compact(self, kept_turns: int = compaction.KEPT_TURNS) -> bool:
        """Replaces old turns by a summary of the model's. Returns False if there is nothing to replace."""
        place = compaction.cut_place(self.session.state, kept_turns)
        if place is None:
            return False
        summary = self._summary(place)
        before = self.context_used()
        self.session.add({"type": "summary", "text": summary, "messages": place})
        self.items.note(f"the context was compacted from {before} to {self.context_used()} tokens")
        return True

    def _summary(self, place: int) -> str:
        state = self.session.state
        head = state.context()[: len(state.context()) - len(state.messages) + place]
        ask = {"role": "user", "content": compaction.ASK_FOR_SUMMARY}
        limit = self.engine.context_len or 1 << 30
        longest = 1 << 20
        for _ in range(8):
            messages = [*compaction.shorten_results(head, longest), ask]
            question = self._question(tool_choice="none", messages=messages)
            try:
                counted = self.engine.count(question)
            except PromptTooLong as error:
                counted = error.count
            size = counted if counted is not None else compaction.estimate_tokens(messages, question.tools)
            if size + min(1024, limit // 4) <= limit:
                break
            longest = min(longest, 8000) // 2
            if longest < 400:  # no long results fill the context: drop the oldest messages
                head = without_orphans(head[:1] + head[1 + max(1, len(head) // 3) :])
                longest = 400
        answer = self._ask_quietly(question)
        return answer.content.strip() or "(The model wrote no summary.)"

    def _ask_quietly(self, question: Question) -> ModelAnswer:
        with closing(self.engine.ask(question)) as stream:
            while True:
                try:
                    next(stream)
                except StopIteration as ended:
                    answer: ModelAnswer = ended.value
                    self._turn.output_tokens += answer.output_tokens
                    return answer

    # -- taking back ----------------------------------------------------------------------------------------------

    def undo(self) -> str | None:
        """Takes the last message of the user and all after it out of the conversation. Returns its text."""
        index = self.session.state.last_user_index()
        if index is None:
            return None
        text = str(self.session.state.messages[index].get("content"))
        self.session.add({"type": "undo", "messages": index})
        return text

    def reset(self) -> None:
        """Forgets the conversation. Its records stay in the session's file."""
        self.session.add({"type": "reset"})

    def set_system(self, text: str) -> None:
        self.session.add({"type": "system", "text": text})

    def switch_model(self, name: str) -> None:
        self.engine.switch(name)
        self.session.add({"type": "model", "name": name})

    def open_session(self, session: SessionLog) -> None:
        """Goes on with another session; the one that was open is closed."""
        self.close_session()
        self.session = session

    def close_session(self) -> None:
        """Closes the session's file; one in which nothing was said is removed."""
        if not self.session.state.num_turns and not self.session.state.messages:
            self.session.path.unlink(missing_ok=True)
        self.session.close()


def _as_message(call: ReadyCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _usage(answer: ModelAnswer) -> Record:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        "first_token": round(answer.first_token_seconds, 4),
        "seconds": round(answer.seconds, 4),
    }


def _with_tools_in_prompt(context: list[Record], described: str) -> list[Record]:
    """Returns the conversation for a model whose chat template knows no tools: they stand in the system message, calls
    and results are plain messages."""
    messages: list[Record] = []
    for message in context:
        if message["role"] == "tool":
            messages.append({"role": "user", "content": f"Result: {message.get('content') or ''}"})
        elif message.get("tool_calls"):
            calls = [
                json.dumps({"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])})
                for call in message["tool_calls"]
            ]
            messages.append({"role": "assistant", "content": "\n".join([message.get("content") or "", *calls]).strip()})
        else:
            messages.append(message)
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": messages[0]["content"] + described}, *messages[1:]]
    return [{"role": "system", "content": described.strip()}, *messages]
