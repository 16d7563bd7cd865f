// The elements of a conversation's turns: created once and updated while an answer streams.

import { pace } from "./conversation.js";
import { copyText, count, h, seconds } from "./dom.js";
import { renderInto } from "./markdown.js";

const REASONS = { length: "cut at the token limit", tool_calls: "asks for a tool", content_filter: "filtered" };

export function userTurn(turn, actions) {
  const copy = h("button.quiet.small", { type: "button", onclick: () => copyText(turn.text, copy) }, "Copy");
  const edit = h("button.quiet.small", { type: "button", onclick: () => actions.edit(turn) }, "Edit");
  const files = (turn.files ?? []).map(({ name }) => h("span.chip", {}, name));
  const element = h(
    "article.turn.user",
    { "aria-label": "You" },
    h("div.said", {}, files, turn.text),
    h("footer", {}, versionButtons(turn, actions), copy, edit),
  );
  return { element, update() {} };
}

/** Buttons that switch between the versions of a turn, if there are several. */
function versionButtons(turn, actions) {
  const { at, count: total } = actions.versions(turn);
  if (total < 2) return null;
  const button = (sign, label, step) =>
    h(
      "button.quiet.small",
      { type: "button", "aria-label": label, onclick: () => actions.switch(turn, step) },
      sign,
    );
  return h(
    "span.versions",
    {},
    button("‹", "Version before", -1),
    `${at + 1} of ${total}`,
    button("›", "Next version", 1),
  );
}

/** The element at the end of a text, where the caret belongs. */
function lastBlock(element) {
  const inner = element.lastElementChild;
  const goesOn = inner && /^(P|UL|OL|LI|DIV|PRE|CODE|BLOCKQUOTE|H[1-6])$/.test(inner.tagName);
  const isInline = inner?.tagName === "CODE" && element.tagName !== "PRE";
  return goesOn && !isInline && !inner.classList.contains("caret") ? lastBlock(inner) : element;
}

export class AnswerTurn {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.reasoning = h("div.reasoning-text");
    this.summary = h("summary");
    this.fold = h("details.reasoning", { hidden: true }, this.summary, this.reasoning);
    this.body = h("div.markdown");
    this.calls = h("div.calls");
    this.problem = h("div.problem", { role: "alert", hidden: true });
    this.figures = h("span.turn-figures");
    const copy = h(
      "button.quiet.small",
      { type: "button", onclick: () => copyText(turn.text || turn.reasoning, copy) },
      "Copy",
    );
    const retry = h("button.quiet.small", { type: "button", onclick: () => actions.retry(turn) }, "Retry");
    this.copy = copy;
    this.resume = h(
      "button.quiet.small",
      { type: "button", hidden: true, onclick: () => actions.resume(turn) },
      "Continue",
    );
    this.buttons = h("span.turn-buttons", {}, versionButtons(turn, actions), copy, this.resume, retry);
    this.dropped = h("p.dropped", { role: "status", hidden: true });
    this.caret = h("span.caret", { "aria-hidden": "true" });
    this.element = h(
      "article.turn.assistant",
      { "aria-label": "Answer" },
      this.dropped,
      this.fold,
      this.body,
      this.calls,
      this.problem,
      h("footer", {}, this.figures, this.buttons),
    );
    this.update();
  }

  update() {
    const { turn } = this;
    const live = turn.state === "waiting" || turn.state === "streaming";
    this.element.setAttribute("aria-busy", String(live));
    this.element.dataset.state = turn.state;
    this.caret.remove();
    renderInto(this.body, turn.text, live);
    if (live) lastBlock(this.body).append(this.caret);
    const left = turn.usage?.dropped_messages;
    this.dropped.hidden = !left;
    this.dropped.textContent = `The context is full: the oldest ${left === 1 ? "message was" : `${left} messages were`} left out.`;
    const wasCut = turn.reason === "length" || turn.state === "stopped";
    this.resume.hidden = !(wasCut && turn.text.trim() && this.actions.isLast(turn));
    this.#showReasoning(live);
    this.#showCalls(live);
    this.problem.hidden = turn.state !== "failed";
    this.problem.replaceChildren(
      h("p", {}, turn.error ?? ""),
      ...(turn.id ? [h("p.muted.small", {}, "Request ", h("code", {}, turn.id))] : []),
    );
    this.buttons.hidden = live;
    this.copy.hidden = !turn.text && !turn.reasoning;
    this.figures.replaceChildren(...this.#figures());
  }

  #showReasoning(live) {
    const { turn } = this;
    this.fold.hidden = !turn.reasoning;
    if (!turn.reasoning) return;
    this.summary.textContent = live && !turn.text && !turn.calls.length ? "Thinking…" : "Reasoning";
    renderInto(this.reasoning, turn.reasoning, live);
  }

  #showCalls(live) {
    const { turn } = this;
    if (!turn.calls.length) return;
    if (this.callsFor === `${live}` && !live) return; // the user may be typing results, so keep the fields
    this.callsFor = `${live}`;
    const answerable = !live && this.actions.isLast(turn);
    this.calls.replaceChildren(...turn.calls.map((call) => callBlock(call, answerable)));
    if (answerable) {
      this.calls.append(
        h(
          "button.primary",
          { type: "button", onclick: () => this.actions.sendResults(turn) },
          turn.calls.length > 1 ? "Send results" : "Send result",
        ),
      );
    }
  }

  #figures() {
    const { turn } = this;
    if (turn.state === "waiting") return ["Waiting for the first token"];
    const speed = pace(turn);
    const parts = [];
    if (turn.usage) parts.push(`${count(turn.usage.completion_tokens)} tokens`);
    if (speed) parts.push(`${speed.toFixed(1)} tok/s`);
    if (turn.firstAt !== undefined) parts.push(`first token ${seconds(turn.firstAt)}`);
    const cached = turn.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${count(cached)} of ${count(turn.usage.prompt_tokens)} cached`);
    if (turn.state === "stopped") parts.push("stopped");
    if (REASONS[turn.reason]) parts.push(REASONS[turn.reason]);
    return parts.map((part) => h("span", {}, part));
  }
}

/** A tool call with its arguments, laid out if they are whole, and a place for its result. */
function callBlock(call, answerable) {
  let args = call.args;
  try {
    args = JSON.stringify(JSON.parse(call.args), null, 2);
  } catch {
    /* still arriving */
  }
  const block = h(
    "div.call",
    {},
    h("div.code-head", {}, h("span", {}, "Tool call ", h("b", {}, call.name))),
    h("pre", { tabindex: "0" }, h("code", {}, args)),
  );
  if (answerable) {
    const field = h("textarea", {
      rows: "2",
      placeholder: "What the tool returned",
      "aria-label": `Result of ${call.name}`,
    });
    field.value = call.result ?? "";
    field.addEventListener("input", () => {
      call.result = field.value;
    });
    block.append(field);
  } else if (call.result !== undefined) {
    block.append(h("div.call-result", {}, h("span.muted.small", {}, "Result"), h("pre", {}, call.result)));
  }
  return block;
}
