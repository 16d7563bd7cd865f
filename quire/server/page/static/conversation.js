// The state of a conversation: its turns, the body of the next request, and the stream of its answer.
// It does not touch the page; chat.js displays it.

import { call, events, ServerError } from "./api.js";

const STORED = "quire.conversation";

/** Turns are {role: "user", text} or {role: "assistant", text, reasoning, calls, state, ...figures} . */
export class Conversation {
  constructor() {
    this.turns = JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
    for (const turn of this.turns) if (turn.state === "waiting" || turn.state === "streaming") turn.state = "stopped";
    this.stopper = null;
  }

  get busy() {
    return this.stopper !== null;
  }

  save() {
    try {
      sessionStorage.setItem(STORED, JSON.stringify(this.turns));
    } catch {
      /* the storage is full: the conversation continues, but a reload loses it */
    }
  }

  clear() {
    this.stop();
    this.turns = [];
    this.save();
  }

  stop() {
    this.stopper?.abort();
  }

  /** Cut everything from the turn on, and return it. */
  cut(turn) {
    this.stop();
    const removed = this.turns.splice(this.turns.indexOf(turn));
    this.save();
    return removed;
  }

  /** Request the next turn. Calls `onChange(turn)` after each piece of it. */
  async answer({ fields, system, onChange }) {
    const body = { messages: this.#messages(system), ...fields, stream: true, stream_options: { include_usage: true } };
    const turn = { role: "assistant", text: "", reasoning: "", calls: [], state: "waiting", chunks: 0 };
    const started = performance.now();
    const stopper = new AbortController();
    this.stopper = stopper;
    this.turns.push(turn);
    onChange(turn);
    try {
      const reply = await call("/v1/chat/completions", { body, signal: stopper.signal });
      turn.id = reply.headers.get("x-request-id") ?? "";
      for await (const { data } of events(reply)) {
        if (data === "[DONE]") break;
        take(turn, JSON.parse(data), started);
        onChange(turn);
      }
      turn.state = "done";
    } catch (error) {
      turn.state = stopper.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") {
        turn.error = error.message;
        turn.id = error.id || turn.id;
      }
    }
    turn.took = (performance.now() - started) / 1000;
    if (this.stopper === stopper) this.stopper = null;
    this.save();
    onChange(turn);
  }

  /** The messages in OpenAI's form, without answers that failed before their first text. */
  #messages(system) {
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.role === "user") messages.push({ role: "user", content: turn.text });
      else if (turn.text || turn.calls.length) {
        const message = { role: "assistant", content: turn.text };
        if (turn.calls.length) {
          message.tool_calls = turn.calls.map(({ id, name, args }) => ({
            id,
            type: "function",
            function: { name, arguments: args || "{}" },
          }));
        }
        messages.push(message);
        for (const one of turn.calls) messages.push({ role: "tool", tool_call_id: one.id, content: one.result ?? "" });
      }
    }
    return messages;
  }
}

/** Add one chunk of the stream to the turn. */
function take(turn, chunk, started) {
  if (chunk.error) throw new ServerError(chunk.error.message, { code: chunk.error.code });
  if (chunk.usage) turn.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (content || reasoning || calls) {
    const now = (performance.now() - started) / 1000;
    turn.firstAt ??= now;
    turn.lastAt = now;
    turn.chunks += 1;
    turn.state = "streaming";
  }
  if (reasoning) turn.reasoning += reasoning;
  if (content) turn.text += content;
  for (const call of calls ?? []) {
    turn.calls[call.index] ??= { id: call.id, name: "", args: "" };
    const own = turn.calls[call.index];
    own.name += call.function.name ?? "";
    own.args += call.function.arguments ?? "";
  }
  if (choice.finish_reason) turn.reason = choice.finish_reason;
}

/** Tokens per second after the first token; while the answer streams, those of the tokens so far. */
export function pace(turn) {
  const tokens = turn.usage?.completion_tokens ?? turn.chunks;
  const time = (turn.lastAt ?? 0) - (turn.firstAt ?? 0);
  return tokens > 1 && time > 0.02 ? (tokens - 1) / time : null;
}
