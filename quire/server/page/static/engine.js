// The engine view: running and waiting requests, and plots of the last minutes.

import { count, h, percent, seconds, short } from "./dom.js";
import { TimePlot } from "./plot.js";
import { StepBars } from "./steps.js";

/** Returns the function to call when the view is shown. */
export function showEngine(root, feed) {
  const view = new EngineView(root);
  const update = () => {
    if (!root.hidden) view.update(feed);
  };
  feed.watch(update);
  return update;
}

class EngineView {
  constructor(root) {
    this.figures = Object.fromEntries(
      ["running", "waiting", "rate", "hits", "drafts", "preemptions", "failures"].map((name) => [name, figure()]),
    );
    const { running, waiting, rate, hits, drafts, preemptions, failures } = this.figures;
    this.problem = h("p.problem", { role: "alert", hidden: true });
    this.cache = h("div.cache");
    this.tierRows = h("tbody");
    this.tiers = tierTable(this.tierRows);
    this.open = h("tbody");
    this.noneOpen = h("p.muted", {}, "Nothing runs at the moment.");
    this.openTable = h(
      "div.table",
      { tabindex: "0" },
      h(
        "table.figures-table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "Request"),
            h("th", {}, "State"),
            h("th.right", {}, "Prompt"),
            h("th.right", {}, "Output"),
            h("th.right", {}, "Age"),
          ),
        ),
        this.open,
      ),
    );
    this.plots = plots();
    this.steps = new StepBars();
    this.locked = h(
      "div.locked",
      { hidden: true },
      h("p", {}, "What the engine does concerns all clients, so it takes the admin key. Requests shows your own."),
      h("button.primary", { type: "button", onclick: () => document.getElementById("key").click() }, "Give a key"),
    );
    this.all = h("div.all");
    root.append(h("h1", {}, "Engine"), this.problem, this.locked, this.all);
    this.all.append(
      h(
        "dl.figures",
        {},
        running.as("Running", "Requests that the engine computes at this moment"),
        waiting.as("Waiting", "Requests in the queue"),
        rate.as("Output tok/s", "Tokens of answers per second, all requests together"),
        hits.as("Cache hit rate", "Share of prompt tokens that were computed for an earlier request"),
        drafts.as("Drafts accepted", "Share of the guessed tokens that were right, so that a step gave several tokens"),
        preemptions.as("Preemptions", "Requests set aside for a while because memory or rows were short"),
        failures.as("Failures", "Requests that failed through no fault of the client"),
      ),
      this.steps.element,
      h(
        "div.plots",
        {},
        this.plots.map((plot) => plot.element),
      ),
      h("h2", {}, "Cache"),
      this.cache,
      this.tiers,
      h("h2", {}, "Open requests"),
      this.noneOpen,
      this.openTable,
    );
  }

  update(feed) {
    this.locked.hidden = feed.hello?.whole !== false;
    this.all.hidden = !this.locked.hidden;
    const now = feed.samples.at(-1);
    if (!now || this.all.hidden) return;
    const point = feed.points.at(-1);
    this.problem.hidden = !["problem", "lost"].includes(feed.state);
    if (this.problem.textContent !== feed.why) this.problem.textContent = feed.why; // announced each time it is set
    this.#tellFigures(feed, now, point);
    for (const plot of this.plots) plot.update(feed.points);
    this.steps.update(feed.steps);
    this.cache.replaceChildren(...now.groups.map(cacheBar));
    this.tiers.hidden = !now.tiers?.length;
    this.tierRows.replaceChildren(...(now.tiers ?? []).map(tierRow));
    this.noneOpen.hidden = feed.open.length > 0;
    this.openTable.hidden = feed.open.length === 0;
    this.open.replaceChildren(...feed.open.map(openRow));
  }

  #tellFigures(feed, now, point) {
    const { running, waiting, rate, hits, drafts, preemptions, failures } = this.figures;
    const first = feed.samples[0];
    const lookedUp = now.lookup_tokens - first.lookup_tokens;
    const recent = lookedUp
      ? `${percent(now.hit_tokens - first.hit_tokens, lookedUp)} lately`
      : `${short(now.hit_tokens)} tokens reused`;
    running.tell(count(now.running), `of ${count(feed.hello.limits.max_rows)} rows`);
    waiting.tell(
      count(now.waiting + now.held),
      now.held ? `${count(now.held)} for a shared prompt` : `room for ${count(feed.hello.limits.max_waiting)}`,
    );
    const lately = feed.points.slice(-4);
    rate.tell(
      short(lately.reduce((sum, one) => sum + (one.rate ?? 0), 0) / lately.length),
      point.busy === null ? "" : `${Math.round(point.busy * 100)}% busy`,
    );
    hits.tell(percent(now.hit_tokens, now.lookup_tokens), recent);
    drafts.tell(...acceptance(now.speculation));
    preemptions.tell(count(now.preemptions), `${count(now.steps)} steps`);
    const left = now.hangups === 1 ? "1 client left early" : `${count(now.hangups)} clients left early`;
    failures.tell(count(now.failures), now.refused ? `${count(now.refused)} requests refused, ${left}` : left);
  }
}

/** A large number with a name above and a remark below. */
function figure() {
  const value = h("dd", {}, "–");
  const remark = h("dd.remark");
  return {
    as: (name, help) => h("div.figure", { title: help }, h("dt", {}, name), value, remark),
    tell(number, words) {
      value.textContent = number;
      remark.textContent = words;
    },
  };
}

/** The share of verified drafts that was accepted, and what each proposer's share of the accepted ones is. */
function acceptance(speculation) {
  if (!speculation) return ["–", "speculation is off"];
  const sum = (counts) => counts.reduce((total, one) => total + one, 0);
  const proposers = Object.entries(speculation.proposers).map(([name, counts]) => [name, sum(counts.accepted)]);
  const accepted = sum(proposers.map(([, tokens]) => tokens));
  const verified = sum(Object.values(speculation.proposers).map((counts) => sum(counts.verified)));
  const found = proposers.filter(([, tokens]) => tokens).map(([name, tokens]) => `${name} ${short(tokens)}`);
  return [percent(accepted, verified), [...found, `${speculation.speedup.toFixed(2)}× as fast`].join(", ")];
}

function plots() {
  return [
    new TimePlot({
      title: "Tokens per step",
      note: "How many tokens of prompts and of answers a step computed, on average",
      stacked: true,
      format: short,
      least: 4,
      series: [
        { name: "answers", look: "one", read: (point) => point.decode },
        { name: "prompts", look: "two", read: (point) => point.prompt },
      ],
    }),
    new TimePlot({
      title: "Drafts",
      note: "Guessed tokens that steps verified, and those that became output, per second",
      format: short,
      least: 4,
      series: [
        { name: "accepted", look: "one", read: (point) => point.accepted },
        { name: "verified", look: "two", dots: true, read: (point) => point.verified },
      ],
    }),
    new TimePlot({
      title: "Output",
      note: "Tokens sampled per second, all requests together",
      format: short,
      least: 4,
      series: [{ name: "tok/s", look: "one", read: (point) => point.rate }],
    }),
    new TimePlot({
      title: "Time to first token",
      note: "Of answers that began in the last 15 seconds",
      format: axisSeconds,
      least: 0.01,
      series: [
        { name: "median", look: "one", read: (point) => point.ttft[0] },
        { name: "p95", look: "two", dots: true, read: (point) => point.ttft[1] },
      ],
    }),
    new TimePlot({
      title: "Time per token",
      note: "After the first, of answers that ended in the last 15 seconds",
      format: axisSeconds,
      least: 0.001,
      series: [
        { name: "median", look: "one", read: (point) => point.tpot[0] },
        { name: "p95", look: "two", dots: true, read: (point) => point.tpot[1] },
      ],
    }),
    new TimePlot({
      title: "Requests",
      note: "That hold a row, and that wait for one",
      format: short,
      least: 3,
      series: [
        { name: "running", look: "one", read: (point) => point.running },
        { name: "waiting", look: "two", dots: true, read: (point) => point.waiting },
      ],
    }),
    new TimePlot({
      title: "Cache in use",
      note: "Share of the pages that requests hold, and that only the prefix cache holds",
      stacked: true,
      least: 0.05,
      format: (value) => (value === null ? "–" : `${short(value * 100)}%`),
      series: [
        { name: "requests", look: "one", read: (point) => point.used },
        { name: "cached", look: "quiet-look", read: (point) => point.cached },
      ],
    }),
  ];
}

function axisSeconds(value) {
  return value === null || value === undefined
    ? "–"
    : value === 0
      ? "0"
      : value < 1
        ? `${short(value * 1000)} ms`
        : `${short(value)} s`;
}

/** A group's units by owner. Units that only the prefix cache holds are separate if the engine reports them. */
function cacheBar(group) {
  const used = group.units - group.available;
  const cached = group.cached ?? 0;
  const free = group.available - cached;
  const parts = [
    ["used", "In use", used],
    ["cached", "Cached", group.cached],
    ["free", group.cached === undefined ? "Free or cached" : "Free", free],
  ];
  const known = parts.filter(([, , units]) => units !== undefined);
  const bar = h(
    "div.stack",
    { role: "img", "aria-label": known.map(([, name, units]) => `${name} ${units}`).join(", ") },
    known.map(([look, , units]) => {
      const part = h(`span.${look}`);
      part.style.flexGrow = units;
      return part;
    }),
  );
  return h(
    "div.cache-group",
    {},
    h(
      "div.cache-head",
      {},
      h("h3", { title: groupHelp(group.name) }, groupName(group.name)),
      h("span.muted", {}, `${count(group.units)} pages or slots`),
    ),
    bar,
    h(
      "div.legend",
      {},
      known.map(([look, name, units]) =>
        h(
          "span.key",
          {},
          h(`i.swatch.${look}`),
          name,
          " ",
          h("b", {}, count(units)),
          " ",
          h("span.muted", {}, percent(units, group.units)),
        ),
      ),
    ),
  );
}

/** A cache group's name for people. "full" alone would read as an alarm. */
function groupName(name) {
  if (name.startsWith("full")) return `Attention over the whole text${name === "full" ? "" : ` (${name})`}`;
  if (name.startsWith("window") || name.startsWith("sliding")) return `Attention over a window (${name})`;
  if (/state|mamba|delta|recurrent|conv/.test(name)) return `Recurrent state (${name})`;
  if (/latent|mla/.test(name)) return `Compressed attention (${name})`;
  return name;
}

function groupHelp(name) {
  return `The group of layers called ${name} in metrics. Cached pages are free for new requests when these need them.`;
}

/** The table of the tiers below the device, whose rows are kept up to date. */
function tierTable(rows) {
  const names = ["Tier", "Bytes", "Hits", "Loaded", "Stored", "Queued", "Dropped", "Failed"];
  const head = names.map((name, place) => h(place ? "th.right" : "th", {}, name));
  return h(
    "div.table",
    { tabindex: "0", hidden: true },
    h("table.figures-table", {}, h("thead", {}, h("tr", {}, head)), rows),
  );
}

function tierRow(tier) {
  const figures = [
    `${short(tier.num_bytes)}B`,
    count(tier.hits),
    `${short(tier.loaded_bytes)}B`,
    `${short(tier.stored_bytes)}B`,
    count(tier.queued),
    count(tier.drops),
    count(tier.failures),
  ];
  return h(
    "tr",
    {},
    h("td", {}, tier.name),
    figures.map((figure) => h("td.right", {}, figure)),
  );
}

function openRow(request) {
  return h(
    "tr",
    {},
    h("td.mono", {}, request.id),
    h("td", {}, request.output_tokens ? "answering" : "no token yet"),
    h("td.right", {}, count(request.prompt_tokens)),
    h("td.right", {}, count(request.output_tokens)),
    h("td.right", {}, seconds(request.seconds)),
  );
}
