// The request view: recent requests, each with a bar, and the phases of the selected one.

import { clockTime, count, h, percent, seconds } from "./dom.js";

/** Returns the function to call when the view is shown. The chosen request is in the address: #requests/ID. */
export function showRequests(root, feed) {
  const view = new RequestsView(root, feed);
  let newest = null;
  feed.watch(() => {
    if (root.hidden || feed.records[0] === newest) return;
    newest = feed.records[0];
    view.update();
  });
  return () => view.update();
}

class RequestsView {
  constructor(root, feed) {
    this.feed = feed;
    this.none = h("p.muted", {}, "No request has ended yet. Ask something in the chat, or call the API.");
    this.detail = h("div.detail", { "aria-live": "polite" });
    this.list = h("ol.requests", { "aria-label": "The last requests, newest first" });
    root.append(h("h1", {}, "Requests"), this.none, this.detail, this.list);
    this.list.addEventListener("keydown", (event) => this.#move(event));
  }

  update() {
    const { records } = this.feed;
    const wanted = location.hash.split("/")[1] ?? ""; // ids need no decoding: they are letters, digits and a few marks
    const chosen = records.find((record) => record.id === wanted) ?? records[0];
    this.none.hidden = records.length > 0;
    this.detail.hidden = records.length === 0;
    if (!chosen) return;
    this.detail.replaceChildren(...detailOf(chosen));
    const longest = Math.max(...records.map((record) => record.seconds));
    const focused = document.activeElement?.closest?.("[data-seq]")?.dataset.seq;
    this.list.replaceChildren(...records.map((record) => row(record, longest, record === chosen)));
    if (focused) this.list.querySelector(`[data-seq="${focused}"]`)?.focus();
  }

  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const links = [...this.list.querySelectorAll("a")];
    const next = links[links.indexOf(document.activeElement) + step];
    if (!step || !next) return;
    event.preventDefault();
    next.focus();
  }
}

/** The phases of a request, as far as they are known: [{look, name, seconds}]. */
function parts(record) {
  const { seconds: total, queue_seconds: queue, first_token_seconds: first } = record;
  if (first === null || first === undefined) return [{ look: "whole", name: "In all", seconds: total }];
  return [
    { look: "queue", name: "Queue", seconds: Math.min(queue, first) },
    { look: "prefill", name: "First token", seconds: Math.max(0, first - queue) },
    { look: "decode", name: "Answer", seconds: Math.max(0, total - first) },
  ];
}

function bar(record, whole) {
  const stack = h(
    "span.stack",
    { "aria-hidden": "true" },
    parts(record).map(({ look, seconds: size }) => {
      const part = h(`span.${look}`);
      part.style.flexGrow = (1000 * size) / (record.seconds || 1); // flex shares below 1 would not fill the bar
      return part;
    }),
  );
  stack.style.width = `${Math.max(0.5, (100 * record.seconds) / (whole || 1))}%`;
  return h("span.track", {}, stack);
}

/** The outcome of a request in a word. A stream that failed has a good status, so `outcome` takes precedence. */
function ending(record) {
  if (record.status === 499 || record.outcome === "disconnected") return ["left", "client left"];
  if (record.outcome) return ["failed", record.outcome.replaceAll("_", " ")];
  if (record.status >= 400 || !record.status) return ["failed", `error ${record.status || ""}`];
  return ["done", "done"];
}

function row(record, longest, chosen) {
  const [look, words] = ending(record);
  const link = h(
    "a",
    { href: `#requests/${record.id}`, "aria-current": chosen ? "true" : null, "data-seq": String(record.seq) },
    h("span.at", {}, clockTime(record.at)),
    h("span.path", {}, record.path),
    h(`span.ending.${look}`, {}, words),
    h(
      "span.tokens",
      {},
      record.prompt_tokens === null ? "–" : `${count(record.prompt_tokens)} → ${count(record.completion_tokens)}`,
    ),
    bar(record, longest),
    h("span.took", {}, seconds(record.seconds)),
  );
  return h("li", {}, link);
}

function detailOf(record) {
  const shares = parts(record);
  const decode = shares.find(({ look }) => look === "decode");
  const pace = decode && record.completion_tokens > 1 ? (record.completion_tokens - 1) / decode.seconds : null;
  const [, words] = ending(record);
  const facts = [
    ["Status", `${record.status} · ${words}`],
    ["Ended", clockTime(record.at)],
    ["Time", seconds(record.seconds)],
    ["Prompt", record.prompt_tokens === null ? "–" : `${count(record.prompt_tokens)} tokens`],
    [
      "From cache",
      record.prompt_tokens
        ? `${count(record.cached_tokens)} (${percent(record.cached_tokens, record.prompt_tokens)})`
        : "–",
    ],
    ["Answer", record.completion_tokens === null ? "–" : `${count(record.completion_tokens)} tokens`],
    ["Pace", pace ? `${pace.toFixed(1)} tok/s` : "–"],
  ];
  return [
    h("div.detail-head", {}, h("h2", {}, record.path), h("code", {}, record.id)),
    h(
      "div.timeline",
      { role: "img", "aria-label": shares.map(({ name, seconds: size }) => `${name} ${seconds(size)}`).join(", ") },
      bar(record, record.seconds),
    ),
    h(
      "div.legend",
      {},
      shares.map(({ look, name, seconds: size }) =>
        h(
          "span.key",
          {},
          h(`i.swatch.${look}`),
          name,
          " ",
          h("b", {}, seconds(size)),
          " ",
          h("span.muted", {}, percent(size, record.seconds)),
        ),
      ),
    ),
    h(
      "dl.facts",
      {},
      facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
  ];
}
