// The live feed: keeps one stream to the server open while the page is visible, and computes rates from its counters.

import { call, events } from "./api.js";

export const WINDOW = 300; // seconds that are kept and plotted
const RECENT = 15; // seconds over which percentiles are taken
const KEPT_RECORDS = 200;
const KEPT_STEPS = 256;

export class Feed {
  constructor() {
    this.hello = null;
    this.samples = []; // as sent by the server
    this.points = []; // per sample: rates since the previous one
    this.steps = []; // the last steps: [number, rows, rows of prompts, tokens, tokens of prompts]
    this.open = []; // open requests
    this.records = []; // requests that ended, newest first
    this.problem = null; // the server's problem, if the feed has no samples
    this.state = "waiting";
    this.why = "";
    this.watchers = new Set();
    this.stopper = null;
  }

  watch(watcher) {
    this.watchers.add(watcher);
  }

  start() {
    document.addEventListener("visibilitychange", () => {
      if (document.hidden)
        this.stopper?.abort(); // the page is hidden: close the stream
      else this.restart();
    });
    this.restart();
  }

  restart() {
    this.stopper?.abort();
    this.stopper = new AbortController();
    this.#run(this.stopper.signal);
  }

  async #run(signal) {
    for (let failures = 0; !signal.aborted; failures += 1) {
      try {
        for await (const { name, data } of events(await call("/live", { signal }))) {
          failures = 0;
          this.#take(name, JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) return this.#say("locked", error.message);
        this.#say("lost", error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, Math.min(10, 1 + failures) * 1000));
    }
  }

  #say(state, why) {
    this.state = state;
    this.why = why;
    for (const watcher of this.watchers) watcher();
  }

  #take(name, data) {
    if (name === "hello") this.#begin(data);
    else if (name === "samples") this.#addSamples(data);
    else if (name === "steps") this.#addSteps(data);
    else if (name === "open") {
      this.open = data;
      const last = this.samples.at(-1); // the last event of a tick
      const whole = this.hello.whole;
      const busy = whole ? last?.running + last?.waiting + last?.held > 0 : data.length > 0;
      const problem = whole ? last?.problem : this.problem;
      this.#say(problem ? "problem" : busy ? "busy" : "ok", problem ?? "");
    } else if (name === "state") this.problem = data.problem;
    else if (name === "requests") this.#addRecords(data);
    else if (name === "bye") this.#say("lost", data.why);
  }

  #begin(hello) {
    if (this.hello && (this.hello.started !== hello.started || this.hello.whole !== hello.whole)) {
      // the server was restarted, or the view changed: counters start again
      this.samples = [];
      this.points = [];
      this.steps = [];
      this.records = [];
    }
    this.hello = hello;
  }

  #addSamples(samples) {
    for (const sample of samples) {
      if (this.samples.length && sample.t <= this.samples.at(-1).t) continue;
      this.samples.push(sample);
      this.points.push(this.#point());
    }
    while (this.samples.length && this.samples[0].t < this.samples.at(-1).t - WINDOW - RECENT) {
      this.samples.shift();
      this.points.shift();
    }
  }

  #addSteps(steps) {
    if (this.steps.length && steps[0][0] <= this.steps.at(-1)[0]) this.steps = []; // the engine was replaced
    this.steps = [...this.steps, ...steps].slice(-KEPT_STEPS);
  }

  #addRecords(records) {
    const newest = this.records[0]?.seq ?? 0;
    this.records = [...records.filter((record) => record.seq > newest).reverse(), ...this.records].slice(
      0,
      KEPT_RECORDS,
    );
  }

  /** The point of the plots between the last two samples. */
  #point() {
    const now = this.samples.at(-1);
    const before = this.samples.at(-2);
    const point = { t: now.t, running: now.running, waiting: now.waiting + now.held, ...fullest(now.groups) };
    // A gap, or a new engine whose counters start again.
    if (!before || now.t - before.t > 5 || now.steps < before.steps)
      return { ...point, gap: true, ...NO_RATES, ttft: [null, null], tpot: [null, null] };
    const past = this.samples.find((sample) => sample.t >= now.t - RECENT);
    return {
      ...point,
      gap: false,
      ...rates(before, now, this.points.at(-1)),
      ttft: [0.5, 0.95].map((share) => quantile(share, past.ttft, now.ttft, this.hello.ttft_bounds)),
      tpot: [0.5, 0.95].map((share) => quantile(share, past.tpot, now.tpot, this.hello.tpot_bounds)),
    };
  }
}

const NO_RATES = { rate: null, prompt: null, decode: null, busy: null, verified: null, accepted: null };

/** Counters of two samples as rates over the engine's own time: its beats may arrive late, and several at once. */
export function rates(before, now, last) {
  const time = now.at - before.at;
  const steps = now.steps - before.steps;
  if (time < 0.05 && !steps && last.rate !== null && now.beat_age < 2) {
    const { rate, prompt, decode, busy, verified, accepted } = last; // no newer sample: keep the last values
    return { rate, prompt, decode, busy, verified, accepted };
  }
  const prompt = now.prompt_tokens - before.prompt_tokens;
  return {
    rate: time > 0 ? (now.sampled_tokens - before.sampled_tokens) / time : 0,
    prompt: steps ? prompt / steps : 0,
    decode: steps ? (now.computed_tokens - before.computed_tokens - prompt) / steps : 0,
    busy: time > 0 ? Math.min(1, (now.busy_seconds - before.busy_seconds) / time) : 0,
    verified: time > 0 ? (drafts(now, "verified") - drafts(before, "verified")) / time : 0,
    accepted: time > 0 ? (drafts(now, "accepted") - drafts(before, "accepted")) / time : 0,
  };
}

/** A counter of drafts over all proposers and positions; null without speculation. */
function drafts(sample, name) {
  if (!sample.speculation) return null;
  const counts = Object.values(sample.speculation.proposers).flatMap((proposer) => proposer[name]);
  return counts.reduce((sum, count) => sum + count, 0);
}

/** How full the fullest group is, in shares; `cached` is null if the engine does not report it. */
function fullest(groups) {
  const shares = groups.map(({ units, available, cached }) => ({
    used: 1 - available / units,
    cached: cached === undefined ? null : cached / units,
  }));
  return shares.sort((one, other) => other.used - one.used)[0] ?? { used: null, cached: null };
}

/** The quantile `share` of the observations between two states of a cumulative histogram. */
export function quantile(share, before, after, bounds) {
  const counts = after.map((value, place) => value - before[place]);
  const total = counts.at(-1);
  if (total <= 0) return null;
  const rank = share * total;
  const place = counts.findIndex((value) => value >= rank);
  if (place >= bounds.length) return bounds.at(-1); // above the last bound, which is the best estimate
  const [low, below] = place ? [bounds[place - 1], counts[place - 1]] : [0, 0];
  return low + ((bounds[place] - low) * (rank - below)) / (counts[place] - below || 1);
}
