// The state of a conversation: its turns, the body of the next request, and the stream of its answer.
// It does not touch the page; chat.js displays it.

import { call, events, ServerError } from "./api.js";
import { fresh, load, opened, store } from "./archive.js";

/** Turns are {role: "user", text, files} or {role: "assistant", text, reasoning, calls, state, ...figures}. A turn with
 * versions has the id of its fork: `forks[id].tails` has the turns of each version, null for the one that is shown. */
export class Conversation {
  constructor() {
    this.stopper = null;
    this.#take(opened());
  }

  #take({ id, name, turns, forks }) {
    this.stop();
    Object.assign(this, { id, name, turns, forks: forks ?? {} });
    for (const turn of this.turns) if (turn.state === "waiting" || turn.state === "streaming") turn.state = "stopped";
  }

  /** Show a kept conversation. Returns false if it is gone. */
  open(id) {
    this.save();
    const found = load(id);
    if (found) this.#take(found);
    return found !== null;
  }

  get busy() {
    return this.stopper !== null;
  }

  save() {
    const { id, name, turns, forks } = this;
    return store({ id, name, turns, forks });
  }

  /** Leave a conversation that was deleted, so that it is not kept again. */
  forget() {
    this.stop();
    this.turns = [];
  }

  /** Begin a new conversation. The one before stays in the list. */
  begin() {
    this.save();
    this.#take(fresh());
    this.save();
  }

  stop() {
    this.stopper?.abort();
  }

  /** Make room for another version of a turn: it and what follows are kept as a version of their own. Returns the id
   * that the new version must have. */
  fork(turn) {
    this.stop();
    turn.fork ??= String(Object.keys(this.forks).length);
    const fork = (this.forks[turn.fork] ??= { tails: [null], shown: 0 });
    fork.tails[fork.shown] = this.turns.splice(this.turns.indexOf(turn));
    fork.tails.push(null);
    fork.shown = fork.tails.length - 1;
    return turn.fork;
  }

  /** The place of a turn among its versions, and how many there are. */
  versions(turn) {
    const fork = this.forks[turn.fork];
    return fork ? { at: fork.shown, count: fork.tails.length } : { at: 0, count: 1 };
  }

  /** Show another version of a turn and of what follows it. */
  switch(turn, step) {
    this.stop();
    const fork = this.forks[turn.fork];
    fork.tails[fork.shown] = this.turns.splice(this.turns.indexOf(turn));
    fork.shown = (fork.shown + step + fork.tails.length) % fork.tails.length;
    this.turns.push(...fork.tails[fork.shown]);
    fork.tails[fork.shown] = null;
    this.save();
  }

  /** Request the next turn, or with `into` the rest of an answer that was cut. Calls `onChange(turn)` after each piece
   * of it. */
  async answer({ fields, system, onChange, fork, into }) {
    const body = {
      messages: this.#messages(system),
      truncation: "auto", // a full context leaves out the oldest turns and says so, instead of ending the conversation
      ...fields,
      ...(into ? { continue_final_message: true, add_generation_prompt: false } : {}),
      stream: true,
      stream_options: { include_usage: true },
    };
    const turn = into ?? { role: "assistant", text: "", reasoning: "", calls: [], chunks: 0, fork };
    delete turn.error;
    delete turn.reason;
    Object.assign(turn, { state: "waiting", chunks: 0, firstAt: undefined, lastAt: undefined, usage: undefined });
    const started = performance.now();
    const stopper = new AbortController();
    this.stopper = stopper;
    if (!into) this.turns.push(turn);
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
      if (turn.role === "user") messages.push({ role: "user", content: withFiles(turn) });
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

/** A message with its attached files, each in a fence that the file does not hold. */
function withFiles({ text, files }) {
  const parts = (files ?? []).map(({ name, content }) => {
    const fence = "`".repeat(Math.max(2, ...(content.match(/`+/g) ?? []).map((run) => run.length)) + 1);
    return `${name}:\n${fence}\n${content}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
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
